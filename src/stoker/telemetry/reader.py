"""Logs of a run, taken apart into text and events; nothing here starts, sends or changes anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from stoker.telemetry.events import PREFIX, Event, take_apart

LONGEST_LINE = 1 << 20
"""Bytes after which a line that does not end is given as it is."""

_BLOCK = 1 << 20
_NAME = re.compile(r"(?P<role>.+)-(?P<index>\d{1,9})\.(?P<attempt>\d{1,9})\.log")
_COLOUR = r"\x1b\[[0-9;]*m"
# What mpirun, torchrun and Ray put before a line: [1,0]<stdout>: or [default0]: or (worker pid=12, ip=10.0.0.1).
_TAG = re.compile(
    rf"(?:\s|{_COLOUR}|\[[A-Za-z]*\d[\w.,/:-]*\](?:<std\w+>)?:?|\([^()]*\bpid=\d+[^()]*\))*", re.ASCII | re.DOTALL
)


class Log(NamedTuple):
    """What stands in a log: the lines of text without the events, and the events, each in the order of the file."""

    lines: list[str]
    events: list[Event]


class LogFile(NamedTuple):
    """The log of one attempt of one slot, known by its name: `worker-0.1.log`."""

    slot: str
    attempt: int
    path: Path


class Line(NamedTuple):
    """A line of text in a run: which log it is from, and the time of the event before it there (0: none yet)."""

    t: float
    log: LogFile
    text: str


class RunLog(NamedTuple):
    """What stands in the logs of a run, merged by time."""

    lines: list[Line]
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that were written and never arrived: numbers `first` to `last` of one process."""

    slot: str
    rank: int
    attempt: int
    pid: int
    first: int
    last: int

    @property
    def missing(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


class Follower:
    """Reads what was added to one log since it was last asked; the log may come later, be cut or be replaced."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = self._inode = 0
        self._rest = b""

    def read(self, *, final: bool = False) -> Log:
        """Give the whole lines that are new; `final`, when nobody writes any more, also a last one without an end."""
        log = Log([], [])
        for part in self.parts(final=final):
            if isinstance(part, Event):
                log.events.append(part)
            else:
                log.lines.append(part)
        return log

    def parts(self, *, final: bool = False) -> Iterator[Event | str]:
        """Give the same one by one, text and events in the order of the log."""
        for raw in self._new_lines(final):
            line = raw.decode(errors="replace").rstrip("\r\n")
            if PREFIX not in line:
                yield line
                continue
            events, text = _split(line)
            if text is not None:
                yield text
            yield from events

    def skip_to_last(self, size: int) -> None:
        """Go on with the first line that begins in the last bytes."""
        with suppress(OSError), self.path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            self._offset = max(0, file.seek(0, os.SEEK_END) - size)
            if self._offset:
                file.seek(self._offset - 1)
                self._offset += len(file.readline()) - 1

    def _new_lines(self, final: bool) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except OSError:  # not there yet, or no longer
            self._offset, self._inode, self._rest = 0, 0, b""
            return
        with file:
            self._find_place(file.fileno())
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                self._offset += len(block)
                *whole, self._rest = (self._rest + block).split(b"\n")
                yield from whole
                if len(self._rest) > LONGEST_LINE:
                    rest, self._rest = self._rest, b""
                    yield rest
        if final and self._rest:
            rest, self._rest = self._rest, b""
            yield rest

    def _find_place(self, fd: int) -> None:
        """Begin anew in a file that is another one now, or shorter than what was read of it."""
        found = os.fstat(fd)
        if (self._inode and found.st_ino != self._inode) or found.st_size < self._offset:
            self._offset, self._rest = 0, b""
        self._inode = found.st_ino


class RunFollower:
    """Reads what was added to the logs of a run since it was last asked, those of new slots and attempts included."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._followers: dict[LogFile, Follower] = {}
        self._times: dict[LogFile, float] = {}

    def read(self, *, final: bool = False) -> RunLog:
        """Give what is new, merged: events by their time, text by that of the event before it in its log."""
        log = RunLog([], [])
        for file in log_files(self.folder):
            follower = self._followers.setdefault(file, Follower(file.path))
            for part in follower.parts(final=final):
                if isinstance(part, Event):
                    self._times[file] = part.t
                    log.events.append(_owned(part, file))
                else:
                    log.lines.append(Line(self._times.get(file, 0.0), file, part))
        log.events.sort(key=lambda event: event.t)
        log.lines.sort(key=lambda line: line.t)
        return log


def read_log(path: str | Path, *, last: int | None = None) -> Log:
    """Read one log from beginning to end, or the whole lines in its last bytes; one that is not there is empty."""
    follower = Follower(path)
    if last is not None:
        follower.skip_to_last(last)
    return follower.read(final=True)


def read_run(folder: str | Path) -> RunLog:
    """Read the logs of a run, `worker-0.0.log` and the like in a folder, merged by time."""
    return RunFollower(folder).read(final=True)


def log_files(folder: str | Path) -> list[LogFile]:
    """List the logs in a folder: by attempt, then by role and index; other files are left alone."""
    found = []
    try:
        names = [path for path in Path(folder).iterdir() if path.name.endswith(".log")]
    except OSError:
        return []
    for path in names:
        if match := _NAME.fullmatch(path.name):
            key = (int(match["attempt"]), match["role"], int(match["index"]))
            found.append((key, LogFile(f"{match['role']}/{int(match['index'])}", int(match["attempt"]), path)))
    return [file for _, file in sorted(found)]


def text_of(line: str) -> str | None:
    """Give what a person should see of a line: without its events, None when nothing else is in it."""
    return _split(line)[1] if PREFIX in line else line


def gaps(events: Iterable[Event]) -> list[Gap]:
    """Find the numbers that are missing, process by process: a process numbers its events 0, 1, 2 and so on.

    A number that comes again with another time is a new process under an old id; with the same time, the same event
    read twice.
    """
    runs: dict[tuple[str, int, int, int], list[dict[int, float]]] = {}
    for event in events:
        lives = runs.setdefault((event.slot, event.rank, event.attempt, event.pid), [{}])
        if lives[-1].get(event.seq, event.t) != event.t:
            lives.append({})
        lives[-1][event.seq] = event.t
    found = []
    for who, lives in runs.items():
        for seen in lives:
            expected = 0
            for seq in sorted(seen):
                if seq > expected:
                    found.append(Gap(*who, expected, seq - 1))
                expected = max(expected, seq + 1)
    return found


def _split(line: str) -> tuple[list[Event], str | None]:
    """Split a line into its events and its text, which is None when only the tag of a launcher is left."""
    parts = take_apart(line)
    events = [part for part in parts if isinstance(part, Event)]
    text = "".join(part for part in parts if isinstance(part, str))
    return events, (None if events and _TAG.fullmatch(text) else text)


def _owned(event: Event, file: LogFile) -> Event:
    """Give an event of a program that was not told its slot the one of its log."""
    return event if event.slot else replace(event, slot=file.slot, attempt=file.attempt)
