"""The index of a shard: offset, length and label of each image, so that one sample can be read without the rest."""

from __future__ import annotations

import io
import re
import struct
from array import array

import numpy as np
import numpy.typing as npt

from stoker.errors import VerificationError
from stoker.storage import MAX_GET_BYTES

MAX_LABEL = 2**31 - 1
INDEX_DTYPE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("label", "<i4")])

Index = npt.NDArray[np.void]

# The start of a NumPy file of version 1.0, and its header as NumPy writes it.
_MAGIC = b"\x93NUMPY\x01\x00"
_MAX_HEADER_BYTES = 4096
_HEADER_LENGTH = struct.Struct("<H")
_HEADER_START = len(_MAGIC) + _HEADER_LENGTH.size
_HEADER = re.compile(
    rb"\{'descr': "
    + re.escape(repr(INDEX_DTYPE.descr).encode())
    + rb", 'fortran_order': False, 'shape': \((?P<rows>[0-9]{1,18}),\), \} *\n"
)


def index_name(shard: str) -> str:
    """Return the path of a shard's index: in a separate folder, because readers glob `train-*`."""
    return f"index/{shard}.npy"


def max_index_bytes(samples: int) -> int:
    """Return the limit of an index to read: not less than that of other objects, so that a stale one is parsed."""
    return max(MAX_GET_BYTES, _MAX_HEADER_BYTES + samples * INDEX_DTYPE.itemsize)


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
    """Decode an index without copying it; raise VerificationError for anything else.

    The header is matched, not evaluated: NumPy's own reader allocates whatever a header claims.
    """
    (length,) = _HEADER_LENGTH.unpack_from(data, len(_MAGIC)) if len(data) >= _HEADER_START else (0,)
    end = _HEADER_START + length
    header = _HEADER.fullmatch(data[_HEADER_START:end]) if data.startswith(_MAGIC) else None
    if header is None:
        raise VerificationError("invalid shard index: not a NumPy file with the columns of an index", where=where)
    rows, size = int(header["rows"]), len(data) - end
    if rows * INDEX_DTYPE.itemsize != size:
        what = f"invalid shard index: its header promises {rows:,} rows, but {size:,} bytes follow"
        raise VerificationError(what, where=where)
    return np.frombuffer(data, dtype=INDEX_DTYPE, offset=end)
