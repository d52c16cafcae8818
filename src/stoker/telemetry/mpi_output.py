"""What `mpirun --tag-output` writes, taken apart into the lines of each rank.

mpirun reads at most 4,096 bytes of a rank at a time, writes `[1,RANK]<stdout>:` before them and after each end of line
in them, and no end of line of its own behind them. So a tag can stand anywhere, and a line may come in pieces with
those of other ranks between them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from stoker.telemetry.mpi_rank import ESCAPE, LONGEST_LINE, NEWLINE, NOTHING

_TAG = re.compile(rb"\[\d+,(?P<rank>\d+)\]<std(?P<stream>out|err|diag)>:")
# What may be the beginning of a tag, at the end of what was read.
_BEGUN = re.compile(rb"\[(?:\d+(?:,(?:\d+(?:\](?:<(?:s(?:t(?:d(?:[a-z]{1,4}>?)?)?)?)?)?)?)?)?)?$")
_PIECE = re.compile(rb"[^\n]*\n|[^\n]+")
_ESCAPED = re.compile(re.escape(ESCAPE) + rb"(.)", re.DOTALL)
_MEANING = {NEWLINE: b"\n", NOTHING: b"", b"\n": b"", ESCAPE: ESCAPE}


class TaggedLine(NamedTuple):
    """A line of one rank, or of mpirun itself (rank None), without its end."""

    rank: int | None
    stream: str
    text: bytes


class Tagged:
    """Takes one stream of mpirun's apart."""

    def __init__(self) -> None:
        self._rest = b""
        self._who: tuple[int | None, str] = (None, "")
        self._lines: defaultdict[tuple[int | None, str], _Line] = defaultdict(_Line)

    def feed(self, data: bytes) -> list[TaggedLine]:
        """Give the lines that are whole now."""
        data = self._rest + data
        begun = _BEGUN.search(data, max(0, len(data) - 64))
        end = begun.start() if begun else len(data)
        self._rest = data[end:]
        return self._taken(data[:end])

    def finish(self) -> list[TaggedLine]:
        """Give what is left: lines without an end."""
        found = self._taken(self._rest)
        self._rest = b""
        for who, line in self._lines.items():
            found += [TaggedLine(*who, text) for text in line.rest()]
        return found

    def _taken(self, data: bytes) -> list[TaggedLine]:
        found, at = list[TaggedLine](), 0
        for tag in _TAG.finditer(data):
            found += self._said(data[at : tag.start()])
            self._who = int(tag["rank"]), f"std{tag['stream'].decode()}"
            at = tag.end()
        return found + self._said(data[at:])

    def _said(self, data: bytes) -> list[TaggedLine]:
        """Take bytes without a tag: behind an end of line they are mpirun's own words."""
        found = []
        for piece in _PIECE.findall(data):
            found += [TaggedLine(*self._who, text) for text in self._lines[self._who].add(piece)]
            if piece.endswith(b"\n"):
                self._who = (None, "")
        return found


class _Line:
    """What one writer has said since its last end of line."""

    def __init__(self) -> None:
        self._raw = b""
        self._text = b""

    def add(self, data: bytes) -> list[bytes]:
        """Give the lines that end in this."""
        raw = self._raw + data
        # An escape at the very end waits for what it stands for.
        odd = (len(raw) - len(raw.rstrip(ESCAPE))) % 2
        self._raw = raw[len(raw) - odd :]
        raw = raw[: len(raw) - odd]
        if ESCAPE in raw:
            raw = _ESCAPED.sub(lambda match: _MEANING.get(match[1], match[0]), raw)
        *whole, self._text = (self._text + raw).split(b"\n")
        return whole if len(self._text) <= LONGEST_LINE else [*whole, *self.rest()]

    def rest(self) -> list[bytes]:
        """Give what has no end."""
        text, self._text = self._text, b""
        return [text] if text else []
