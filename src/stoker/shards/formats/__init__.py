"""Shard formats: how a sample is encoded in a shard, and how it is read again.

`encode` turns a sample into chunks, which the packer joins into large writes; `iter_samples` and `parse_sample` turn
bytes back into samples. Images are never copied: encoding passes buffers through, reading returns views.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from stoker.core.registry import Registry
from stoker.errors import SourceError
from stoker.shards.sample import Buffer, Sample


class EncodedSample(NamedTuple):
    """One sample in the form of a shard; `image_offset` counts from the first byte of the sample."""

    chunks: list[Buffer]
    length: int
    image_offset: int


class LocatedSample(NamedTuple):
    """One sample of a shard with its location; all offsets count from the first byte of the shard.

    The sample's buffers are views of the shard: a memory map cannot be closed before they are released.
    """

    start: int
    end: int
    image_offset: int
    sample: Sample


class Format(Protocol):
    """A shard format; bytes that are not of the format raise SourceError and nothing else."""

    name: str
    trailer: bytes
    """The bytes after the last sample of a shard."""
    overhead: int
    """The approximate number of bytes that a sample needs in addition to its image."""

    def shard_name(self, prefix: str, split: str, number: int, total: int) -> str:
        """Return the file name of shard `number` of `total`."""
        ...

    def check_key(self, key: str) -> None:
        """Raise SourceError for a key that this format cannot store and return unchanged."""
        ...

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode one sample; equal samples give equal bytes."""
        ...

    def iter_samples(
        self, data: Buffer, where: str, *, check: bool = False, errors: list[SourceError] | None = None
    ) -> Iterator[LocatedSample]:
        """Yield every sample of a whole shard, in order; `check` also verifies all checksums.

        With `errors`, the error of an invalid sample is appended to it, and iteration continues with the next sample.
        """
        ...

    def parse_sample(self, data: Buffer, where: str, *, check: bool = False) -> Sample:
        """Parse the bytes of one sample, from `start` to `end` as `iter_samples` yields them."""
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
"""The lower-case extensions of images, each with the spelling that `Sample.extension` uses.

This is the only table of image extensions; all others derive from it.
"""

FORMATS: Registry[Format] = Registry(
    "format",
    {
        "tar": "stoker.shards.formats.tar:FORMAT",
        "tfrecord": "stoker.shards.formats.tfrecord:FORMAT",
    },
    option="--format",
)

_TFRECORD_NAME = re.compile(r"(-[0-9]{5,}-of-[0-9]{5,}|\.tfrecords?)$")


def guess_format(name: str) -> str | None:
    """Return the shard format that a file name or URL implies, or None."""
    if name.endswith(".tar"):
        return "tar"
    return "tfrecord" if _TFRECORD_NAME.search(name) else None
