"""Parser of `mpirun --tag-output`: split its output into the lines of each rank.

mpirun reads at most 4,096 bytes of a rank at a time, writes `[1,RANK]<stdout>:` before them and after each newline in
them, and adds no newline of its own. So a tag can be anywhere, and the pieces of a line may be interleaved with those
of other ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from stoker.remote.mpi_rank import ESCAPE, MAX_LINE_BYTES, NEWLINE, NOTHING

_TAG = re.compile(rb"\[\d+,(?P<rank>\d+)\]<std(?P<stream>out|err|diag)>:")
# An incomplete tag at the end of the data.
_INCOMPLETE_TAG = re.compile(rb"\[(?:\d+(?:,(?:\d+(?:\](?:<(?:s(?:t(?:d(?:[a-z]{1,4}>?)?)?)?)?)?)?)?)?)?$")
_LINE_OR_REST = re.compile(rb"[^\n]*\n|[^\n]+")
_ESCAPE_SEQUENCE = re.compile(re.escape(ESCAPE) + rb"(.)", re.DOTALL)
_UNESCAPED = {NEWLINE: b"\n", NOTHING: b"", b"\n": b"", ESCAPE: ESCAPE}


class TaggedLine(NamedTuple):
    """A line of one rank, or of mpirun itself (rank None), without its newline."""

    rank: int | None
    stream: str
    text: bytes


class TagParser:
    """Incremental parser of one output stream of mpirun."""

    def __init__(self) -> None:
        self._rest = b""
        self._writer: tuple[int | None, str] = (None, "")
        self._buffers: defaultdict[tuple[int | None, str], _LineBuffer] = defaultdict(_LineBuffer)

    def feed(self, data: bytes) -> list[TaggedLine]:
        """Return the lines that are complete now."""
        data = self._rest + data
        incomplete = _INCOMPLETE_TAG.search(data, max(0, len(data) - 64))
        end = incomplete.start() if incomplete else len(data)
        self._rest = data[end:]
        return self._parse(data[:end])

    def finish(self) -> list[TaggedLine]:
        """Return what is left: lines without a newline."""
        lines = self._parse(self._rest)
        self._rest = b""
        for writer, buffer in self._buffers.items():
            lines += [TaggedLine(*writer, text) for text in buffer.flush()]
        return lines

    def _parse(self, data: bytes) -> list[TaggedLine]:
        lines, at = list[TaggedLine](), 0
        for tag in _TAG.finditer(data):
            lines += self._add(data[at : tag.start()])
            self._writer = int(tag["rank"]), f"std{tag['stream'].decode()}"
            at = tag.end()
        return lines + self._add(data[at:])

    def _add(self, data: bytes) -> list[TaggedLine]:
        """Add bytes without a tag to the current writer; after a newline the writer is mpirun itself."""
        lines = []
        for piece in _LINE_OR_REST.findall(data):
            lines += [TaggedLine(*self._writer, text) for text in self._buffers[self._writer].add(piece)]
            if piece.endswith(b"\n"):
                self._writer = (None, "")
        return lines


class _LineBuffer:
    """The output of one writer since its last newline."""

    def __init__(self) -> None:
        self._raw = b""
        self._text = b""

    def add(self, data: bytes) -> list[bytes]:
        """Add output, and return the lines that it completes."""
        raw = self._raw + data
        # An escape character at the end waits for its second byte.
        pending = (len(raw) - len(raw.rstrip(ESCAPE))) % 2
        self._raw = raw[len(raw) - pending :]
        raw = raw[: len(raw) - pending]
        if ESCAPE in raw:
            raw = _ESCAPE_SEQUENCE.sub(lambda match: _UNESCAPED.get(match[1], match[0]), raw)
        *lines, self._text = (self._text + raw).split(b"\n")
        return lines if len(self._text) <= MAX_LINE_BYTES else [*lines, *self.flush()]

    def flush(self) -> list[bytes]:
        """Return the rest, which has no newline."""
        text, self._text = self._text, b""
        return [text] if text else []
