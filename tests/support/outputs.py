"""A program whose output is compared byte by byte with what arrived in a log."""

from __future__ import annotations

from pathlib import Path

_PROGRAM = """
import os, random, time
from pathlib import Path

copy, go = Path({copy!r}), Path({copy!r}).with_name("go")
draw, number = random.Random(7), 0
with open(copy, "wb", buffering=0) as file:
    while number < 200 or not go.exists():
        number += 1
        # Any bytes but newlines, so that a line is often unfinished: control characters, half a character of UTF-8.
        piece = draw.randbytes(draw.randrange(1, 20_000)).replace(b"\\n", b"\\r") + b"\\n" * (number % 3 == 0)
        file.write(piece)
        while piece:
            piece = piece[os.write(1 + number % 2, piece) :]
        time.sleep(0.01)
    file.write(b"end")
    os.write(1, b"end")
"""


def write_program(copy: Path) -> str:
    """Return a program that writes binary output, and the same bytes to `copy`, until `go` exists beside `copy`."""
    return _PROGRAM.format(copy=str(copy))
