"""The catalog of a split: the list of its samples, on disk, so that memory does not grow with the dataset."""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.errors import SourceError
from stoker.shards.sample import Item, sample_key

ROW = struct.Struct("<IqQQIQ")
ROW_DTYPE = np.dtype(
    [("file", "<u4"), ("label", "<i8"), ("offset", "<u8"), ("name_at", "<u8"), ("name_len", "<u4"), ("size", "<u8")]
)
BLOCK_ROWS = 1 << 16
BUCKETS = 64
RELEASE_EVERY_ROWS = 4096


class Catalog:
    """The items that a scan of one split yielded, in order; rows are read by number."""

    def __init__(self, folder: Path, split: str, digest: str, stamp: str) -> None:
        self.split = split
        self.digest = digest
        self.stamp = stamp
        self._rows = _map_file(folder / f"{split}.rows")
        self._names = _map_file(folder / f"{split}.names")

    @classmethod
    def write(
        cls,
        folder: Path,
        split: str,
        items: Iterable[Item],
        *,
        check_key: Callable[[str], None] = lambda _: None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Catalog:
        """Store the items of a scan; raise SourceError for an empty scan, a duplicate key or a key that is not allowed.

        The digest covers names, sizes and labels; the stamp covers the stamps of the items, to detect changed files.
        """
        digest, stamps = hashlib.sha256(), hashlib.sha256()
        name_at = 0
        with ExitStack() as stack:
            rows = stack.enter_context((folder / f"{split}.rows").open("wb"))
            names = stack.enter_context((folder / f"{split}.names").open("wb"))
            hashes = [stack.enter_context(_bucket_path(folder, split, i).open("wb")) for i in range(BUCKETS)]
            for count, item in enumerate(items):
                name = _encode_name(item.name)
                rows.write(ROW.pack(item.file, item.label, item.offset, name_at, len(name), item.size))
                names.write(name)
                key = sample_key(item.name)
                check_key(key)
                key_hash = hash(key)
                hashes[key_hash % BUCKETS].write(key_hash.to_bytes(8, "little", signed=True))
                digest.update(b"%d %d %d %s" % (item.label, item.size, len(name), name))
                stamps.update(b"%d " % item.stamp)
                name_at += len(name)
                if count % 1000 == 999:
                    progress(1000)
        if name_at == 0:
            raise SourceError("the split has no images", where=split)
        catalog = cls(folder, split, digest.hexdigest(), stamps.hexdigest())
        try:
            catalog._check_duplicate_keys(folder)
        except BaseException:
            catalog.close()
            raise
        return catalog

    def __len__(self) -> int:
        return len(self._rows) // ROW.size

    def __iter__(self) -> Iterator[Item]:
        for start in range(0, len(self), BLOCK_ROWS):
            yield from self.read_rows(range(start, min(start + BLOCK_ROWS, len(self))))

    def read_rows(self, numbers: Iterable[int]) -> Iterator[Item]:
        """Yield the rows with these numbers."""
        for count, number in enumerate(numbers):
            file, label, offset, name_at, name_len, size = ROW.unpack_from(self._rows, number * ROW.size)
            yield Item(self._names[name_at : name_at + name_len].decode(), label, size, file, offset)
            if count % RELEASE_EVERY_ROWS == RELEASE_EVERY_ROWS - 1:
                self._release_pages()

    def total_bytes(self, overhead: int) -> int:
        """Sum the bytes of all samples, each with a format's overhead."""
        return sum(int(block["size"].sum(dtype=np.int64)) for block in self._blocks()) + overhead * len(self)

    def label_range(self) -> tuple[int, int]:
        """Return the smallest and the largest label."""
        extremes = [(int(block["label"].min()), int(block["label"].max())) for block in self._blocks()]
        return min(low for low, _ in extremes), max(high for _, high in extremes)

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
        self._names.close()

    def _blocks(self) -> Iterator[npt.NDArray[np.void]]:
        for start in range(0, len(self), BLOCK_ROWS):
            count = min(BLOCK_ROWS, len(self) - start)
            yield np.frombuffer(self._rows[start * ROW.size : (start + count) * ROW.size], ROW_DTYPE)
            self._release_pages()

    def _release_pages(self) -> None:
        """Release the pages that were read, so that memory does not grow with the dataset."""
        self._rows.madvise(mmap.MADV_DONTNEED)
        self._names.madvise(mmap.MADV_DONTNEED)

    def _check_duplicate_keys(self, folder: Path) -> None:
        """Raise SourceError for a duplicate key; only keys with equal 64-bit hashes are compared as text."""
        suspects: set[int] = set()
        for i in range(BUCKETS):
            path = _bucket_path(folder, self.split, i)
            suspects.update(find_duplicates(np.fromfile(path, dtype=np.int64)))
            path.unlink()
        if not suspects:
            return
        seen: dict[str, str] = {}
        for item in self:
            key = sample_key(item.name)
            if hash(key) not in suspects:
                continue
            if key in seen:
                raise SourceError(
                    f"{seen[key]} and {item.name} have the same key {key!r}",
                    where=self.split,
                    hint="rename or remove one of them",
                )
            seen[key] = item.name


def find_duplicates(hashes: npt.NDArray[np.int64]) -> list[int]:
    """Return the values that occur more than once."""
    hashes = np.sort(hashes)
    duplicates: list[int] = hashes[1:][hashes[1:] == hashes[:-1]].tolist()
    return duplicates


def _encode_name(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"the name {name!r} is not UTF-8", hint="rename it") from error


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _bucket_path(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}.keys-{number:02d}"
