"""Datasets as they are found: each source lists its samples cheaply and reads one on demand."""

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
    """An opened dataset. Opening looks only at the outside: names, headers, class lists."""

    @property
    def name(self) -> str:
        """What the dataset is called; the default prefix of its shards."""
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Class names by label; empty when the dataset does not tell."""
        ...

    @property
    def splits(self) -> Sequence[str]:
        """`train`, `val`, `test`: as many as there are."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences that the user should see with the plan; complete once every split was scanned."""
        ...

    @property
    def recipe(self) -> str:
        """What decides the images' bytes beside the items: nothing, or how they are made."""
        ...

    def scan(self, split: str) -> Iterator[Item]:
        """List the samples of a split, always in the same order."""
        ...

    def read(self, split: str, item: Item) -> Content:
        """Read one sample; called from many threads at once."""
        ...

    def close(self) -> None:
        """Close what was opened."""
        ...


class SourceType(Protocol):
    """A source's class: recognises a dataset by its outside, and opens it."""

    def can_read(self, where: str) -> bool:
        """Whether this looks like such a dataset; must not raise."""
        ...

    def __call__(self, where: str, *, scratch: Path) -> Source:
        """Open the dataset; `scratch` is an existing empty folder for what must be unpacked first."""
        ...


SOURCES: Registry[SourceType] = Registry(
    "source",
    {
        "cifar10": "stoker.shards.sources.cifar10:Cifar10Source",
        "folder": "stoker.shards.sources.folder:FolderSource",
        "imagenet": "stoker.shards.sources.imagenet:ImagenetSource",
        "mnist": "stoker.shards.sources.mnist:MnistSource",
        "shards": "stoker.shards.sources.shards:ShardsSource",
        "synthetic": "stoker.shards.sources.synthetic:SyntheticSource",
    },
)

# A class folder is the least specific shape, so it is tried last.
DETECTION_ORDER = ("synthetic", "imagenet", "cifar10", "mnist", "shards", "folder")


def detect_source(where: str) -> str:
    """Recognise the dataset at `where`; what lies behind a URL can only be shards, and its errors are told as such."""
    path = None if where.startswith("synthetic") else local_path(where)
    if path is None and not where.startswith("synthetic"):
        return "shards"
    if path is not None and not path.exists() and not has_braces(where):
        raise NotFoundError("there is no such file or folder", where=where)
    for name in DETECTION_ORDER:
        if SOURCES.get(name).can_read(where):
            return name
    raise SourceError(
        "no dataset is recognised here",
        where=where,
        hint="a folder needs train/<class>/<image> or <class>/<image>; or name the kind with --source "
        + "|".join(SOURCES.names()),
    )


def open_source(where: str, kind: str, *, scratch: Path) -> Source:
    """Open the dataset at `where` as what `kind` names."""
    return SOURCES.get(kind)(where, scratch=scratch)
