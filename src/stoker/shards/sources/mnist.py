"""Source: MNIST and Fashion-MNIST, idx files of pixels and labels, gzipped or not."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stoker.errors import NotFoundError, SourceError
from stoker.shards.sample import Content, Item
from stoker.shards.sources.files import open_decompressed
from stoker.shards.sources.png import PNG_RECIPE, encode_png

DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
PREFIXES = {"train": "train", "test": "t10k"}
FOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")
UNSIGNED_BYTES = 0x08
CHUNK_ROWS = 1 << 16


class MnistSource:
    """Images are read by position and encoded as grayscale PNG; the label is the folder in a sample's name."""

    recipe = PNG_RECIPE

    def __init__(self, where: str, *, scratch: Path) -> None:
        if not Path(where).is_dir():
            raise NotFoundError("no such directory", where=where)
        folder = _find_single_folder(where)
        fashion = "fashion" in (folder.parent if folder.name == "raw" else folder).resolve().name.lower()
        self.name = "fashion-mnist" if fashion else "mnist"
        self.classes: Sequence[str] = FASHION if fashion else DIGITS
        self.notes: Sequence[str] = (
            ("the folder name contains `fashion`, so the class names are those of Fashion-MNIST",) if fashion else ()
        )
        self._splits: dict[str, tuple[_IdxFile, _IdxFile]] = {}
        try:
            for split, prefix in PREFIXES.items():
                if _find_idx(folder, prefix, "images", 3) or _find_idx(folder, prefix, "labels", 1):
                    self._splits[split] = _open_pair(folder, prefix, scratch)
        except BaseException:
            self.close()
            raise
        self.splits: Sequence[str] = tuple(self._splits)

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether there are idx files with MNIST's names."""
        try:
            return bool(_find_folders(where))
        except (OSError, ValueError):
            return False

    def scan(self, split: str) -> Iterator[Item]:
        """List the images in order."""
        images, labels = self._splits[split]
        for start in range(0, len(labels), CHUNK_ROWS):
            for row, label in enumerate(labels.read_rows(start, min(CHUNK_ROWS, len(labels) - start)), start):
                if label >= len(self.classes):
                    raise SourceError(
                        f"label {label} of row {row} must be between 0 and {len(self.classes) - 1}",
                        where=labels.path,
                    )
                yield Item(name=f"{label}/{row:08d}.png", label=label, size=images.row_size, offset=row)

    def read(self, split: str, item: Item) -> Content:
        """Encode one image."""
        images, _ = self._splits[split]
        pixels = np.frombuffer(images.read_rows(item.offset, 1), np.uint8).reshape(images.shape[1:])
        return Content(encode_png(pixels))

    def close(self) -> None:
        """Close the idx files."""
        for images, labels in self._splits.values():
            images.close()
            labels.close()


class _IdxFile:
    """An idx file of bytes: two zero bytes, type, number of dimensions, dimensions, data."""

    def __init__(self, path: Path, dimensions: int, scratch: Path) -> None:
        self.path = path
        self._file = open_decompressed(path, scratch)
        try:
            self._check(dimensions)
        except BaseException:
            self.close()
            raise

    def _check(self, dimensions: int) -> None:
        self._header = 4 + 4 * dimensions
        if self._file.size < self._header:
            raise SourceError(f"truncated: expected an idx header of {self._header} bytes", where=self.path)
        head = self._file.read(0, self._header)
        expected = bytes((0, 0, UNSIGNED_BYTES, dimensions))
        if head[:4] != expected:
            raise SourceError(
                f"wrong type of idx file: it starts with {head[:4].hex()}, expected {expected.hex()}", where=self.path
            )
        self.shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", head[4:])
        self.row_size = math.prod(self.shape[1:])
        if 0 in self.shape:
            raise SourceError(f"the idx file is empty: its dimensions are {_format_shape(self.shape)}", where=self.path)
        size = self._header + math.prod(self.shape)
        if self._file.size != size:
            raise SourceError(
                f"the file has {self._file.size} bytes, but its dimensions {_format_shape(self.shape)} need {size}",
                where=self.path,
            )

    def __len__(self) -> int:
        return self.shape[0]

    def read_rows(self, start: int, count: int) -> bytes:
        return self._file.read(self._header + start * self.row_size, count * self.row_size)

    def close(self) -> None:
        self._file.close()


def _open_pair(folder: Path, prefix: str, scratch: Path) -> tuple[_IdxFile, _IdxFile]:
    paths = []
    for what, dimensions in (("images", 3), ("labels", 1)):
        path = _find_idx(folder, prefix, what, dimensions)
        if path is None:
            raise SourceError(f"{prefix}-{what}-idx{dimensions}-ubyte[.gz] not found", where=folder)
        paths.append((path, dimensions))
    images = _IdxFile(*paths[0], scratch)
    try:
        labels = _IdxFile(*paths[1], scratch)
    except BaseException:
        images.close()
        raise
    if len(images) != len(labels):
        images.close()
        labels.close()
        raise SourceError(f"{len(images)} images, but {len(labels)} labels in {labels.path.name}", where=images.path)
    return images, labels


def _find_idx(folder: Path, prefix: str, what: str, dimensions: int) -> Path | None:
    """Find a file in either spelling, the decompressed one first."""
    for suffix in ("", ".gz"):
        for mark in "-.":
            path = folder / f"{prefix}-{what}{mark}idx{dimensions}-ubyte{suffix}"
            if path.is_file():
                return path
    return None


def _find_folders(where: str) -> list[Path]:
    """List the folders with images of a split: here, or where torchvision stores them."""
    folders = [Path(where, inside) for inside in FOLDERS]
    return [folder for folder in folders if any(_find_idx(folder, prefix, "images", 3) for prefix in PREFIXES.values())]


def _find_single_folder(where: str) -> Path:
    folders = _find_folders(where)
    if not folders:
        raise SourceError("neither train-images-idx3-ubyte[.gz] nor t10k-images-idx3-ubyte[.gz] found", where=where)
    if len(folders) > 1:
        raise SourceError(
            f"found two datasets: {folders[0]} and {folders[1]}", where=where, hint="pass only one of them"
        )
    return folders[0]


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
