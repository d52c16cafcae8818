"""The index of a shard: offset, length and label of each image, so that one sample can be read without the rest."""

from __future__ import annotations

import io
import threading
from array import array

import numpy as np
import numpy.typing as npt

from stoker.errors import VerificationError

MAX_LABEL = 2**31 - 1
INDEX_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("label", "<i4")])

Index = npt.NDArray[np.void]

# NumPy parses headers with Python's parser, which occasionally fails in Python 3.11 when threads use it concurrently.
_numpy_parser_lock = threading.Lock()


def index_name(shard: str) -> str:
    """Return the path of a shard's index: in a separate folder, because readers glob `train-*`."""
    return f"index/{shard}.npy"


class IndexBuilder:
    """Builder of an index, 16 bytes per image."""

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
        """Encode as a NumPy file, for `numpy.load`."""
        rows = np.empty(len(self), dtype=INDEX_DTYPE)
        rows["offset"], rows["length"], rows["label"] = self._offsets, self._lengths, self._labels
        out = io.BytesIO()
        np.lib.format.write_array(out, rows, version=(1, 0), allow_pickle=False)
        return out.getvalue()


def parse_index(data: bytes, where: str) -> Index:
    """Decode an index; raise VerificationError for anything else."""
    try:
        with _numpy_parser_lock:
            rows: Index = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise VerificationError(f"invalid shard index: {error}", where=where) from error
    if rows.dtype != INDEX_DTYPE or rows.ndim != 1:
        raise VerificationError(f"invalid shard index: dtype {rows.dtype}, shape {rows.shape}", where=where)
    return rows
