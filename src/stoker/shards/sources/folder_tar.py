"""Source: class folders in a tar, which is read in place, or in a .tar.gz, which is decompressed first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from stoker.core.text import printable
from stoker.errors import NotFoundError, SourceError, StokerError
from stoker.shards.sample import Content, Item
from stoker.shards.sources.class_layout import (
    SNIFF_BYTES,
    SPLITS,
    SkippedFiles,
    check_utf8,
    empty_class_error,
    find_class_layout,
    has_image_extension,
)
from stoker.shards.sources.files import GZIP_MAGIC, OpenFile, open_decompressed
from stoker.shards.sources.tarfiles import ArchivedFile, iter_files
from stoker.storage import local_path

COMPRESSED = (".tar.gz", ".tgz")
LABEL = ".cls"
PEEKED_FILES = 64
"""Files after the first image of a tar that tell class folders from WebDataset shards, which have labels."""


class FolderTarSource:
    """Class folders in a tar; a single folder around all of them, as `tar cf pets.tar pets/` writes it, is ignored.

    Images are listed in the order of the archive, so that no list of them is kept in memory.
    """

    recipe = ""

    def __init__(self, where: str, *, scratch: Path) -> None:
        path = local_path(where)
        if path is None or not path.is_file():
            raise NotFoundError("no such file", where=where)
        self.name = _remove_suffix(path.name) or "dataset"
        self._stamp = path.stat().st_mtime_ns
        self._file = open_decompressed(path, scratch)
        try:
            self._skipped = SkippedFiles()
            tree = ArchiveTree(self._file.path, self._list_folders())
            self._prefix = tree.prefix
            self._layout = find_class_layout(tree)
        except BaseException:
            self.close()
            raise
        self.splits: Sequence[str] = tuple(self._layout.roots)
        self.classes = self._layout.classes
        self._labels = {name: label for label, name in enumerate(self.classes)}

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether this is a tar with images in folders and without labels, or a compressed tar."""
        try:
            path = local_path(where)
            if path is None or not path.name.endswith((".tar", *COMPRESSED)) or not path.is_file():
                return False
            with OpenFile(path) as file:
                if path.name.endswith(COMPRESSED):
                    return file.read(0, len(GZIP_MAGIC)) == GZIP_MAGIC
                names = _peek_names(file)
        except (StokerError, OSError, ValueError):
            return False
        in_folder = any(has_image_extension(name) and "/" in name.removeprefix("./") for name in names)
        return in_folder and not any(name.endswith(LABEL) for name in names)

    @property
    def notes(self) -> Sequence[str]:
        """The folder around the classes, and what was skipped."""
        around = (f"reading the folder {printable(self._prefix)} in the archive",) if self._prefix else ()
        return (*around, *self._layout.notes, *self._skipped.notes)

    def scan(self, split: str) -> Iterator[Item]:
        """List the images of a split in the order of the archive."""
        root = self._prefix + self._layout.path_in(split, "")
        empty = set(self._layout.folders[split])
        for path, member in self._iter_paths():
            name = path.removeprefix(root)
            class_name = name.partition("/")[0]
            label = self._labels.get(class_name)
            if path.startswith(root) and label is not None and has_image_extension(name):
                empty.discard(class_name)
                yield Item(name, label, member.size, offset=member.offset, stamp=self._stamp)
        if empty:
            raise empty_class_error(f"{self._file.path} ({printable(root + min(empty))})")

    def read(self, split: str, item: Item) -> Content:  # noqa: ARG002 - the offset implies the split
        """Read one image."""
        return Content(self._file.read(item.offset, item.size))

    def close(self) -> None:
        """Close the archive."""
        self._file.close()

    def _list_folders(self) -> dict[str, str]:
        """Return every folder, and the first image in it, or an empty name; count all other files."""
        folders: dict[str, str] = {}
        for path, member in self._iter_paths(listing=True):
            if member.name.endswith("/"):
                folders.setdefault(path, "")
                continue
            folder, _, name = path.rpartition("/")
            if name.endswith(LABEL):
                raise SourceError(
                    f"{printable(path)} is a label: the archive is a WebDataset shard",
                    where=self._file.path,
                    hint="decompress it and pass --source shards",
                )
            if has_image_extension(name):
                folders[folder] = folders.get(folder) or name
            else:
                if folder:
                    folders.setdefault(folder, "")
                head = self._file.read(member.offset, min(member.size, SNIFF_BYTES))
                self._skipped.add_unnamed(name, head, f"{self._file.path} ({printable(path)})")
        return folders

    def _iter_paths(self, *, listing: bool = False) -> Iterator[tuple[str, ArchivedFile]]:
        """Yield the files of the archive, without hidden ones, with their normalized paths.

        `listing` yields folders too, and counts the hidden files.
        """
        for member in iter_files(self._file, with_directories=listing):
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            check_utf8(member.name, str(self._file.path))
            if ".." in parts:
                raise SourceError(f"the path {printable(member.name)} contains '..'", where=self._file.path)
            if not any(part.startswith(".") for part in parts):
                yield "/".join(parts), member
            elif listing and not member.name.endswith("/"):
                self._skipped.add("hidden")


class ArchiveTree:
    """The folders of an archive below `prefix`, the folder around all of them; `images` has an image of each folder."""

    def __init__(self, archive: Path, images: Mapping[str, str]) -> None:
        self._archive = archive
        self._images = images
        self._children = _list_children(images)
        self.prefix = _find_prefix(images, self._children)

    def list_folders(self, path: str) -> tuple[str, ...]:
        """Return the names of the folders in a folder, sorted."""
        return tuple(sorted(self._children.get((self.prefix + path).rstrip("/"), ())))

    def list_images(self, path: str) -> tuple[str, ...]:
        """Return the name of an image directly in a folder, if there is one."""
        image = self._images.get((self.prefix + path).rstrip("/"))
        return (image,) if image else ()

    def locate(self, path: str) -> str:
        """Return the archive and the folder in it."""
        return f"{self._archive} ({printable(self.prefix + path)})" if self.prefix + path else str(self._archive)


def _peek_names(file: OpenFile) -> list[str]:
    """Return the names of the files up to the first image and some more; a fault is reported when the tar is read."""
    names: list[str] = []
    with suppress(SourceError):
        files = iter_files(file)
        for member in files:
            names.append(member.name)
            if has_image_extension(member.name):
                names.extend(member.name for member in islice(files, PEEKED_FILES))
                break
    return names


def _find_prefix(folders: Mapping[str, str], children: Mapping[str, Collection[str]]) -> str:
    """Return the path, with a slash, of the folder around all class or split folders, as archiving a folder adds it.

    Splits may be at any depth. Around classes it is at most one folder, since deeper ones may be subfolders of a class;
    it is none if the archive contains its root, as `tar -C pets -cf pets.tar .` writes it.
    """
    around: list[str] = []
    path = ""
    while not folders.get(path):
        names = children.get(path, ())
        if any(name.lower() in SPLITS and _join(path, name) in children for name in names):
            return f"{path}/" if path else ""
        if len(names) != 1:
            break
        (name,) = names
        path = _join(path, name)
        around.append(path)
    if around and path not in children:
        around.pop()  # a class
    return f"{around[0]}/" if around and "" not in folders else ""


def _list_children(folders: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the folders in every folder that has any."""
    children: defaultdict[str, set[str]] = defaultdict(set)
    for path in folders:
        while path:
            path, _, name = path.rpartition("/")
            children[path].add(name)
    return dict(children)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _remove_suffix(name: str) -> str:
    for suffix in (".tar", *COMPRESSED):
        name = name.removesuffix(suffix)
    return name
