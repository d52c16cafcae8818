"""Log reader: split the logs of a run into text and events, once or while they grow. Read-only."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from stoker.telemetry.events import PREFIX, Event, split_line
from stoker.telemetry.log_times import LogTimes
from stoker.telemetry.progress_bars import COLOUR, is_redrawn, last_state, may_be_redrawn

MAX_LINE_BYTES = 1 << 20
"""Size after which a line without a newline is returned as is."""

_BLOCK = 1 << 20
_NAME = re.compile(r"(?P<role>.+)-(?P<index>\d{1,9})\.(?P<attempt>\d{1,9})\.log")
# Prefixes that mpirun, torchrun and Ray add to a line: [1,0]<stdout>: or [default0]: or (worker pid=12, ip=10.0.0.1).
_TAG = re.compile(
    rf"(?:\s|{COLOUR}|\[[A-Za-z]*\d[\w.,/:-]*\](?:<std\w+>)?:?|\([^()]*\bpid=\d+[^()]*\))*", re.ASCII | re.DOTALL
)


class LogContent(NamedTuple):
    """The content of a log: its lines of text, and its events, each in the order of the file."""

    lines: list[str]
    events: list[Event]


class LogFile(NamedTuple):
    """The log of a slot in an attempt, from its file name: `worker-0.1.log`."""

    slot: str
    attempt: int
    path: Path


class LogLine(NamedTuple):
    """A line of text, its log, and when it was written (see `log_times`; 0 if that is not known)."""

    t: float
    log: LogFile
    text: str


class RunLog(NamedTuple):
    """The content of all logs of a run, merged by time."""

    lines: list[LogLine]
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that were written but never arrived: sequence numbers `first` to `last` of one process."""

    slot: str
    rank: int
    attempt: int
    pid: int
    first: int
    last: int

    @property
    def missing(self) -> int:
        """The number of missing events."""
        return self.last - self.first + 1


class LogTail:
    """Incremental reader of one log, which may not exist yet, be truncated, or be replaced."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = self._inode = 0
        self._rest = b""
        self.line_offset = 0
        """Where the line begins that was yielded last."""
        self._bar = ""
        """The last state of a progress bar whose line an event has ended, or that is very long."""
        self._is_plain = False
        """Whether the lines of the current block need not be searched for progress bars."""
        self._partial, self._partial_at = "", (0, 0, 0, "")

    @property
    def partial(self) -> str:
        """The current state of a last line that is a progress bar; empty if there is none."""
        position = (self._inode, self._offset, len(self._rest), self._bar)
        if position != self._partial_at:  # otherwise nothing was written: this is asked for at every poll
            text = self._bar + self._rest.decode(errors="replace")
            self._partial = last_state(text) if is_redrawn(text) or self._bar else ""
            self._partial_at = position
        return self._partial

    def read(self, *, final: bool = False) -> LogContent:
        """Return the new complete lines; with `final`, when the writer has exited, also a last incomplete one."""
        log = LogContent([], [])
        for part in self.iter_parts(final=final):
            if isinstance(part, Event):
                log.events.append(part)
            else:
                log.lines.append(part)
        return log

    def iter_parts(self, *, final: bool = False) -> Iterator[Event | str]:
        """Yield the new text and events one by one, in the order of the log; of a progress bar, its last state."""
        for raw in self._new_lines(final):
            line = raw.decode(errors="replace")
            has_events = PREFIX in line
            if self._is_plain and not has_events:
                yield line
                continue
            events, text = _split(line) if has_events else ([], line)
            if events and text and is_redrawn(text):  # the newline is that of the event: the program draws on
                self._bar = last_state(self._bar + text)
            elif text is not None:
                yield self._finish_line(text)
            yield from events
        if final and self._bar:
            yield self._finish_line("")

    def _finish_line(self, text: str) -> str:
        bar, self._bar = self._bar, ""
        return last_state(bar + text)

    def seek_to_tail(self, size: int) -> None:
        """Continue at the first line that begins in the last `size` bytes."""
        with suppress(OSError), self.path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            self._offset = max(0, file.seek(0, os.SEEK_END) - size)
            if self._offset:
                file.seek(self._offset - 1)
                self._offset += len(file.readline()) - 1

    def _new_lines(self, final: bool) -> Iterator[bytes]:
        while block := self._read_block():
            begin = self._offset - len(self._rest)
            self._offset += len(block)
            data = self._rest + block
            self._is_plain = not self._bar and not may_be_redrawn(data)
            *lines, self._rest = data.split(b"\n")
            for line in lines:
                self.line_offset, begin = begin, begin + len(line) + 1
                yield line
            self._shorten_bar()
            if len(self._rest) > MAX_LINE_BYTES:
                yield self._take_rest()
        if final and self._rest:
            yield self._take_rest()

    def _read_block(self) -> bytes:
        """Read the next bytes. The file is not kept open between lines: an iterator may be abandoned at any of them."""
        try:
            with self.path.open("rb") as file:
                self._rewind_if_replaced(file.fileno())
                file.seek(self._offset)
                return file.read(_BLOCK)
        except OSError:  # it does not exist yet, or no longer
            self._offset, self._inode, self._rest, self._bar = 0, 0, b"", ""
            return b""

    def _shorten_bar(self) -> None:
        """Keep only the last state of a progress bar that is too long for one line."""
        if len(self._rest) > MAX_LINE_BYTES and b"\r" in self._rest:
            drawn, _, rest = self._rest.rpartition(b"\r")
            self._bar = last_state(self._bar + drawn.decode(errors="replace"))
            self._rest = b"\r" + rest

    def _take_rest(self) -> bytes:
        rest, self._rest = self._rest, b""
        self.line_offset = self._offset - len(rest)
        return rest

    def _rewind_if_replaced(self, fd: int) -> None:
        """Start from the beginning if the file was replaced or truncated."""
        stat = os.fstat(fd)
        if (self._inode and stat.st_ino != self._inode) or stat.st_size < self._offset:
            self._offset, self._rest, self._bar = 0, b"", ""
        self._inode = stat.st_ino


class RunTail:
    """Incremental reader of all logs of a run, including those of new slots and attempts."""

    def __init__(self, folder: str | Path, *, slot: str | None = None) -> None:
        self.folder, self._slot = Path(folder), slot
        self._tails: dict[LogFile, LogTail] = {}
        self._clocks: dict[LogFile, _LineClock] = {}
        self._bars: dict[LogFile, str] = {}

    def read(self, *, final: bool = False) -> RunLog:
        """Return the new content, merged: events and text by their times."""
        log = RunLog([], [])
        for file in self._files():
            for part in self._parts(file, final):
                if isinstance(part, Event):
                    log.events.append(part)
                else:
                    log.lines.append(part)
        log.events.sort(key=lambda event: event.t)
        log.lines.sort(key=lambda line: (line.log.attempt, line.t))
        return log

    def lines(self, *, final: bool = False) -> Iterator[LogLine]:
        """Yield the new lines of text, attempt by attempt; lazily, because a log may be larger than memory."""
        for _, files in groupby(self._files(), key=lambda file: file.attempt):
            streams = [self._lines(file, final) for file in files]
            yield from merge(*streams, key=lambda line: line.t)

    def events(self, *, final: bool = False) -> list[Event]:
        """Return the new events, sorted by time, without the text."""
        events = (event for file in self._files() for event in self._events(file, final))
        return sorted(events, key=lambda event: event.t)

    def changed_bars(self) -> list[LogLine]:
        """Return the current states of progress bars that were redrawn since the last call."""
        bars = {file: tail.partial for file, tail in self._tails.items()}
        changed = [file for file, bar in bars.items() if bar and bar != self._bars.get(file)]
        self._bars = bars
        return [LogLine(time.time(), file, bars[file]) for file in changed]

    def _files(self) -> list[LogFile]:
        return [file for file in list_log_files(self.folder) if self._slot in (None, file.slot)]

    def _lines(self, file: LogFile, final: bool) -> Iterator[LogLine]:
        return (part for part in self._parts(file, final) if isinstance(part, LogLine))

    def _events(self, file: LogFile, final: bool) -> Iterator[Event]:
        """Yield the new events of a log; when its text was written need not be found out."""
        tail, clock = self._open(file)
        for part in tail.iter_parts(final=final):
            if isinstance(part, Event):
                clock.last_event = max(part.t, clock.last_event)
                yield with_slot(part, file)

    def _open(self, file: LogFile) -> tuple[LogTail, _LineClock]:
        """Return the reader of a log and its clock, for a new pass."""
        tail = self._tails.setdefault(file, LogTail(file.path))
        clock = self._clocks.setdefault(file, _LineClock(file.path))
        clock.start_pass()
        return tail, clock

    def _parts(self, file: LogFile, final: bool) -> Iterator[Event | LogLine]:
        tail, clock = self._open(file)
        for part in tail.iter_parts(final=final):
            if isinstance(part, Event):
                clock.last_event = max(part.t, clock.last_event)
                yield with_slot(part, file)
            else:
                yield LogLine(clock.time_of(tail.line_offset), file, part)


class _LineClock:
    """The times of the lines of one log, never decreasing: from its index, else from the event before a line."""

    def __init__(self, log: Path) -> None:
        self._index = LogTimes(log)
        self._read_at, self._previous_read_at, self._last = 0.0, 0.0, 0.0
        self._is_fresh = False
        self._same_until = 0.0
        """The offset up to which lines have the same time as the last one."""
        self.last_event = 0.0

    def start_pass(self) -> None:
        """Begin to read what was added to the log since the last pass."""
        self._previous_read_at, self._read_at = self._read_at, time.time()
        self._is_fresh, self._same_until = False, 0.0

    def time_of(self, offset: int) -> float:
        """Return when the line at this offset was written; 0 if that is not known. Offsets ascend in a pass."""
        if offset < self._same_until:
            return self._last
        if not self._is_fresh:
            self._index.refresh()
            self._is_fresh = True
        written = self._index.find(offset)
        if written is None:
            written = self.last_event
        else:
            self._same_until = self._index.next_offset(offset)
            if self._index.is_sampled:  # the sample may still be missing, but the line was not there in the last pass
                written = max(written, self._previous_read_at)
        self._last = max(written, self._last)
        return self._last


def read_log(path: str | Path, *, last: int | None = None) -> LogContent:
    """Read one log, or the complete lines in its last bytes; a missing log is empty."""
    tail = LogTail(path)
    if last is not None:
        tail.seek_to_tail(last)
    return tail.read(final=True)


def read_run(folder: str | Path) -> RunLog:
    """Read all logs of a run, `worker-0.0.log` and so on in a folder, merged by time."""
    return RunTail(folder).read(final=True)


def read_events(folder: str | Path) -> list[Event]:
    """Read the events of a run, sorted by time."""
    return RunTail(folder).events(final=True)


def find_marks(events: Iterable[Event], name: str) -> list[Event]:
    """Return the marks with this name among the events."""
    return [event for event in events if event.kind == "mark" and event.fields.get("name") == name]


def list_log_files(folder: str | Path) -> list[LogFile]:
    """List the logs in a folder, sorted by attempt, role and index; ignore other files."""
    files = []
    try:
        paths = [path for path in Path(folder).iterdir() if path.name.endswith(".log")]
    except OSError:
        return []
    for path in paths:
        if match := _NAME.fullmatch(path.name):
            key = (int(match["attempt"]), match["role"], int(match["index"]))
            files.append((key, LogFile(f"{match['role']}/{int(match['index'])}", int(match["attempt"]), path)))
    return [file for _, file in sorted(files)]


def strip_events(line: str) -> str | None:
    """Return the text of a line without its events; None if nothing else is in it."""
    return _split(line)[1] if PREFIX in line else line


def find_gaps(events: Iterable[Event]) -> list[Gap]:
    """Return the gaps in the sequence numbers of each process, which start at 0.

    A number that repeats with another time belongs to a new process with a reused pid; with the same time, it is the
    same event read twice.
    """
    processes: dict[tuple[str, int, int, int], list[dict[int, float]]] = {}
    for event in events:
        sequences = processes.setdefault((event.slot, event.rank, event.attempt, event.pid), [{}])
        if sequences[-1].get(event.seq, event.t) != event.t:
            sequences.append({})
        sequences[-1][event.seq] = event.t
    gaps = []
    for process, sequences in processes.items():
        for seen in sequences:
            expected = 0
            for seq in sorted(seen):
                if seq > expected:
                    gaps.append(Gap(*process, expected, seq - 1))
                expected = max(expected, seq + 1)
    return gaps


def _split(line: str) -> tuple[list[Event], str | None]:
    """Split a line into its events and its text, which is None if only the prefix of a launcher is left."""
    parts = split_line(line)
    events = [part for part in parts if isinstance(part, Event)]
    text = "".join(part for part in parts if isinstance(part, str))
    return events, (None if events and _TAG.fullmatch(text) else text)


def with_slot(event: Event, file: LogFile) -> Event:
    """Return the event with the slot and attempt of its log, if it has no slot of its own."""
    return event if event.slot else replace(event, slot=file.slot, attempt=file.attempt)
