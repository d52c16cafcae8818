"""Index of a run: its events as columns of numbers on disk, with their analysis, updated by what the logs gained.

`refresh` reads new lines, appends rows, and writes the `commit` file last, atomically: it has the position in each
log, the number of valid rows, and the analysis. What a killed process has appended after the last commit is cut off. An
index that does not match the logs (another inode, other first bytes, a shorter log) is built again. Processes take
turns with a lock; an index that cannot be written beside the logs is kept in the user's cache directory.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import os
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from stoker.telemetry.analysis import RunAnalysis
from stoker.telemetry.column_files import ColumnTable, append_bytes, replace_file
from stoker.telemetry.event_values import is_plausible_time, number, number_or_nan
from stoker.telemetry.events import PREFIX, Event, build_event, split_line
from stoker.telemetry.profile_rows import GPU_FIELDS, PROFILE_FIELDS, ProfileRows
from stoker.telemetry.reader import MAX_LINE_BYTES, LogFile, list_log_files, with_slot

VERSION = 2
FOLDER = "index"
LOCK_TIMEOUT_S = 60.0
"""After this time without the lock, a private index is built: its holder may be stopped."""

_BLOCK = 4 << 20
_MAX_PROFILES = 1 << 13
_COMMIT_BYTES = 128 << 20
"""A first pass over large logs commits after reading this much, so that it can be resumed."""
_HEAD_BYTES = 1024
_CLOCK_RESOLUTION_NS = 2_000_000_000
_MAX_INT = 2**53
_MAX_NAMES = 10_000
_MAX_NAME_CHARS = 256
_COMMIT = "commit"
_PREFIX = PREFIX.encode()
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOLCK)
_STEP = {"t": "f8", "process": "u4", "name": "u4", "step": "f8"}
_TABLES: Mapping[str, Mapping[str, str]] = {
    "profile": {"t": "f8", "slot": "u4", "attempt": "i4", **dict.fromkeys(PROFILE_FIELDS, "f4")},
    "gpu": {"t": "f8", "slot": "u4", "gpu": "i4", **dict.fromkeys(GPU_FIELDS, "f4")},
    "scalar": {**_STEP, "value": "f8"},
    "span": {**_STEP, "length": "f4", "count": "f4", "samples": "f4"},
}


class IndexedLog(msgspec.Struct):
    """How far a log has been read, and what identifies it."""

    inode: int
    offset: int
    head: bytes
    """The first bytes, or a digest of them."""
    head_bytes: int


class ReportingProcess(msgspec.Struct, frozen=True):
    """A process that has reported scalars or spans."""

    slot: str
    rank: int
    attempt: int
    pid: int


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A mark, and where it is in the logs."""

    t: float
    slot: str
    rank: int
    attempt: int
    name: str
    detail: str = ""
    numbers: dict[str, float] = {}
    log: str = ""
    offset: int = 0


class _Rows:
    """Rows that are not in the tables yet."""

    def __init__(self) -> None:
        self.profiles = ProfileRows()
        self.scalars: list[tuple[float, ...]] = []
        self.spans: list[tuple[float, ...]] = []
        self.marks: list[Mark] = []


class _Commit(msgspec.Struct):
    """What the index consists of, written as one file."""

    version: int
    generation: str
    logs: dict[str, IndexedLog]
    rows: dict[str, int]
    mark_bytes: int
    names: list[str]
    processes: list[ReportingProcess]
    analysis: bytes


class RunIndex:
    """The index of one run, on disk; `refresh` brings it up to date, everything else reads it."""

    def __init__(self, logs: Path, folder: Path | None = None) -> None:
        """Open the index of a directory of logs, which is beside it unless that directory is read-only."""
        self.logs, self.folder = logs, folder or _choose_folder(logs)
        self._files: list[LogFile] = []
        self._listed_at: int | None = None
        """The modification time of the directory of logs when it was listed; None if it may have changed since."""
        self._verified: set[str] = set()
        """The logs whose first bytes were compared."""
        self._committed: tuple[int, int, int] | None = None
        """Inode, modification time and size of the commit file that was read or written last."""
        self._clear()

    def _clear(self) -> None:
        self.tables = {name: ColumnTable(self.folder, name, columns) for name, columns in _TABLES.items()}
        self.positions: dict[str, IndexedLog] = {}
        self.names: list[str] = []
        self.processes: list[ReportingProcess] = []
        self._name_numbers: dict[str, int] = {}
        self._process_numbers: dict[ReportingProcess, int] = {}
        self._mark_bytes = 0
        self.analysis = RunAnalysis()
        self.generation = secrets.token_hex(8)
        """Changes when the index is built again: rows that were read before do not count."""

    @property
    def slots(self) -> list[str]:
        """The slots with profiles; `slot` in the tables is a position in this list."""
        return list(self.analysis.machines.slots)

    def marks(self, first: int = 0) -> tuple[list[Mark], int]:
        """Return the marks from a position on, and the position after them."""
        with suppress(FileNotFoundError), open(self.folder / "marks", "rb") as file:
            file.seek(first)
            data = file.read(max(0, self._mark_bytes - first))
            return msgspec.json.Decoder(Mark).decode_lines(data), self._mark_bytes
        return [], 0

    def refresh(self) -> bool:
        """Read what was added to the logs; return whether anything was."""
        try:
            with self._locked():
                return self._refresh()
        except (TimeoutError, PermissionError):
            return self._move_to_temporary()
        except OSError as error:
            if error.errno in _READ_ONLY:
                return self._move_to_temporary()
            raise

    def _move_to_temporary(self) -> bool:
        """Build a private index: the shared one cannot be written, or its lock is held for very long."""
        self.folder, self._committed = Path(tempfile.mkdtemp(prefix="stoker-index-")), None
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._clear()
        with self._locked():
            return self._refresh()

    def _refresh(self) -> bool:
        self._reload_if_changed()
        files = self._list_files()
        grown = self._find_grown(files)
        if grown is None:
            self._reset()
            grown = files
        with _without_gc():
            return self._read_logs(grown)

    def _list_files(self) -> list[LogFile]:
        """Return the logs; the list of a large run is kept while its directory does not change."""
        try:
            changed = os.stat(self.logs).st_mtime_ns
        except OSError:
            return []
        if changed != self._listed_at:
            self._files = list_log_files(self.logs)
            # Two changes within the resolution of the clock have the same time.
            self._listed_at = changed if time.time_ns() - changed > _CLOCK_RESOLUTION_NS else None
        return self._files

    def _find_grown(self, files: list[LogFile]) -> list[LogFile] | None:
        """Return the logs with unread bytes; None if one does not begin with what was read from it."""
        grown = []
        for file in files:
            known = self.positions.get(file.path.name)
            size = self._check_log(file, known) if known else 0
            if size is None:
                return None
            if known is None or size > known.offset:
                grown.append(file)
        return grown

    def _read_logs(self, files: list[LogFile]) -> bool:
        read, pending = False, 0
        rows = _Rows()
        for file in files:
            for size in self._read_log(file, rows):
                read, pending = True, pending + size
                if pending >= _COMMIT_BYTES:
                    self._commit(rows)
                    rows, pending = _Rows(), 0
                elif len(rows.profiles) >= _MAX_PROFILES:
                    self._append_profiles(rows)
        if read:
            self._commit(rows)
        return read

    def _reload_if_changed(self) -> None:
        """Read the commit file, if another process has written it, or none was read yet."""
        try:
            stat = os.stat(self.folder / _COMMIT)
            if _identity(stat) == self._committed:
                return
            data = (self.folder / _COMMIT).read_bytes()
            self._load(msgspec.msgpack.decode(data, type=_Commit))
            self._committed = _identity(stat)
        except (OSError, msgspec.MsgspecError, ValueError):
            self._reset()

    def _load(self, commit: _Commit) -> None:
        if commit.version != VERSION:
            raise ValueError("another version")
        self._clear()
        self.generation = commit.generation
        self.analysis = RunAnalysis.load(commit.analysis)
        self.positions, self.names, self.processes = commit.logs, commit.names, commit.processes
        self._name_numbers = {name: number for number, name in enumerate(self.names)}
        self._process_numbers = {process: number for number, process in enumerate(self.processes)}
        self._mark_bytes = commit.mark_bytes
        complete = [table.truncate(commit.rows[name]) for name, table in self.tables.items()]
        marks = self.folder / "marks"
        if not all(complete) or _size(marks) < commit.mark_bytes:
            raise ValueError("rows are missing")
        if _size(marks) > commit.mark_bytes:
            os.truncate(marks, commit.mark_bytes)

    def _reset(self) -> None:
        """Begin to build the index again."""
        (self.folder / _COMMIT).unlink(missing_ok=True)
        self._committed = None
        self._clear()
        (self.folder / "marks").unlink(missing_ok=True)
        for table in self.tables.values():
            table.truncate(0)

    def _check_log(self, file: LogFile, known: IndexedLog) -> int | None:
        """Return the size of a log; None if it does not begin with what was read from it."""
        try:
            stat = os.stat(file.path)
            if stat.st_ino != known.inode or stat.st_size < known.offset:
                return None
            if stat.st_size == known.offset and file.path.name in self._verified:
                return stat.st_size
            self._verified.add(file.path.name)
            with open(file.path, "rb", buffering=0) as log:
                return stat.st_size if _digest(log.read(known.head_bytes)) == known.head else None
        except OSError:
            return None

    def _read_log(self, file: LogFile, rows: _Rows) -> Iterator[int]:
        """Add the new complete lines of a log to the rows, block by block; yield the size of each block."""
        known = self.positions.get(file.path.name)
        offset = known.offset if known else 0
        try:
            with open(file.path, "rb", buffering=0) as log:
                inode = os.fstat(log.fileno()).st_ino
                log.seek(offset)
                rest = b""
                while block := log.read(_BLOCK):
                    data = rest + block
                    end = data.rfind(b"\n") + 1
                    if not end and len(data) > MAX_LINE_BYTES:  # not a line of ours: events are short
                        end = len(data)
                    rest = data[end:]
                    if end:
                        self._add_lines(file, data[:end], offset, rows)
                        offset += end
                        head = known or IndexedLog(inode, 0, *_read_head(log, offset))
                        self.positions[file.path.name] = IndexedLog(inode, offset, head.head, head.head_bytes)
                        yield end
        except FileNotFoundError:
            return

    def _add_lines(self, file: LogFile, data: bytes, begin: int, rows: _Rows) -> None:
        lines = data.split(b"\n")
        others = rows.profiles.add_lines(lines, file.slot, file.attempt)
        if others:
            offsets = list(accumulate((len(line) + 1 for line in lines), initial=begin))
            for number in others:
                self._add_line(file, lines[number], offsets[number], rows)

    def _add_line(self, file: LogFile, line: bytes, offset: int, rows: _Rows) -> None:
        for event in decode_events(line):
            self._add_event(with_slot(event, file), file.path.name, offset, rows)

    def _add_event(self, event: Event, log: str, offset: int, rows: _Rows) -> None:
        if not _is_storable(event):
            return
        if event.kind == "profile":
            rows.profiles.add_event(event)
            return
        self.analysis.add(event)
        name = event.fields.get("name")
        if event.kind not in ("scalar", "span", "mark") or not isinstance(name, str):
            return
        if event.kind == "mark":
            rows.marks.append(_to_mark(event, name, log, offset))
            return
        process, name_number = self._number_process(event), self._number_name(name)
        step = number(event.fields.get("step"))
        if name_number is None or step is None:
            return
        if event.kind == "scalar":
            value = number_or_nan(event.fields.get("value"))
            if value is not None:
                rows.scalars.append((event.t, process, name_number, step, value))
        else:
            length = number(event.fields.get("length"))
            counts = (number(event.fields.get(key, default)) or 0.0 for key, default in (("count", 1), ("samples", 0)))
            if length is not None and length >= 0:
                rows.spans.append((event.t, process, name_number, step, length, *counts))

    def _number_process(self, event: Event) -> int:
        process = ReportingProcess(event.slot, event.rank, event.attempt, event.pid)
        known = self._process_numbers.setdefault(process, len(self.processes))
        if known == len(self.processes):
            self.processes.append(process)
        return known

    def _number_name(self, name: str) -> int | None:
        known = self._name_numbers.get(name)
        if known is None and len(self.names) < _MAX_NAMES and len(name) <= _MAX_NAME_CHARS:
            known = self._name_numbers[name] = len(self.names)
            self.names.append(name)
        return known

    def _append_profiles(self, rows: _Rows) -> None:
        block = self.analysis.add_profiles(rows.profiles)
        rows.profiles = ProfileRows()
        values = dict(zip(PROFILE_FIELDS, block.values, strict=True))
        self.tables["profile"].append(t=block.t, slot=block.slots, attempt=block.attempts, **values)
        gpus, owners = dict(zip(GPU_FIELDS, block.gpu_values, strict=True)), block.gpu_owners
        self.tables["gpu"].append(t=block.t[owners], slot=block.slots[owners], gpu=block.gpu_numbers, **gpus)

    def _flush(self, rows: _Rows) -> None:
        """Write rows to the tables."""
        if len(rows.profiles):
            self._append_profiles(rows)
        for table, chosen in (("scalar", rows.scalars), ("span", rows.spans)):
            if chosen:
                columns = zip(*chosen, strict=True)
                self.tables[table].append(**dict(zip(_TABLES[table], map(list, columns), strict=True)))
        for written in self.tables.values():
            written.flush()
        if rows.marks:
            lines = b"".join(msgspec.json.encode(mark) + b"\n" for mark in rows.marks)
            append_bytes(self.folder / "marks", lines)
            self._mark_bytes += len(lines)

    def _commit(self, rows: _Rows) -> None:
        self._flush(rows)
        commit = _Commit(
            version=VERSION,
            generation=self.generation,
            logs=self.positions,
            rows={name: table.rows for name, table in self.tables.items()},
            mark_bytes=self._mark_bytes,
            names=self.names,
            processes=self.processes,
            analysis=self.analysis.dump(),
        )
        replace_file(self.folder / _COMMIT, msgspec.msgpack.encode(commit))
        self._committed = _identity(os.stat(self.folder / _COMMIT))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        is_beside = self.folder.parent == self.logs.parent
        self.folder.mkdir(parents=not is_beside, exist_ok=True)  # a run that was deleted must not appear again
        with open(self.folder / "lock", "ab") as file:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError("the index is locked") from None
                    time.sleep(0.02)
            try:
                yield
            except BaseException:
                self._committed = None  # what is in memory may not be what is on disk
                raise


@contextmanager
def _without_gc() -> Iterator[None]:
    """Turn off the garbage collector, which would search the rows for cycles again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_index(logs: Path) -> RunIndex:
    """Return the index of a directory of logs, up to date."""
    index = RunIndex(logs)
    index.refresh()
    return index


def decode_events(line: bytes) -> list[Event]:
    """Return the events in a line: by msgspec if it is one whole event, else wherever the prefix is in the line."""
    if line.startswith(_PREFIX):
        try:
            raw = msgspec.json.decode(line[len(_PREFIX) :])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        else:
            event = build_event(raw)
            if event:
                return [event]
    return [part for part in split_line(line.decode(errors="replace")) if isinstance(part, Event)]


def _choose_folder(logs: Path) -> Path:
    """Return the directory of the index: beside the logs, or in the user's cache if that is read-only."""
    beside = logs.parent / FOLDER
    if os.access(beside if beside.exists() else logs.parent, os.W_OK):
        return beside
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "stoker" / FOLDER / hashlib.sha256(str(logs.resolve()).encode()).hexdigest()[:32]


def _is_storable(event: Event) -> bool:
    numbers = (event.rank, event.attempt, event.seq, event.pid)
    return all(abs(value) < _MAX_INT for value in numbers) and is_plausible_time(event.t)


def _to_mark(event: Event, name: str, log: str, offset: int) -> Mark:
    fields = {key: value for key, value in event.fields.items() if key not in ("name", "detail")}
    numbers = {key: known for key, value in fields.items() if (known := number(value)) is not None}
    return Mark(
        t=event.t,
        slot=event.slot,
        rank=event.rank,
        attempt=event.attempt,
        name=name[:_MAX_NAME_CHARS],
        detail=str(event.fields.get("detail", "")),
        numbers=numbers,
        log=log,
        offset=offset,
    )


def _read_head(log: Any, size: int) -> tuple[bytes, int]:
    """Return the digest of the first bytes of a log, and how many they are."""
    count = min(size, _HEAD_BYTES)
    return _digest(os.pread(log.fileno(), count, 0)), count


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
