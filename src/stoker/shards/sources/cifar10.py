"""Source: CIFAR-10 as downloaded, Python 2 pickles in a tar, unpickled without executing code."""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.errors import NotFoundError, SourceError
from stoker.shards.sample import Content, Item
from stoker.shards.sources.files import OpenFile, open_decompressed, translate_disk_full_errors
from stoker.shards.sources.png import PNG_RECIPE, encode_png
from stoker.shards.sources.tarfiles import iter_files

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
META = "batches.meta"
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FILES = (META, *BATCHES)
SPLITS = {"train": range(5), "test": range(5, 6)}
CLASSES = 10
ROW_BYTES = 3 * 32 * 32
MAX_FILE_BYTES = 100_000_000  # a batch has 31 million bytes and is read into memory


class Cifar10Source:
    """Images of the batches as lossless PNG; a batch is unpickled once, and its pixels are stored in scratch."""

    name = "cifar10"
    recipe = PNG_RECIPE

    def __init__(self, where: str, *, scratch: Path) -> None:
        self._scratch = scratch
        self._batches: dict[int, _Batch] = {}
        self._lock = threading.Lock()
        self._files = _find_files(Path(where), scratch)
        try:
            for file in FILES:
                if file not in self._files:
                    raise SourceError(f"{file} not found", where=where, hint=f"download {ARCHIVE} again")
            self.classes: Sequence[str] = _read_class_names(self._files[META])
        except BaseException:
            self.close()
            raise
        self.splits: Sequence[str] = tuple(SPLITS)
        self.notes: Sequence[str] = ()

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether this is the archive, the unpacked folder, or a folder with one of them."""
        path = Path(where)
        try:
            return (path.name == ARCHIVE and path.is_file()) or any(
                (path / inside).is_file() for inside in (ARCHIVE, f"{FOLDER}/{BATCHES[0]}", BATCHES[0])
            )
        except (OSError, ValueError):
            return False

    def scan(self, split: str) -> Iterator[Item]:
        """List the images of the split's batches in order."""
        batches = [(number, self._batch(number)) for number in SPLITS[split]]
        names = np.unique(np.concatenate([batch.names for _, batch in batches]))
        named = len(names) == sum(len(batch.labels) for _, batch in batches)
        if not named:
            note = f"{split}: file names are missing or not unique, so samples are named by batch and row"
            self.notes = tuple(dict.fromkeys((*self.notes, note)))
        for number, batch in batches:
            for row, label in enumerate(batch.labels):
                file = batch.names[row].decode() if named else f"{BATCHES[number]}_{row:05d}.png"
                yield Item(name=f"{self.classes[label]}/{file}", label=label, size=ROW_BYTES, file=number, offset=row)

    def read(self, split: str, item: Item) -> Content:  # noqa: ARG002 - the batch implies the split
        """Encode one image; a row holds its red, green and blue planes."""
        planes = self._batch(item.file).pixels[item.offset].reshape(3, 32, 32)
        return Content(encode_png(np.ascontiguousarray(planes.transpose(1, 2, 0))))

    def close(self) -> None:
        """Close the files and release the mapped pixels."""
        self._batches.clear()
        for file in self._files.values():
            file.file.close()

    def _batch(self, number: int) -> _Batch:
        with self._lock:
            if number not in self._batches:
                name = BATCHES[number]
                self._batches[number] = _load_batch(self._files[name], self._scratch / f"{name}.npy")
            return self._batches[number]


class _BatchFile(NamedTuple):
    """One of the seven files of the dataset, inside the archive or unpacked."""

    file: OpenFile
    offset: int
    size: int
    where: str


class _Batch(NamedTuple):
    """A batch that needs little memory: pixels are mapped from a file, names and labels are flat arrays."""

    pixels: npt.NDArray[np.uint8]
    labels: bytes
    names: npt.NDArray[np.bytes_]


class _PickleStub:
    """A placeholder for arrays and dtypes in a pickle, which only stores its arguments and state."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that returns `_PickleStub` for the NumPy names that a batch needs, and rejects every other name."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def __init__(self, file: IO[bytes], where: str) -> None:
        super().__init__(file, encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder; nothing is ever imported."""
        if (module, name) not in self.ALLOWED:
            raise SourceError(
                f"the pickle contains {module}.{name}, which is not expected in a CIFAR-10 file",
                where=self._where,
                hint="do not trust this file; download it again",
            )
        return _PickleStub


def _unpickle(file: _BatchFile) -> dict[bytes, Any]:
    """Unpickle a file that must contain a dict with byte strings as keys."""
    if file.size > MAX_FILE_BYTES:
        raise SourceError(
            f"the file has {file.size} bytes; CIFAR-10 files have at most {MAX_FILE_BYTES}", where=file.where
        )
    try:
        content = RestrictedUnpickler(io.BytesIO(file.file.read(file.offset, file.size)), file.where).load()
    except SourceError:
        raise
    except Exception as error:  # a corrupt pickle can raise anything
        raise SourceError(f"corrupt pickle: {type(error).__name__}: {error}", where=file.where) from error
    if not isinstance(content, dict):
        raise SourceError(f"the pickle contains a {type(content).__name__}, expected a dict", where=file.where)
    return content


def _read_class_names(file: _BatchFile) -> tuple[str, ...]:
    names = _unpickle(file).get(b"label_names")
    if not isinstance(names, list) or len(names) != CLASSES or not all(map(_is_plain_name, names)):
        raise SourceError(f"label_names must be {CLASSES} names, got {names!r:.200}", where=file.where)
    return tuple(name.decode() for name in names)


def _load_batch(file: _BatchFile, pixels_path: Path) -> _Batch:
    content = _unpickle(file)
    pixels = _parse_pixels(content.get(b"data"), file.where)
    labels = _parse_labels(content.get(b"labels"), len(pixels), file.where)
    names = content.get(b"filenames")
    if not isinstance(names, list) or len(names) != len(pixels) or not all(map(_is_png_name, names)):
        names = []
    with translate_disk_full_errors(pixels_path.parent):
        np.save(pixels_path, pixels)
    return _Batch(np.load(pixels_path, mmap_mode="r"), labels, np.array(names, np.bytes_))


def _parse_pixels(data: object, where: str) -> npt.NDArray[np.uint8]:
    """Build the array that the pickle describes: state = (version, shape, dtype, column order, bytes)."""
    match data:
        case _PickleStub(state=(_, (int(rows), int(width)), _PickleStub(args=(b"u1", *_)), int(columns), bytes(raw))):
            if width != ROW_BYTES or rows < 1 or len(raw) != rows * ROW_BYTES:
                raise SourceError(
                    f"data is {rows} × {width} in {len(raw)} bytes; expected rows of {ROW_BYTES} bytes", where=where
                )
            return np.frombuffer(raw, np.uint8).reshape((rows, ROW_BYTES), order="F" if columns else "C")
    raise SourceError("data is not a two-dimensional array of bytes", where=where)


def _parse_labels(labels: object, rows: int, where: str) -> bytes:
    if not isinstance(labels, list):
        raise SourceError("labels is not a list", where=where)
    if len(labels) != rows:
        raise SourceError(f"{rows} rows, but {len(labels)} labels", where=where)
    for row, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < CLASSES:
            raise SourceError(f"label {label!r:.50} of row {row} must be between 0 and {CLASSES - 1}", where=where)
    return bytes(labels)


def _is_plain_name(name: object) -> bool:
    """Return whether a name is a valid path component: printable ASCII, no slash, no leading dot."""
    return isinstance(name, bytes) and re.fullmatch(rb"(?!\.)[ -.0-~]+", name) is not None


def _is_png_name(name: object) -> bool:
    return isinstance(name, bytes) and name.endswith(b".png") and _is_plain_name(name)


def _find_files(path: Path, scratch: Path) -> dict[str, _BatchFile]:
    """Find the seven files, in the archive or in the unpacked folder."""
    if path.is_dir():
        for folder in (path / FOLDER, path):
            if any((folder / name).is_file() for name in BATCHES):
                files = (OpenFile(folder / name) for name in FILES if (folder / name).is_file())
                return {file.path.name: _BatchFile(file, 0, file.size, str(file.path)) for file in files}
        if not (path / ARCHIVE).is_file():
            raise SourceError(f"neither {ARCHIVE} nor {FOLDER}/ found", where=path)
        path /= ARCHIVE
    elif not path.is_file():
        raise NotFoundError("no such file or directory", where=path)
    archive = open_decompressed(path, scratch)
    files_by_name = {}
    try:
        for name, offset, size in iter_files(archive):
            inside = name.removeprefix("./").removeprefix(f"{FOLDER}/")
            if inside in FILES:
                files_by_name[inside] = _BatchFile(archive, offset, size, f"{path} ({inside})")
    except BaseException:
        archive.close()
        raise
    return files_by_name
