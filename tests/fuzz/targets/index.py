"""Indexes of shards: NumPy files that come from any web server."""

from __future__ import annotations

import io

import numpy as np

from stoker.shards.index import INDEX_DTYPE, IndexBuilder, parse_index
from tests.fuzz.limits import Target


def run(data: bytes) -> None:
    """Decode an index and sum its lengths."""
    int(parse_index(data, "index/train-000000.tar.npy")["length"].sum())


def _valid() -> bytes:
    index = IndexBuilder()
    for number in range(20):
        index.add(512 * number, 300, number % 3)
    return index.to_bytes()


def _with_header(text: str, rows: bytes = b"") -> bytes:
    """Return a NumPy file with any text as its header."""
    encoded = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(encoded).to_bytes(2, "little") + encoded + rows


def _array(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


DTYPE = str(np.lib.format.dtype_to_descr(INDEX_DTYPE))
VALID = _valid()
TARGET = Target(
    run,
    valid=[VALID],
    hostile=[
        b"",
        VALID[:-1],
        VALID[:60],
        VALID + b"\0" * 1000,
        VALID[:8] + b"\xff\xff" + VALID[10:],
        b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + VALID[10:],
        b"\x93NUMPY\x03\x00" + VALID[8:],
        *(
            _with_header(f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': {shape}, }}")
            for shape in ("(1000000000,)", "(2**80,)", "(-1,)", "(1, 1)", "()", "(1.5,)", "'x'", f"({'9' * 90},)")
        ),
        _with_header(f"{{'descr': {DTYPE}, 'fortran_order': False, 'shape': (True,), }}", b"\0" * 16),
        _with_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
        _with_header("{'descr': [('a', 'b', 'c', 'd')], 'fortran_order': False, 'shape': (1,), }"),
        _with_header("{'descr': '<f8'"),
        _with_header("[" * 110),
        _with_header("1 +" * 30),
        _with_header("'''"),
        _with_header("{}"),
        _array(np.zeros(3)),
        _array(np.zeros((2, 2), dtype=INDEX_DTYPE)),
    ],
    tokens=[b"(", b")", b"'", b"9" * 12, b"{", b"[", b"descr", b"shape", b"True", b"\\", b"\n", b"0x", b"'''"],
)
