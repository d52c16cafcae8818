"""When the lines of a log were written: an index beside each log, which itself has only what the program wrote.

A line `<offset> <time>` of `worker-0.0.times` says that `worker-0.0.log` from this byte on was written at this time or
up to a second later. An index that begins with `sampled` was made by looking at the size of the log; otherwise the
times come from whoever took the lines from the program.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from pathlib import Path

RESOLUTION_S = 1.0
"""Lines that follow each other faster share a time, so that the index of a busy log stays small."""
SAMPLED = "sampled"


def index_path(log: Path) -> Path:
    """Return the path of the index of a log."""
    return log.with_suffix(".times")


class LogTimesWriter:
    """Writer of the index of one log; an index that exists is continued."""

    def __init__(self, log: Path, *, sampled: bool = False) -> None:
        self._path, self._last = index_path(log), 0.0
        self._header = f"{SAMPLED}\n" if sampled else ""

    def add(self, offset: int, when: float) -> None:
        """Record that the log was written at this time from this byte on; a write error is no reason to stop."""
        if 0 <= when - self._last < RESOLUTION_S:
            return
        self._last = when
        with suppress(OSError), open(self._path, "a") as file:
            file.write(f"{'' if file.tell() else self._header}{offset} {when:.3f}\n")


class LogTimesSampler:
    """Writer of the indexes of logs that programs write by themselves: looks at their sizes, several times a second."""

    def __init__(self, logs: Iterable[Path]) -> None:
        """Continue after what is in the logs that have an index."""
        self._writers = {log: LogTimesWriter(log, sampled=True) for log in logs}
        self._sizes = {log: _size(log) if index_path(log).exists() else 0 for log in self._writers}

    def sample(self) -> None:
        """Record the current time for each log that has grown."""
        for log, writer in self._writers.items():
            known, size = self._sizes[log], _size(log)
            if size > known:
                writer.add(known, time.time())
            self._sizes[log] = size


class LogTimes:
    """Reader of the index of one log, which may grow; without an index, no time is known."""

    def __init__(self, log: Path) -> None:
        self._path, self._position, self.is_sampled = index_path(log), 0, False
        # Arrays, because the log of a week has more than half a million records.
        self._offsets, self._times = array("q"), array("d")

    def refresh(self) -> None:
        """Read what was added to the index."""
        with suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # the rest is still to come
                    break
                self._position += len(line)
                self._add(line.decode(errors="replace").rstrip())

    def find(self, offset: int) -> float | None:
        """Return when the line at this offset was written; None if the index does not say."""
        number = bisect_right(self._offsets, offset)
        return self._times[number - 1] if number else None

    def next_offset(self, offset: int) -> float:
        """Return the first offset after this one with a time of its own; infinity if there is none."""
        number = bisect_right(self._offsets, offset)
        return self._offsets[number] if number < len(self._offsets) else inf

    def _add(self, line: str) -> None:
        self.is_sampled = self.is_sampled or line == SAMPLED
        with suppress(ValueError, OverflowError):  # the header, or a line that a full disk has cut
            offset, when = line.split()
            start, written = int(offset), float(when)
            while self._offsets and self._offsets[-1] >= start:  # the log was truncated and copied again
                self._offsets.pop()
                self._times.pop()
            self._offsets.append(start)
            self._times.append(written)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it does not exist yet
        return 0
