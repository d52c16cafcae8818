"""Source: class folders in a tar, which is read in place, or in a .tar.gz, which is decompressed first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from stoker.core.text import printable
from stoker.errors import NotFoundError, SourceError, StokerError
from stoker.shards.sample import Content, Item, sample_key
from stoker.shards.sources.class_layout import (
    SNIFF_BYTES,
    SPLITS,
    SkippedFiles,
    check_utf8,
    find_class_layout,
    has_image_extension,
)
from stoker.shards.sources.files import GZIP_MAGIC, OpenFile, open_decompressed
from stoker.shards.sources.tarfiles import ArchivedFile, iter_files
from stoker.storage import local_path

COMPRESSED = (".tar.gz", ".tgz")
LABEL = ".cls"
PEEKED_FILES = 64
"""Files at the start of a tar that tell class folders from WebDataset shards, where several files have the same key."""


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
            tree = ArchiveTree(self._file.path, self._list_image_folders())
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
        return in_folder and len({sample_key(name) for name in names}) == len(names)

    @property
    def notes(self) -> Sequence[str]:
        """The folder around the classes, and what was skipped."""
        around = (f"reading the folder {printable(self._prefix)} of the archive",) if self._prefix else ()
        return (*around, *self._layout.notes, *self._skipped.notes)

    def scan(self, split: str) -> Iterator[Item]:
        """List the images of a split in the order of the archive."""
        root = self._prefix + self._layout.path_in(split, "")
        for path, member in self._iter_paths():
            name = path.removeprefix(root)
            label = self._labels.get(name.partition("/")[0])
            if path.startswith(root) and label is not None and has_image_extension(name):
                yield Item(name, label, member.size, offset=member.offset, stamp=self._stamp)

    def read(self, split: str, item: Item) -> Content:  # noqa: ARG002 - the offset implies the split
        """Read one image."""
        return Content(self._file.read(item.offset, item.size))

    def close(self) -> None:
        """Close the archive."""
        self._file.close()

    def _list_image_folders(self) -> dict[str, str]:
        """Return every folder with images, and the first image in it; count all other files."""
        folders: dict[str, str] = {}
        for path, member in self._iter_paths(count_hidden=True):
            folder, _, name = path.rpartition("/")
            if name.endswith(LABEL):
                raise SourceError(
                    f"{printable(path)} is a label: the archive is a WebDataset shard",
                    where=self._file.path,
                    hint="decompress it and pass --source shards",
                )
            if has_image_extension(name):
                folders.setdefault(folder, name)
            else:
                head = self._file.read(member.offset, min(member.size, SNIFF_BYTES))
                self._skipped.add_unnamed(name, head, f"{self._file.path} ({printable(path)})")
        return folders

    def _iter_paths(self, *, count_hidden: bool = False) -> Iterator[tuple[str, ArchivedFile]]:
        """Yield the files of the archive with their normalized paths, without hidden files."""
        for member in iter_files(self._file):
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            check_utf8(member.name, str(self._file.path))
            if ".." in parts:
                raise SourceError(f"the path {printable(member.name)} contains '..'", where=self._file.path)
            if not any(part.startswith(".") for part in parts):
                yield "/".join(parts), member
            elif count_hidden:
                self._skipped.add("hidden")


class ArchiveTree:
    """The folders of an archive that contain images, below `prefix`, the folder around all of them."""

    def __init__(self, archive: Path, folders: dict[str, str]) -> None:
        self._archive = archive
        self.prefix = _find_prefix(folders)
        self._images: dict[str, str] = {}
        self._folders: defaultdict[str, set[str]] = defaultdict(set)
        for folder, image in folders.items():
            path = f"{folder}/".removeprefix(self.prefix).rstrip("/")
            self._images[path] = image
            while path:
                path, _, name = path.rpartition("/")
                self._folders[path].add(name)

    def list_folders(self, path: str) -> tuple[str, ...]:
        """Return the names of the folders in a folder, sorted."""
        return tuple(sorted(self._folders.get(path, ())))

    def list_images(self, path: str) -> tuple[str, ...]:
        """Return the name of an image directly in a folder, if there is one."""
        return (self._images[path],) if path in self._images else ()

    def locate(self, path: str) -> str:
        """Return the archive and the folder in it."""
        return f"{self._archive} ({printable(self.prefix + path)})" if self.prefix + path else str(self._archive)


def _peek_names(file: OpenFile) -> list[str]:
    """Return the names of the first files of a tar, up to a fault, which is reported when the tar is read."""
    names = []
    with suppress(SourceError):
        for member in islice(iter_files(file), PEEKED_FILES):
            names.append(member.name)
    return names


def _find_prefix(folders: dict[str, str]) -> str:
    """Return the path, with a slash, of the folder around all class and split folders; often it is the dataset's."""
    prefix: list[str] = []
    paths = [folder.split("/") if folder else [] for folder in folders]
    while paths and all(len(path) > 1 for path in paths) and len({path[0] for path in paths}) == 1:
        if paths[0][0].lower() in SPLITS:
            break
        prefix.append(paths[0][0])
        paths = [path[1:] for path in paths]
    return "".join(f"{name}/" for name in prefix)


def _remove_suffix(name: str) -> str:
    for suffix in (".tar", *COMPRESSED):
        name = name.removesuffix(suffix)
    return name
