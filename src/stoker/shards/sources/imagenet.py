"""Source: ImageNet (ILSVRC 2012) as downloaded, unpacked in the usual ways, or in Kaggle's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from stoker.core.text import join_some
from stoker.errors import NotFoundError, SourceError
from stoker.shards.images import EXTENSIONS
from stoker.shards.sample import Content, Item
from stoker.shards.sources.devkit import DEVKIT, DEVKIT_TAR, SOLUTION, VAL_IMAGE, WNID, GroundTruth, find_ground_truth
from stoker.shards.sources.files import (
    OpenFile,
    describe_skipped,
    is_class_folder,
    open_decompressed,
    read_image_file,
    stat_image,
)
from stoker.shards.sources.tarfiles import ArchivedFile, iter_files

TARS = {split: (f"ILSVRC2012_img_{split}.tar", f"ILSVRC2012_img_{split}.tar.gz") for split in ("train", "val")}
FOLDERS = {split: (split, f"ILSVRC2012_img_{split}", f"ILSVRC/Data/CLS-LOC/{split}") for split in ("train", "val")}
ALL_CLASSES = 1000


class ImagenetSource:
    """ImageNet; labels are positions in the sorted wnids, the order that published models use."""

    name = "imagenet"
    recipe = ""

    def __init__(self, where: str, *, scratch: Path) -> None:
        root = Path(where)
        self._where = where
        self._layouts: dict[str, _SplitLayout] = {}
        self.notes: Sequence[str] = ()
        try:
            if root.is_file():
                self._layouts["train"] = _TarOfClassTars(open_decompressed(root, scratch))
            elif root.is_dir():
                self._open(root, scratch)
            else:
                raise NotFoundError("no such file or directory", where=where)
        except BaseException:
            self.close()
            raise
        self.splits: Sequence[str] = tuple(self._layouts)
        self.classes: Sequence[str] = next(iter(self._layouts.values())).wnids
        self._labels = {wnid: label for label, wnid in enumerate(self.classes)}

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether there are ImageNet's archives, or a tree that only ImageNet has.

        Smaller datasets use wnids for their class folders too, so without one of ImageNet's own files the tree must
        have all 1000 classes; other trees are read as class folders, with the same labels.
        """
        root = Path(where)
        try:
            if root.is_file():
                return root.name in TARS["train"]
            names = (*TARS["train"], *TARS["val"], DEVKIT_TAR, DEVKIT, SOLUTION)
            if any((root / name).exists() for name in names):
                return True
            train, val = (_find_folder(root, FOLDERS[split]) for split in ("train", "val"))
            if val is not None and _has_numbered_images(val):
                return True
            return train is not None and len(_list_wnids(train)) == ALL_CLASSES
        except (OSError, ValueError, SourceError):
            return False

    def scan(self, split: str) -> Iterator[Item]:
        """List the images in the order of the tar, or by class and name in folders."""
        layout = self._layouts[split]
        empty, skipped = layout.used_wnids(), 0
        for wnid, name, size, offset in layout.iter_files():
            if not name.isprintable():
                raise SourceError(f"{split}: the file name {name!r} is not printable", where=self._where)
            if wnid and _is_image(name):
                empty.discard(wnid)
                yield Item(name=f"{wnid}/{name}", label=self._labels[wnid], size=size, offset=offset)
            else:
                skipped += 1
        if empty:
            raise SourceError(f"class {min(empty)} has no images", where=f"{self._where} ({split})")
        if skipped:
            self._add_note(f"{split}: {describe_skipped(skipped)}")

    def read(self, split: str, item: Item) -> Content:
        """Read the bytes of one image."""
        return Content(self._layouts[split].read(item))

    def close(self) -> None:
        """Close the tars."""
        for layout in self._layouts.values():
            layout.close()

    def _open(self, root: Path, scratch: Path) -> None:
        train, val = (self._choose_path(root, split) for split in ("train", "val"))
        if train is not None:
            self._layouts["train"] = (
                _TarOfClassTars(open_decompressed(train, scratch)) if train.is_file() else _open_class_layout(train)
            )
        if val is not None:
            self._layouts["val"] = _open_val(root, val, scratch)
        if not self._layouts:
            raise SourceError(
                f"found none of {TARS['train'][0]}, train/<wnid>/, {TARS['val'][0]} or val/",
                where=root,
                hint="--source imagenet requires at least one",
            )
        if len(self._layouts) == 2:
            _check_same_classes(self._layouts["train"], self._layouts["val"], root)

    def _choose_path(self, root: Path, split: str) -> Path | None:
        """Return the path to read a split from; a tar is preferred over its unpacked files."""
        choices = [path for name in TARS[split] if (path := root / name).is_file()]
        choices += [path for name in FOLDERS[split] if (path := root / name).is_dir() and any(_iter_entries(path))]
        if len(choices) > 1:
            others = ", ".join(path.name for path in choices[1:])
            self._add_note(f"{split}: reading {choices[0].name}, ignoring {others}")
        return choices[0] if choices else None

    def _add_note(self, note: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, note)))


class _SplitFile(NamedTuple):
    """A file of a split; `wnid` is empty when it is not an image of the dataset."""

    wnid: str
    name: str
    size: int
    offset: int = 0


class _SplitLayout(Protocol):
    """One split in one layout."""

    wnids: Sequence[str]
    """The classes of the layout, sorted."""

    def used_wnids(self) -> set[str]:
        """Return the classes that must have images."""
        ...

    def iter_files(self) -> Iterator[_SplitFile]:
        """Yield every file, always in the same order."""
        ...

    def read(self, item: Item) -> bytes:
        """Read one image."""
        ...

    def close(self) -> None:
        """Close all files."""
        ...


class _TarOfClassTars:
    """The training tar of class tars; images are read in place, two tars deep."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._tars: dict[str, ArchivedFile] = {}
        try:
            for member in iter_files(file):
                wnid, _, suffix = _basename(member.name).partition(".")
                if suffix != "tar" or not WNID.fullmatch(wnid) or wnid in self._tars:
                    raise SourceError(f"member {member.name!r} is not a tar of a new class", where=file.path)
                self._tars[wnid] = member
            if not self._tars:
                raise SourceError("the tar contains no class tars", where=file.path)
        except BaseException:
            self.close()
            raise
        self.wnids: Sequence[str] = sorted(self._tars)

    def used_wnids(self) -> set[str]:
        return set(self.wnids)

    def iter_files(self) -> Iterator[_SplitFile]:
        for wnid, tar in self._tars.items():
            yield from _iter_class_tar(self._file, wnid, tar.offset, tar.offset + tar.size)

    def read(self, item: Item) -> bytes:
        return self._file.read(item.offset, item.size)

    def close(self) -> None:
        self._file.close()


class _ClassTars:
    """A folder of class tars; each is opened for every read, because a thousand cannot stay open."""

    def __init__(self, folder: Path, wnids: Sequence[str]) -> None:
        self._folder = folder
        self.wnids = wnids

    def used_wnids(self) -> set[str]:
        return set(self.wnids)

    def iter_files(self) -> Iterator[_SplitFile]:
        for wnid in self.wnids:
            with OpenFile(self._folder / f"{wnid}.tar") as file:
                yield from _iter_class_tar(file, wnid, 0, file.size)

    def read(self, item: Item) -> bytes:
        wnid, _, _ = item.name.partition("/")
        with OpenFile(self._folder / f"{wnid}.tar") as file:
            return file.read(item.offset, item.size)

    def close(self) -> None:
        pass


class _ClassFolders:
    """A folder of class folders."""

    def __init__(self, folder: Path, wnids: Sequence[str]) -> None:
        self._folder = folder
        self.wnids = wnids

    def used_wnids(self) -> set[str]:
        return set(self.wnids)

    def iter_files(self) -> Iterator[_SplitFile]:
        for wnid in self.wnids:
            for entry in sorted(_iter_entries(self._folder / wnid), key=lambda entry: entry.name):
                yield _SplitFile(wnid, entry.name, stat_image(entry)[0])

    def read(self, item: Item) -> bytes:
        return read_image_file(f"{self._folder}/{item.name}", item.size)

    def close(self) -> None:
        pass


class _NumberedTar:
    """The validation tar: numbered images, with classes from the ground truth."""

    def __init__(self, file: OpenFile, truth: GroundTruth) -> None:
        self._file = file
        self._truth = truth
        self.wnids = truth.wnids

    def used_wnids(self) -> set[str]:
        return self._truth.used_wnids()

    def iter_files(self) -> Iterator[_SplitFile]:
        seen = bytearray(len(self._truth) + 1)
        count, beyond = 0, ""
        for member in iter_files(self._file):
            name = _basename(member.name)
            match = VAL_IMAGE.fullmatch(name)
            if match is None:
                yield _SplitFile("", name, member.size)
                continue
            count, number = count + 1, int(match[1])
            if not 1 <= number <= len(self._truth):
                beyond = name  # raised later, because a wrong number of images is the better message
            elif seen[number]:
                raise SourceError(f"{name} occurs twice", where=self._file.path)
            else:
                seen[number] = True
                yield _SplitFile(self._truth.wnid(number), name, member.size, member.offset)
        _check_count(count, self._truth, self._file.path)
        if beyond:
            raise SourceError(f"{beyond} has no line in the ground truth", where=self._file.path)

    def read(self, item: Item) -> bytes:
        return self._file.read(item.offset, item.size)

    def close(self) -> None:
        self._file.close()


class _NumberedFolder:
    """The validation images, unpacked into one folder."""

    def __init__(self, folder: Path, truth: GroundTruth) -> None:
        self._folder = folder
        self._truth = truth
        self.wnids = truth.wnids

    def used_wnids(self) -> set[str]:
        return self._truth.used_wnids()

    def iter_files(self) -> Iterator[_SplitFile]:
        sizes: dict[str, int] = {}
        for entry in _iter_entries(self._folder):
            if VAL_IMAGE.fullmatch(entry.name):
                sizes[entry.name] = stat_image(entry)[0]
            else:
                yield _SplitFile("", entry.name, 0)
        _check_count(len(sizes), self._truth, self._folder)
        for number in range(1, len(sizes) + 1):
            name = f"ILSVRC2012_val_{number:08d}.JPEG"
            if name not in sizes:
                raise SourceError(f"{name} not found", where=self._folder)
            yield _SplitFile(self._truth.wnid(number), name, sizes[name])

    def read(self, item: Item) -> bytes:
        return read_image_file(f"{self._folder}/{_basename(item.name)}", item.size)

    def close(self) -> None:
        pass


def _iter_class_tar(file: OpenFile, wnid: str, start: int, end: int) -> Iterator[_SplitFile]:
    if end == start:  # an empty file, left by a failed download
        return
    for member in iter_files(file, start, end, within=f"{wnid}.tar"):
        yield _SplitFile(wnid, _basename(member.name), member.size, member.offset)


def _open_val(root: Path, path: Path, scratch: Path) -> _SplitLayout:
    if path.is_dir() and not _has_numbered_images(path):
        return _open_class_layout(path)
    truth = find_ground_truth(root, scratch)
    if truth is None:
        raise SourceError(
            "the classes of the validation images are not known",
            where=path,
            hint=f"add {DEVKIT_TAR}, the unpacked {DEVKIT}/ or Kaggle's {SOLUTION} to {root}",
        )
    return _NumberedFolder(path, truth) if path.is_dir() else _NumberedTar(open_decompressed(path, scratch), truth)


def _open_class_layout(folder: Path) -> _SplitLayout:
    wnids = _list_wnids(folder)
    tars = [name for name in wnids if name.endswith(".tar")]
    if not tars:
        return _ClassFolders(folder, wnids)
    if len(tars) < len(wnids):
        raise SourceError(
            f"found {len(tars)} class tars and {len(wnids) - len(tars)} class folders",
            where=folder,
            hint="unpack all class tars and remove them, or remove the class folders",
        )
    return _ClassTars(folder, [name.removesuffix(".tar") for name in tars])


def _list_wnids(folder: Path) -> list[str]:
    """List the class folders and class tars, sorted; raise SourceError for other folders and for images."""
    names = []
    for entry in _iter_entries(folder):
        if WNID.fullmatch(entry.name.removesuffix(".tar")) and is_class_folder(entry) != entry.name.endswith(".tar"):
            names.append(entry.name)
        elif is_class_folder(entry) or _is_image(entry.name):
            raise SourceError(f"{entry.name} is neither a class folder nor a class tar", where=folder)
    if not names:
        raise SourceError("no class folders like n01234567/ found", where=folder)
    return sorted(names)


def _check_same_classes(train: _SplitLayout, val: _SplitLayout, root: Path) -> None:
    """Raise SourceError for splits with different classes: their labels would not match."""
    only_val = sorted(val.used_wnids() - set(train.wnids))
    only_train = sorted(set(train.wnids) - set(val.wnids))
    if only_val or only_train:
        what = f"only in train {join_some(only_train)}, only in val {join_some(only_val)}"
        raise SourceError(f"train and val have different classes: {what}", where=root)


def _check_count(count: int, truth: GroundTruth, where: Path) -> None:
    if count != len(truth):
        raise SourceError(f"{count} images, but {len(truth)} lines in {truth.where}", where=where)


def _has_numbered_images(folder: Path) -> bool:
    """Return whether this is the flat layout; raise SourceError for a mixture, as left by an interrupted script."""
    numbered = classed = False
    for entry in _iter_entries(folder):
        numbered = numbered or VAL_IMAGE.fullmatch(entry.name) is not None
        classed = classed or (WNID.fullmatch(entry.name) is not None and is_class_folder(entry))
        if numbered and classed:
            raise SourceError(
                "found numbered images as well as class folders",
                where=folder,
                hint="finish moving the images into class folders, or unpack them again",
            )
    return numbered


def _find_folder(root: Path, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := root / name).is_dir()), None)


def _iter_entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder without hidden files, which are not layout of a dataset."""
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _is_image(name: str) -> bool:
    stem, dot, extension = name.rpartition(".")
    return not stem.startswith(".") and (dot + extension).lower() in EXTENSIONS


def _basename(path: str) -> str:
    return path.rpartition("/")[2]
