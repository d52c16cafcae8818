"""Shard formats: how a sample stands in a shard, and how it is found there again.

`encode` turns a sample into chunks, which the packer joins into large writes; `walk` and `parse` turn bytes back
into samples. Neither direction copies an image here: encoding passes its buffer through, reading returns views.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from stoker.core.registry import Registry
from stoker.errors import SourceError
from stoker.shards.sample import Buffer, Sample


class EncodedSample(NamedTuple):
    """One sample as it will stand in a shard; `image_at` counts from the sample's first byte."""

    chunks: list[Buffer]
    length: int
    image_offset: int


class LocatedSample(NamedTuple):
    """One sample met while walking a shard; all offsets count from the shard's first byte.

    The sample's buffers are views into the shard: an mmap cannot be closed before they are gone.
    """

    start: int
    end: int
    image_offset: int
    sample: Sample


class Format(Protocol):
    """What a shard format offers; bytes that are not of the format raise SourceError and nothing else."""

    name: str
    trailer: bytes
    """What ends a shard after its last sample."""
    overhead: int
    """About how many bytes a sample takes beside its image."""

    def shard_name(self, prefix: str, split: str, number: int, total: int) -> str:
        """The file name of shard `number` out of `total`."""
        ...

    def check_key(self, key: str) -> None:
        """Raise SourceError for a key that no shard of this format gives back as it was."""
        ...

    def encode(self, sample: Sample) -> EncodedSample:
        """The bytes of one sample; the same sample always gives the same bytes."""
        ...

    def iter_samples(
        self, data: Buffer, where: str, *, check: bool = False, errors: list[SourceError] | None = None
    ) -> Iterator[LocatedSample]:
        """Every sample of a whole shard, in order; `check` also verifies every checksum there is.

        With `faults`, a sample that is wrong in itself goes there, and the walk goes on behind it.
        """
        ...

    def parse_sample(self, data: Buffer, where: str, *, check: bool = False) -> Sample:
        """The sample whose span (`start` to `end`, as `walk` gave it) is `data`; only `walk` knows a nameless key."""
        ...


CANONICAL_EXTENSIONS: Mapping[str, str] = {
    "jpg": "jpg",
    "jpeg": "jpg",
    "jpe": "jpg",
    "png": "png",
    "webp": "webp",
    "bmp": "bmp",
    "gif": "gif",
    "tif": "tif",
    "tiff": "tif",
    "ppm": "ppm",
    "pgm": "ppm",
    "pbm": "ppm",
}
"""The extensions, in lower case, that mark an image, each with the one spelling that `Sample.kind` uses.

The one table of extensions: what else asks whether a name is an image's derives from it.
"""

FORMATS: Registry[Format] = Registry(
    "format",
    {
        "tar": "stoker.shards.formats.tar:FORMAT",
        "tfrecord": "stoker.shards.formats.tfrecord:FORMAT",
    },
)

_TFRECORD_NAME = re.compile(r"(-[0-9]{5,}-of-[0-9]{5,}|\.tfrecords?)$")


def guess_format(name: str) -> str | None:
    """The format that a shard's file name (or URL) promises, None when it promises none."""
    if name.endswith(".tar"):
        return "tar"
    return "tfrecord" if _TFRECORD_NAME.search(name) else None
