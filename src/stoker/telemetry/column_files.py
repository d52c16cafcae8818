"""Append-only tables on disk: one file of numbers for each column; rows beyond the committed ones do not count."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 1 << 17


def append_bytes(path: Path, data: bytes | memoryview) -> None:
    """Append to a file."""
    with open(path, "ab", buffering=0) as file:
        while data:
            data = memoryview(data)[file.write(data) or 0 :]


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


class ColumnTable:
    """A table with columns of fixed types in one directory; only its writer knows the number of valid rows."""

    def __init__(self, folder: Path, name: str, columns: Mapping[str, str]) -> None:
        self.columns = {column: np.dtype(kind) for column, kind in columns.items()}
        self._paths = {column: folder / f"{name}.{column}" for column in columns}
        self._pending: dict[str, list[NDArray[Any]]] = {column: [] for column in columns}
        self.rows = 0

    def append(self, **columns: Any) -> None:
        """Append rows, given as one array or list for each column; they can be read after `flush`."""
        for name, kind in self.columns.items():
            self._pending[name].append(np.asarray(columns[name]).astype(kind))
        self.rows += len(self._pending[name][-1])

    def flush(self) -> None:
        """Write the appended rows."""
        for name, arrays in self._pending.items():
            if arrays:
                append_bytes(self._paths[name], np.concatenate(arrays).tobytes())
                arrays.clear()

    def read(self, name: str, first: int = 0, count: int | None = None) -> NDArray[Any]:
        """Return a column from a row on, or this many of its rows."""
        kind = self.columns[name]
        left = self.rows - first
        count = left if count is None else min(count, left)
        if count <= 0:
            return np.zeros(0, kind)
        return np.fromfile(self._paths[name], kind, count, offset=first * kind.itemsize)

    def read_blocks(self, *names: str) -> Iterator[list[NDArray[Any]]]:
        """Yield columns in blocks of rows; a large table is read faster in blocks that fit into the caches."""
        for first in range(0, self.rows, _BLOCK_ROWS):
            yield [self.read(name, first, _BLOCK_ROWS) for name in names]

    def truncate(self, rows: int) -> bool:
        """Cut off everything after these rows; return False if that many are not there."""
        self.rows = rows
        for name, path in self._paths.items():
            size = rows * self.columns[name].itemsize
            try:
                found = path.stat().st_size
            except FileNotFoundError:
                found = 0
            if found < size:
                return False
            if found > size:
                os.truncate(path, size)
        return True
