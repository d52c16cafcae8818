"""The layout of class folders, on disk or in an archive: which folders are splits, and which are classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from stoker.core.text import join_some, printable
from stoker.errors import SourceError
from stoker.shards.images import EXTENSIONS, sniff
from stoker.shards.sources.files import describe_skipped

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SNIFF_BYTES = 16


class FolderTree(Protocol):
    """Folders with images; paths are relative to the root, which is the empty path."""

    def list_folders(self, path: str) -> Sequence[str]:
        """Return the names of the folders in a folder, sorted, without hidden ones."""
        ...

    def list_images(self, path: str) -> Sequence[str]:
        """Return the names of the images directly in a folder, sorted."""
        ...

    def locate(self, path: str) -> str:
        """Return how messages name a folder."""
        ...


class ClassLayout(NamedTuple):
    """The folder of each split, its class folders, and all classes by label."""

    roots: Mapping[str, str]
    folders: Mapping[str, Sequence[str]]
    classes: Sequence[str]
    notes: tuple[str, ...]

    def path_in(self, split: str, name: str) -> str:
        """Return the path of a class or an image of a split, relative to the root of the tree."""
        root = self.roots[split]
        return f"{root}/{name}" if root else name


def find_class_layout(tree: FolderTree) -> ClassLayout:
    """Find splits and classes; the label of a class is its position in the sorted list of training classes."""
    roots, notes = _find_split_roots(tree)
    folders = {split: _list_class_folders(tree, root) for split, root in roots.items()}
    first = next(iter(roots))
    classes = folders.get("train") or folders[first]
    known = set(classes)
    for split, names in folders.items():
        if unknown := [name for name in names if name not in known]:
            raise SourceError(
                f"class {join_some(unknown)} does not exist in {tree.locate(roots[first])}",
                where=tree.locate(roots[split]),
                hint="every class needs a folder in the training split",
            )
    return ClassLayout(roots, folders, classes, notes)


class SkippedFiles:
    """Count the files of a dataset that are not images."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def notes(self) -> tuple[str, ...]:
        """A note with the number of files of each kind; none if there are no such files."""
        if not self._counts:
            return ()
        kinds = ", ".join(f"{count:,} × {kind}" for kind, count in self._counts.most_common(8))
        return (f"{describe_skipped(self._counts.total())}: {kinds}",)

    def add(self, kind: str) -> None:
        """Count a file of this kind."""
        self._counts[kind] += 1

    def add_unnamed(self, name: str, head: bytes, where: str) -> None:
        """Count a file without an image extension; raise SourceError if it is an image, as it would be lost."""
        detected = sniff(head)
        if detected is not None:
            raise SourceError(
                f"the file is a {detected.upper()} image without an image extension",
                where=where,
                hint=f"rename it to end in .{detected}, or remove it",
            )
        self.add(printable(os.path.splitext(name)[1].lower()) or "no extension")


def empty_class_error(where: str) -> SourceError:
    """Return the error for a class without images, which would have a label but no samples."""
    return SourceError("the class folder has no images", where=where, hint="remove the folder or add images")


def has_image_extension(name: str) -> bool:
    """Return whether a file name ends like that of an image."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def check_utf8(name: str, where: str) -> None:
    """Raise SourceError for a file name that is not UTF-8."""
    if not name.isascii() and any("\udc80" <= char <= "\udcff" for char in name):
        raise SourceError(f"the file name {name!r} is not UTF-8", where=where, hint="rename it")


def _find_split_roots(tree: FolderTree) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the folder of each split, and notes on skipped folders; without splits, everything is training data."""
    folders = tree.list_folders("")
    named = [name for name in folders if name.lower() in SPLITS]
    if _has_no_splits(tree, folders, named):
        return {"train": ""}, ()
    roots: dict[str, str] = {}
    for name in named:
        split = SPLITS[name.lower()]
        if split in roots:
            raise SourceError(f"{roots[split]}/ and {name}/ are both the {split!r} split", where=tree.locate(""))
        roots[split] = name
    notes = []
    if others := [name for name in folders if name not in named]:
        notes.append(f"skipped the folder{'s'[: len(others) > 1]} {join_some(others)} next to {roots['train']}")
    if "train" in roots and "test" in roots and not tree.list_folders(roots["test"]):
        notes.append(f"skipped the folder {roots.pop('test')}: it has no class folders")
    return {split: roots[split] for split in ("train", "val", "test") if split in roots}, tuple(notes)


def _has_no_splits(tree: FolderTree, folders: Sequence[str], named: Sequence[str]) -> bool:
    """Return whether these are class folders; one class may have the name of a split: car, bus, train."""
    if not named:
        return True
    if len(named) == len(folders):
        return False
    if "train" not in (name.lower() for name in named):
        return True
    return len(named) == 1 and not tree.list_folders(named[0])


def _list_class_folders(tree: FolderTree, root: str) -> Sequence[str]:
    """List the class folders, sorted; raise SourceError for images outside of a class folder."""
    if stray := tree.list_images(root):
        raise SourceError(
            f"{join_some(stray)} is not in a class folder",
            where=tree.locate(root),
            hint="move every image into the folder of its class",
        )
    names = tree.list_folders(root)
    if not names:
        raise SourceError("no class folders found", where=tree.locate(root), hint="store images as <class>/<image>")
    for name in names:
        check_utf8(name, tree.locate(root))
    return names
