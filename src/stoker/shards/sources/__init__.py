"""Sources: dataset formats that can be converted; each lists its samples cheaply and reads them on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from stoker.core.registry import Registry
from stoker.errors import NotFoundError, SourceError
from stoker.shards.braces import has_braces
from stoker.shards.sample import Content, Item
from stoker.storage import local_path


class Source(Protocol):
    """An open dataset. Opening reads only names, headers and class lists."""

    @property
    def name(self) -> str:
        """The name of the dataset; the default prefix of its shards."""
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Class names by label; empty if the dataset has none."""
        ...

    @property
    def splits(self) -> Sequence[str]:
        """The splits of the dataset, out of `train`, `val` and `test`."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user, printed with the plan; complete after every split was scanned."""
        ...

    @property
    def recipe(self) -> str:
        """How images are encoded, if the source encodes them; empty otherwise. Part of the plan's digest."""
        ...

    def scan(self, split: str) -> Iterator[Item]:
        """List the samples of a split, always in the same order."""
        ...

    def read(self, split: str, item: Item) -> Content:
        """Read one sample; thread-safe. Raise BadImageError to quarantine it."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class SourceType(Protocol):
    """The class of a source: detects its datasets, and opens them."""

    def can_read(self, where: str) -> bool:
        """Return whether this looks like a dataset of this kind; must not raise."""
        ...

    def __call__(self, where: str, *, scratch: Path) -> Source:
        """Open the dataset; `scratch` is an existing empty folder for unpacked files."""
        ...


SOURCES: Registry[SourceType] = Registry(
    "source",
    {
        "cifar10": "stoker.shards.sources.cifar10:Cifar10Source",
        "folder": "stoker.shards.sources.folder:FolderSource",
        "folder-tar": "stoker.shards.sources.folder_tar:FolderTarSource",
        "imagenet": "stoker.shards.sources.imagenet:ImagenetSource",
        "mnist": "stoker.shards.sources.mnist:MnistSource",
        "shards": "stoker.shards.sources.shards:ShardsSource",
        "synthetic": "stoker.shards.sources.synthetic:SyntheticSource",
    },
    option="--source",
)

# Class folders are the least specific, so they come last; any tar could be a shard, so class folders in a tar do not.
DETECTION_ORDER = ("synthetic", "imagenet", "cifar10", "mnist", "folder-tar", "shards", "folder")


def detect_source(where: str) -> str:
    """Detect the kind of dataset at `where`; a URL can only be that of a shard set."""
    path = None if where.startswith("synthetic") else local_path(where)
    if path is None and not where.startswith("synthetic"):
        return "shards"
    if path is not None and not path.exists() and not has_braces(where):
        raise NotFoundError("no such file or directory", where=where)
    for name in DETECTION_ORDER:
        if SOURCES.get(name).can_read(where):
            return name
    if path is not None and path.is_dir() and not any(path.iterdir()):
        raise SourceError("the directory is empty", where=where)
    raise SourceError(
        "cannot detect the dataset format",
        where=where,
        hint="arrange the images as train/<class>/<image> or <class>/<image>, or pass "
        f"--source {'|'.join(SOURCES.names())}",
    )


def open_source(where: str, kind: str, *, scratch: Path) -> Source:
    """Open the dataset at `where` as the given kind."""
    return SOURCES.get(kind)(where, scratch=scratch)
