"""The index beside a shard: where each image's bytes lie, so that one sample can be read without the rest."""

from __future__ import annotations

import io
import threading
from array import array

import numpy as np
import numpy.typing as npt

from stoker.errors import DataFaultError

MAX_LABEL = 2**31 - 1
INDEX_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("label", "<i4")])

Index = npt.NDArray[np.void]

# NumPy reads a header by Python's own parser, which in 3.11 fails now and then when threads use it at the same time.
_numpy_parser_lock = threading.Lock()


def index_name(shard: str) -> str:
    """Where a shard's index lies: in a folder of its own, for readers that glob `train-*`."""
    return f"index/{shard}.npy"


class IndexBuilder:
    """Collects where images lie, 16 bytes for each."""

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._lengths = array("I")
        self._labels = array("i")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, length: int, label: int) -> None:
        """Add the next sample."""
        self._offsets.append(offset)
        self._lengths.append(length)
        self._labels.append(label)

    def to_bytes(self) -> bytes:
        """Encode as a NumPy file, which any tool can open with `numpy.load`."""
        rows = np.empty(len(self), dtype=INDEX_DTYPE)
        rows["offset"], rows["length"], rows["label"] = self._offsets, self._lengths, self._labels
        out = io.BytesIO()
        np.lib.format.write_array(out, rows, version=(1, 0), allow_pickle=False)
        return out.getvalue()


def parse_index(data: bytes, where: str) -> Index:
    """Decode an index; refuse anything that is not one."""
    try:
        with _numpy_parser_lock:
            rows: Index = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise DataFaultError(f"not a shard index: {error}", where=where) from error
    if rows.dtype != INDEX_DTYPE or rows.ndim != 1:
        raise DataFaultError(f"not a shard index: it holds {rows.dtype} of shape {rows.shape}", where=where)
    return rows
