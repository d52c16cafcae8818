"""Pages of a run's logs for the dashboard: lines from a byte on, backwards from the end, or those that match."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from stoker.dashboard.runs import DashboardRun
from stoker.errors import NotFoundError
from stoker.telemetry.log_times import LogTimes
from stoker.telemetry.progress_bars import last_state, may_be_redrawn
from stoker.telemetry.reader import LogFile, list_log_files, strip_events

MAX_LINE_CHARS = 2000
MAX_SCAN_BYTES = 64 << 20
"""A search reads at most this much for one page."""

_BLOCK = 1 << 20


class LogEntry(msgspec.Struct, frozen=True):
    """One log: the file name identifies it."""

    name: str
    slot: str
    attempt: int
    bytes: int


class LogText(msgspec.Struct, frozen=True):
    """A line of text: its log, offset, time (0 if unknown) and text."""

    log: str
    offset: int
    t: float
    text: str


class LogPage(msgspec.Struct, frozen=True):
    """Some lines of logs, and where to go on in each."""

    lines: list[LogText]
    next: dict[str, int]
    """The offset after the last line that was read of each log."""
    is_complete: bool
    """Whether the end of every log was reached."""


def list_logs(run: DashboardRun) -> list[LogEntry]:
    """List the logs of a run."""
    entries = []
    for file in _list_files(run):
        try:
            entries.append(LogEntry(file.path.name, file.slot, file.attempt, file.path.stat().st_size))
        except OSError:
            continue
    return entries


def _list_files(run: DashboardRun) -> list[LogFile]:
    """List the logs; a link may lead out of the run folder."""
    return [file for file in list_log_files(run.folder.logs) if not file.path.is_symlink()]


def read_page(
    run: DashboardRun, names: list[str], offsets: dict[str, int], *, limit: int, search: str, tail: bool
) -> LogPage:
    """Return lines of the named logs, or of the newest attempt, merged by time; offsets say where to begin."""
    known = {file.path.name: file for file in _list_files(run)}
    if unknown := [name for name in names if name not in known]:
        raise NotFoundError(f"the run has no log {unknown[0]!r}")
    newest = max((file.attempt for file in known.values()), default=0)
    chosen = [known[name] for name in names] or [file for file in known.values() if file.attempt == newest]
    share = max(1, limit // max(1, len(chosen)))
    lines: list[LogText] = []
    position: dict[str, int] = {}
    is_complete = True
    for file in chosen:
        begin = offsets.get(file.path.name)
        if begin is None:
            begin = _find_tail(file, share) if tail and not search else 0
        found, position[file.path.name], is_end = _read_log(file, begin, share, search.lower())
        lines += found
        is_complete = is_complete and is_end
    lines.sort(key=lambda line: (line.t, line.log, line.offset))
    return LogPage(lines, position, is_complete)


def _read_log(file: LogFile, begin: int, limit: int, search: str) -> tuple[list[LogText], int, bool]:
    times = LogTimes(file.path)
    times.refresh()
    lines: list[LogText] = []
    end = begin
    for offset, raw in _iter_lines(file, begin):
        if len(lines) >= limit:
            return lines, offset, False
        if offset - begin > MAX_SCAN_BYTES:
            return lines, offset, False
        end = offset + len(raw) + 1
        line = raw.decode(errors="replace")
        text = strip_events(line)
        if text is None or (search and search not in text.lower()):
            continue
        if may_be_redrawn(raw):
            text = last_state(text)
        lines.append(LogText(file.path.name, offset, times.find(offset) or 0.0, text[:MAX_LINE_CHARS]))
    return lines, end, True


def _iter_lines(file: LogFile, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each complete line from an offset on; a very long line in parts."""
    try:
        with open(file.path, "rb") as log:
            log.seek(begin)
            offset = begin
            while raw := log.readline(_BLOCK):
                if not raw.endswith(b"\n") and len(raw) < _BLOCK:
                    return
                yield offset, raw.rstrip(b"\n")
                offset += len(raw)
    except OSError:
        return


def _find_tail(file: LogFile, lines: int) -> int:
    """Return an offset that is about so many lines before the end, at the beginning of a line."""
    try:
        size = file.path.stat().st_size
        begin = max(0, size - 400 * lines - 4096)
        with open(file.path, "rb") as log:
            if begin:
                os.lseek(log.fileno(), begin - 1, os.SEEK_SET)
                begin += len(log.readline(_BLOCK)) - 1
        return begin
    except OSError:
        return 0
