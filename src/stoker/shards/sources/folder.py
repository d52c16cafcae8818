"""Source: class folders, as `train/<class>/…` and `val/<class>/…`, or `<class>/…` without splits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from stoker.core.text import join_some, printable
from stoker.errors import InputError, NotFoundError, SourceError
from stoker.shards.sample import Content, Item
from stoker.shards.sources.class_layout import (
    SNIFF_BYTES,
    SkippedFiles,
    check_utf8,
    empty_class_error,
    find_class_layout,
    has_image_extension,
)
from stoker.shards.sources.files import (
    check_affects_one_file,
    is_class_folder,
    is_file,
    is_folder,
    read_image_file,
    stat_image,
)
from stoker.storage import local_path


class FolderSource:
    """Class folders; the label of a class is its position in the sorted list of training classes."""

    recipe = ""

    def __init__(self, where: str, *, scratch: Path) -> None:  # noqa: ARG002 - nothing needs unpacking
        root = local_path(where)
        if root is None or not root.is_dir():
            raise NotFoundError("no such directory", where=where)
        self.name = root.resolve().name or "dataset"
        self._root = root
        self._layout = find_class_layout(DirectoryTree(root))
        self.splits: Sequence[str] = tuple(self._layout.roots)
        self.classes = self._layout.classes
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self._skipped = SkippedFiles()
        broken = [path for split in self.splits for path in _list_broken_links(root / self._layout.roots[split])]
        self._broken = (f"skipped the broken symbolic links {join_some(broken)}",) if broken else ()

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether this is a folder with subfolders, or with what may be one; opening it reports the error."""
        try:
            root = local_path(where)
            return root is not None and root.is_dir() and bool(DirectoryTree(root).list_folders(""))
        except SourceError:
            return True
        except (OSError, ValueError, InputError):
            return False

    @property
    def notes(self) -> Sequence[str]:
        """The folders and files that were skipped."""
        return (*self._layout.notes, *self._broken, *self._skipped.notes)

    def scan(self, split: str) -> Iterator[Item]:
        """List the images of every class, sorted by path; one that cannot be read has size 0 and is quarantined."""
        for name in self._layout.folders[split]:
            label, empty = self._labels[name], True
            folder = self._root / self._layout.path_in(split, name)
            above = {_identify(parent) for path in (self._root, folder) for parent in path.resolve().parents}
            for path, size, stamp in self._iter_images(folder, "", above | {_identify(self._root)}):
                empty = False
                yield Item(f"{name}/{path}", label, size, stamp=stamp)
            if empty:
                raise empty_class_error(printable(folder))

    def read(self, split: str, item: Item) -> Content:
        """Read one image file."""
        return Content(read_image_file(f"{self._root}/{self._layout.path_in(split, item.name)}", item.size))

    def close(self) -> None:
        """Nothing is held open."""

    def _iter_images(
        self, folder: Path, inside: str, above: AbstractSet[tuple[int, int]]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the path below the class folder, size and stamp of each image; recurse and follow links.

        A link to a folder in `above` is skipped: it would loop, and add the images of other classes to this one.
        """
        current = folder / inside
        identity = _identify(current)
        if identity in above:
            self._skipped.add("link to a parent directory")
            return
        for entry in _list_entries(current):
            path = inside + entry.name
            check_utf8(entry.name, printable(current))
            if entry.name.startswith("."):
                self._skipped.add("hidden")
            elif is_folder(entry):
                yield from self._iter_images(folder, path + "/", above | {identity})
            elif has_image_extension(entry.name):
                yield path, *stat_image(entry)
            elif is_file(entry):
                self._skip_file(entry)
            else:
                self._skipped.add("broken link or special file")

    def _skip_file(self, entry: os.DirEntry[str]) -> None:
        try:
            with open(entry.path, "rb") as file:
                head = file.read(SNIFF_BYTES)
        except OSError as error:
            check_affects_one_file(error, entry.path)
            self._skipped.add("unreadable file")
        else:
            self._skipped.add_unnamed(entry.name, head, printable(entry.path))


class DirectoryTree:
    """The folders below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_folders(self, path: str) -> tuple[str, ...]:
        """Return the names of the folders in a folder, sorted, without hidden ones."""
        entries = _list_entries(self._root / path)
        return tuple(e.name for e in entries if not e.name.startswith(".") and is_class_folder(e))

    def list_images(self, path: str) -> tuple[str, ...]:
        """Return the names of the images directly in a folder, sorted."""
        entries = _list_entries(self._root / path)
        return tuple(e.name for e in entries if has_image_extension(e.name) and is_file(e))

    def locate(self, path: str) -> str:
        """Return the path of a folder, as it may be printed."""
        return printable(self._root / path)


def _identify(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError as error:
        raise SourceError(f"cannot read the folder: {error.strerror}", where=printable(folder)) from error
    return status.st_dev, status.st_ino


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder in order; raise SourceError if that fails, because all of its images would be lost."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise SourceError(f"cannot list the folder: {error.strerror}", where=printable(folder)) from error


def _list_broken_links(folder: Path) -> list[str]:
    """List links that could be class folders, but point nowhere."""
    entries = _list_entries(folder)
    return [printable(e.path) for e in entries if e.is_symlink() and not is_folder(e) and not is_file(e)]
