"""Events: lines of JSON with a prefix on standard output, which every launcher already transports.

A line is written by one `os.write` of at most 4,096 bytes, so that lines of several writers do not interleave. Events
have sequence numbers, so that a reader can detect gaps. Numbers that JSON lacks are written as the strings `NaN`,
`Infinity` and `-Infinity`, and `parse` restores them. Standard library only: it runs in any image.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.telemetry.stack_signal import install_stack_signal

PREFIX = "@stoker "
VERSION = 1
MAX_LINE_BYTES = 4096
"""Size of a line, with its newline, that a pipe writes atomically."""
PEER_LOST = "lost connection to another rank"
"""How a rank reports that a peer is gone: not the cause of a failure, which is the peer's own error."""
KINDS = ("scalar", "span", "mark", "profile", "heartbeat")

_MAX_SLOT_CHARS = 128
_MIN_TEXT_CHARS = 64
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_TEXT_FIELDS = ("name", "detail", "shard", "model")
"""Fields that hold text: `NaN` in them is not a number."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its time, process (`slot`, `rank`, `attempt`, `pid`), sequence number, kind and fields."""

    t: float
    slot: str
    rank: int
    attempt: int
    seq: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    """The process that numbers the events: ranks restarted by torchrun, and the profiler, have their own sequences."""


class Recorder:
    """Writer of the events of one process; safe to call from threads and signal handlers.

    It never raises, neither for the values recorded nor for a closed pipe: telemetry must not stop a training.
    """

    def __init__(self, *, slot: str = "", rank: int = 0, attempt: int = 0, fd: int = 1) -> None:
        self.slot, self.rank, self.attempt = slot[:_MAX_SLOT_CHARS], rank, attempt
        self._fd = fd
        self.on_scalar: Callable[[str, float, int], None] | None = None
        """Called with every scalar, to write it elsewhere too."""
        self._reset()

    def scalar(self, name: str, value: float, step: int) -> None:
        """Record a number at a step, such as the loss."""
        self.emit("scalar", name=name, step=step, value=value)
        if self.on_scalar is not None:
            self.on_scalar(name, value, step)

    def span(self, name: str, start: float, length: float, step: int, **more: Any) -> None:
        """Record how long something took, in seconds; the sum over `count` steps if that is given."""
        self.emit("span", name=name, start=start, length=length, step=step, **more)

    def mark(self, name: str, detail: str = "", **more: Any) -> None:
        """Record that something happened."""
        self.emit("mark", name=name, detail=detail, **more)

    def heartbeat(self, step: int, *, shard: str = "", sample: int = -1) -> None:
        """Record that the program is alive, and its position; without heartbeats it is considered hung."""
        self.emit("heartbeat", step=step, shard=shard, sample=sample)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Write one event; fields that make its line too long are truncated, and `cut` is set."""
        if os.getpid() != self._pid:
            self._reset()  # after a fork: a sequence of its own, and a lock that nobody holds
        with self._lock:
            head = {"v": VERSION, "t": round(time.time(), 6), "slot": self.slot, "rank": self.rank}
            head |= {"attempt": self.attempt, "pid": self._pid, "seq": next(self._seq), "k": kind}
            _write(self._fd, _build_line(head, fields))

    def _reset(self) -> None:
        self._pid, self._seq = os.getpid(), itertools.count()
        self._lock = threading.RLock()  # a signal handler may run while its own thread writes


def recorder(environ: Mapping[str, str] | None = None) -> Recorder:
    """Return the recorder of this process, with its slot, attempt and rank from the environment.

    It also makes `kill -USR1` print the stacks of all threads to standard error.
    """
    if environ is None:
        install_stack_signal()
    env = os.environ if environ is None else environ
    rank = _first_number(env, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    # Run by hand on a terminal: no JSON.
    is_interactive = environ is None and "STOKER_RUN" not in env and os.isatty(1)
    attempt = _first_number(env, "STOKER_ATTEMPT")
    return Recorder(slot=env.get("STOKER_SLOT", ""), rank=rank, attempt=attempt, fd=-1 if is_interactive else 1)


def parse(line: str) -> Event | None:
    """Return the first event in a line, wherever its prefix is; None if there is no complete event."""
    return next((part for part in split_line(line) if isinstance(part, Event)), None)


def split_line(line: str) -> list[Event | str]:
    """Split a line into its events and the text around them, in order; an incomplete event is text."""
    parts: list[Event | str] = []
    begin = seek = 0
    while (at := line.find(PREFIX, seek)) >= 0:
        event, end = _decode(line, at + len(PREFIX))
        if event is None:
            seek = at + len(PREFIX)
            continue
        if at > begin:
            parts.append(line[begin:at])
        parts.append(event)
        begin = seek = end
    if begin < len(line):
        parts.append(line[begin:])
    return parts


def _decode(line: str, at: int) -> tuple[Event | None, int]:
    try:
        raw, end = _DECODER.raw_decode(line, at)
    except (ValueError, RecursionError):
        return None, at
    event = build_event(raw)
    return (event, end) if event else (None, at)


def build_event(raw: Any) -> Event | None:
    """Return the event that a decoded JSON value is; None if it is none. The value is modified."""
    try:
        if not isinstance(raw, dict) or raw.pop("v") != VERSION:
            return None
        kind = str(raw.pop("k"))
        event = Event(
            t=float(raw.pop("t")),
            slot=_replace_surrogates(str(raw.pop("slot"))),
            rank=int(raw.pop("rank")),
            attempt=int(raw.pop("attempt")),
            seq=int(raw.pop("seq")),
            pid=int(raw.get("pid", 0) if kind == "heartbeat" else raw.pop("pid", 0)),
            kind=_replace_surrogates(kind),
            fields={_replace_surrogates(name): _decode_value(name, value) for name, value in raw.items()},
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return event if math.isfinite(event.t) else None


def _decode_value(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return _NONFINITE[value] if value in _NONFINITE and name not in _TEXT_FIELDS else _replace_surrogates(value)


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which file names may contain and which cannot be printed."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _first_number(env: Mapping[str, str], *names: str) -> int:
    """Return the first of these variables that is an integer, or 0; an invalid one must not stop a program."""
    for name in names:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            continue
    return 0


def _build_line(head: dict[str, Any], fields: dict[str, Any]) -> bytes:
    event = {**head, **fields, **head}
    line = _encode(event)
    while (over := len(line) - MAX_LINE_BYTES) > 0:
        event["cut"] = True
        sizes = {name: len(_encode(event[name])) for name in event if name not in head and name != "cut"}
        if not sizes:
            break
        name = max(sizes, key=lambda name: sizes[name] + len(name))
        value = event.pop(name)
        if isinstance(value, str) and len(value) > _MIN_TEXT_CHARS:
            kept_share = (sizes[name] - over - 24) / sizes[name]
            event[name] = value[: max(0, int(len(value) * kept_share))] + "…"
        line = _encode(event)
    return line


def _encode(value: Any) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_to_json_value(value))
    return f"{PREFIX}{text}\n".encode()


def _to_json_value(value: Any, depth: int = 0) -> Any:
    """Convert any value to a JSON value: numpy and torch scalars to numbers, other objects to text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _nonfinite_name(value)
    if isinstance(value, Mapping) and depth < 8:
        return {str(name): _to_json_value(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple) and depth < 8:
        return [_to_json_value(inner, depth + 1) for inner in value]
    try:
        return _to_json_value(value.item(), 8)
    except Exception:  # not a scalar: use its text
        return _to_text(value)


def _to_text(value: Any) -> str:
    try:
        return str(value)[:MAX_LINE_BYTES]
    except Exception:
        return type(value).__name__


def _nonfinite_name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _write(fd: int, line: bytes) -> None:
    try:
        while line:  # in one write, unless a signal or a full non-blocking pipe interrupts it
            line = line[os.write(fd, line) :]
    except OSError:
        pass  # a closed pipe or a full disk must not stop a training
