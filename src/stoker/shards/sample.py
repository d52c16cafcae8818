"""Samples as sources list and read them, and as shard formats store them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview

NO_EXTRAS: Mapping[str, Buffer] = MappingProxyType({})


class Item(NamedTuple):
    """The location of one sample in a source, found by a scan that reads no image.

    `name` is the sample's path inside the dataset with its extension (`cat/0001.jpg`). The meaning of `file` and
    `offset` is private to the source (a tar and an offset in it, a batch and a row); `size` is in bytes. `stamp`
    changes when the sample does, where that is cheap to detect; a resumed conversion compares it.
    """

    name: str
    label: int
    size: int
    file: int = 0
    offset: int = 0
    stamp: int = 0


class Content(NamedTuple):
    """What a source reads for an item: the bytes of the image, and further members by extension."""

    image: Buffer
    extras: Mapping[str, Buffer] = NO_EXTRAS


class Sample(NamedTuple):
    """One labeled image; `extension` is that of its true format (`jpg`, `png`)."""

    key: str
    image: Buffer
    extension: str
    label: int
    extras: Mapping[str, Buffer] = NO_EXTRAS


def sample_key(name: str) -> str:
    """Return the key of the sample `name`: without extension, and without other dots in the file name.

    WebDataset readers end the key at the first dot of the file name, so `a/b.v2.jpg` becomes `a/b_v2`.
    """
    folder, slash, file = name.rpartition("/")
    stem = file.rpartition(".")[0] or file
    return folder + slash + stem.replace(".", "_")
