"""Source: class folders, as `train/<class>/…` and `val/<class>/…`, or `<class>/…` without splits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.core.text import join_some, printable
from stoker.errors import InputError, NotFoundError, SourceError
from stoker.shards.images import EXTENSIONS, sniff
from stoker.shards.sample import Content, Item
from stoker.storage import local_path

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


class FolderSource:
    """Class folders; the label of a class is its position in the sorted list of training classes."""

    recipe = ""

    def __init__(self, where: str, *, scratch: Path) -> None:  # noqa: ARG002 - nothing needs unpacking
        root = local_path(where)
        if root is None or not root.is_dir():
            raise NotFoundError("no such directory", where=where)
        self.name = root.resolve().name or "dataset"
        self._roots, self._skipped_folders = _find_split_roots(root)
        self.splits: Sequence[str] = tuple(self._roots)
        by_split = {split: _list_class_folders(folder) for split, folder in self._roots.items()}
        self.classes: Sequence[str] = by_split.get("train") or next(iter(by_split.values()))
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self._skipped_files: Counter[str] = Counter()
        for split, names in by_split.items():
            if unknown := [name for name in names if name not in self._labels]:
                raise SourceError(
                    f"class {join_some(unknown)} does not exist in {printable(self._roots[self.splits[0]])}",
                    where=printable(self._roots[split]),
                    hint="every class needs a folder in the training split",
                )

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether this is a folder with subfolders."""
        try:
            root = local_path(where)
            return root is not None and bool(_list_subfolders(root))
        except (OSError, ValueError, InputError):
            return False

    @property
    def notes(self) -> Sequence[str]:
        """The folders and files that were skipped."""
        if not self._skipped_files:
            return self._skipped_folders
        kinds = ", ".join(f"{count:,} × {kind}" for kind, count in self._skipped_files.most_common(8))
        return (*self._skipped_folders, f"skipped {self._skipped_files.total():,} files that are not images: {kinds}")

    def scan(self, split: str) -> Iterator[Item]:
        """List the images of every class, sorted by path."""
        root = self._roots[split]
        for name in _list_class_folders(root):
            label, empty = self._labels[name], True
            for path, stat in self._iter_images(root / name):
                empty = False
                yield Item(f"{name}/{path}", label, stat.st_size, stamp=stat.st_mtime_ns)
            if empty:
                raise SourceError(
                    "the class folder has no images",
                    where=printable(root / name),
                    hint="remove the folder or add images",
                )

    def read(self, split: str, item: Item) -> Content:
        """Read one image file."""
        path = f"{self._roots[split]}/{item.name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.read(fd, item.size + 1)
                while len(data) < item.size and (more := os.read(fd, item.size + 1 - len(data))):
                    data += more  # network file systems may return fewer bytes than requested
            finally:
                os.close(fd)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror}", where=printable(path)) from error
        if len(data) != item.size:
            raise SourceError(
                f"the file changed during the conversion: it had {item.size} bytes",
                where=printable(path),
                hint="try again when nothing writes to it",
            )
        return Content(data)

    def close(self) -> None:
        """Nothing is held open."""

    def _iter_images(
        self, folder: Path, inside: str = "", above: tuple[tuple[int, int], ...] = ()
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the path below the class folder and the stat of each image; recurse into folders and follow links."""
        current = folder / inside
        stat = current.stat()
        if (stat.st_dev, stat.st_ino) in above:
            raise SourceError(
                "symbolic link points to one of its parent directories",
                where=printable(current),
                hint="remove the link",
            )
        for entry in sorted(os.scandir(current), key=lambda entry: entry.name):
            path = inside + entry.name
            _check_utf8(entry.name, current)
            if entry.name.startswith("."):
                self._skipped_files["hidden"] += 1
            elif entry.is_dir():
                yield from self._iter_images(folder, path + "/", (*above, (stat.st_dev, stat.st_ino)))
            elif not entry.is_file():
                raise SourceError("broken symbolic link, or not a regular file", where=printable(current / entry.name))
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                yield path, entry.stat()
            else:
                self._skip_file(entry)

    def _skip_file(self, entry: os.DirEntry[str]) -> None:
        """Count a file without an image extension; raise SourceError if it is an image, as it would be lost."""
        with open(entry.path, "rb") as file:
            detected = sniff(file.read(16))
        extension = os.path.splitext(entry.name)[1]
        if detected is not None:
            raise SourceError(
                f"the file is a {detected.upper()} image without an image extension",
                where=printable(entry.path),
                hint=f"rename it to end in .{detected}, or remove it",
            )
        self._skipped_files[printable(extension.lower()) or "no extension"] += 1


def _find_split_roots(root: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the folder of each split, and notes on skipped folders; without splits, everything is training data."""
    folders = _list_subfolders(root)
    named = [name for name in folders if name.lower() in SPLITS]
    if _has_no_splits(root, folders, named):
        return {"train": root}, ()
    roots: dict[str, Path] = {}
    for name in named:
        split = SPLITS[name.lower()]
        if split in roots:
            raise SourceError(f"{roots[split].name}/ and {name}/ are both the {split!r} split", where=printable(root))
        roots[split] = root / name
    notes = []
    if others := [name for name in folders if name not in named]:
        notes.append(f"skipped the folder{'s'[: len(others) > 1]} {join_some(others)} next to {roots['train'].name}")
    if "train" in roots and "test" in roots and not _list_subfolders(roots["test"]):
        notes.append(f"skipped the folder {roots.pop('test').name}: it has no class folders")
    return {split: roots[split] for split in ("train", "val", "test") if split in roots}, tuple(notes)


def _has_no_splits(root: Path, folders: Sequence[str], named: Sequence[str]) -> bool:
    """Return whether these are class folders; one class may have the name of a split: car, bus, train."""
    if not named:
        return True
    if len(named) == len(folders):
        return False
    if "train" not in (name.lower() for name in named):
        return True
    return len(named) == 1 and not _list_subfolders(root / named[0])


def _list_class_folders(root: Path) -> tuple[str, ...]:
    """List the class folders, sorted; raise SourceError for images outside of a class folder."""
    stray = [e.name for e in os.scandir(root) if e.is_file() and os.path.splitext(e.name)[1].lower() in EXTENSIONS]
    if stray:
        raise SourceError(
            f"{join_some(sorted(stray))} is not in a class folder",
            where=printable(root),
            hint="move every image into the folder of its class",
        )
    names = _list_subfolders(root)
    if not names:
        raise SourceError("no class folders found", where=printable(root), hint="store images as <class>/<image>")
    for name in names:
        _check_utf8(name, root)
    return names


def _list_subfolders(root: Path) -> tuple[str, ...]:
    return tuple(sorted(e.name for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")))


def _check_utf8(name: str, folder: Path) -> None:
    if not name.isascii() and any("\udc80" <= char <= "\udcff" for char in name):
        raise SourceError(f"the file name {name!r} is not UTF-8", where=printable(folder), hint="rename it")
