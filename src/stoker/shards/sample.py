"""The values that pass between sources, formats and the packer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview

NO_EXTRAS: Mapping[str, Buffer] = MappingProxyType({})


class Item(NamedTuple):
    """Where one sample lies in a source, found by a scan that reads no image.

    `name` is the sample's path inside the dataset with its extension (`cat/0001.jpg`). `file` and `offset` mean what
    the source wants them to mean (a tar and a position in it, a batch and a row); `size` weighs the sample in bytes.
    `stamp` changes when the sample does, where that can be told cheaply; a run that goes on compares it.
    """

    name: str
    label: int
    size: int
    file: int = 0
    offset: int = 0
    stamp: int = 0


class Content(NamedTuple):
    """What a source reads for an item: the image's bytes, and further members by extension."""

    image: Buffer
    extras: Mapping[str, Buffer] = NO_EXTRAS


class Sample(NamedTuple):
    """One labelled image; `kind` is the extension of its true format (`jpg`, `png`)."""

    key: str
    image: Buffer
    extension: str
    label: int
    extras: Mapping[str, Buffer] = NO_EXTRAS


def sample_key(name: str) -> str:
    """The key of a sample called `name`: no extension, and no other dot in its last part.

    Readers of WebDataset tars end the key at the first dot of the file name, so `a/b.v2.jpg` becomes `a/b_v2`.
    """
    folder, slash, file = name.rpartition("/")
    stem = file.rpartition(".")[0] or file
    return folder + slash + stem.replace(".", "_")
