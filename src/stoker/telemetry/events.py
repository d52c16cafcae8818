"""Events: lines of JSON behind a prefix on standard output, which every launcher already carries.

A line is written by one `os.write` of at most 4,096 bytes, so that lines of many writers do not tear each other apart;
each has a number, so that a reader sees what is missing. Numbers that JSON lacks travel as the texts `NaN`, `Infinity`
and `-Infinity`, and `parse` gives them back. Standard library alone: it rides into any image.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "@stoker "
VERSION = 1
LONGEST = 4096
"""Bytes of a line, its newline included: what a pipe takes whole."""
KINDS = ("scalar", "span", "mark", "profile", "heartbeat")

_LONGEST_SLOT = 128
_SHORTEST_TEXT = 64
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = ("name", "detail", "shard", "model")
"""Fields that hold text, so that `NaN` in them is a text too."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Event:
    """One event: when, who (`slot`, `rank`, `attempt`, `pid`), its number there, what kind, and its fields."""

    t: float
    slot: str
    rank: int
    attempt: int
    seq: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    """Who numbers the events: ranks that torchrun starts again, and the profiler beside them, count for themselves."""


class Recorder:
    """Writes the events of one process, known by its slot, rank and attempt; threads and signal handlers may call it.

    Nothing here raises for what is recorded, or because nobody reads it: telemetry is no reason to end a training.
    """

    def __init__(self, *, slot: str = "", rank: int = 0, attempt: int = 0, fd: int = 1) -> None:
        self.slot, self.rank, self.attempt = slot[:_LONGEST_SLOT], rank, attempt
        self._fd = fd
        self._begin()

    def scalar(self, name: str, value: float, step: int) -> None:
        """Tell a number of a step, such as the loss."""
        self.emit("scalar", name=name, step=step, value=value)

    def span(self, name: str, start: float, length: float, step: int, **more: Any) -> None:
        """Tell how long something took, in seconds; summed over several steps where `count` says so."""
        self.emit("span", name=name, start=start, length=length, step=step, **more)

    def mark(self, name: str, detail: str = "", **more: Any) -> None:
        """Tell that something happened."""
        self.emit("mark", name=name, detail=detail, **more)

    def heartbeat(self, step: int, *, shard: str = "", sample: int = -1) -> None:
        """Tell that the program is alive, and which sample it is at; who stops telling is taken for hung."""
        self.emit("heartbeat", step=step, shard=shard, sample=sample)

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Write one event; what would make its line too long is cut, and the event says so (`cut`)."""
        if os.getpid() != self._pid:
            self._begin()  # a fork: its events are its own, and the lock may have been held when it was made
        with self._lock:
            head = {"v": VERSION, "t": round(time.time(), 6), "slot": self.slot, "rank": self.rank}
            head |= {"attempt": self.attempt, "pid": self._pid, "seq": next(self._seq), "k": kind}
            _write(self._fd, _line(head, fields))

    def _begin(self) -> None:
        self._pid, self._seq = os.getpid(), itertools.count()
        self._lock = threading.RLock()  # a signal handler may come while its own thread writes


def recorder(environ: Mapping[str, str] | None = None) -> Recorder:
    """Make the recorder of this process: its slot and attempt from stoker, its rank from whoever started it.

    A process that has one can be asked for the stacks of its threads, on standard error: `kill -USR1`.
    """
    if environ is None and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    env = os.environ if environ is None else environ
    rank = _first_number(env, "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    # A person who runs it by hand looks on, and wants no JSON.
    by_hand = environ is None and "STOKER_RUN" not in env and os.isatty(1)
    attempt = _first_number(env, "STOKER_ATTEMPT")
    return Recorder(slot=env.get("STOKER_SLOT", ""), rank=rank, attempt=attempt, fd=-1 if by_hand else 1)


def parse(line: str) -> Event | None:
    """Read the first event in a line, wherever in it the prefix stands; None where there is none, or it was torn."""
    return next((part for part in take_apart(line) if isinstance(part, Event)), None)


def take_apart(line: str) -> list[Event | str]:
    """Split a line into its events and the text around them, in order; what is left of a torn event is text."""
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
        if not isinstance(raw, dict) or raw.pop("v") != VERSION:
            return None, at
        kind = str(raw.pop("k"))
        event = Event(
            t=float(raw.pop("t")),
            slot=_sound(str(raw.pop("slot"))),
            rank=int(raw.pop("rank")),
            attempt=int(raw.pop("attempt")),
            seq=int(raw.pop("seq")),
            pid=int(raw.get("pid", 0) if kind == "heartbeat" else raw.pop("pid", 0)),
            kind=_sound(kind),
            fields={_sound(name): _restored(name, value) for name, value in raw.items()},
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, at
    return (event, end) if math.isfinite(event.t) else (None, at)


def _restored(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return _NUMBERS[value] if value in _NUMBERS and name not in _WORDS else _sound(value)


def _sound(text: str) -> str:
    """Replace halves of characters, which file names may hold and nothing can print."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _first_number(env: Mapping[str, str], *names: str) -> int:
    """Read the first of these variables that is a whole number; a wrong one is no reason to end a program."""
    for name in names:
        try:
            return int(env[name])
        except (KeyError, ValueError):
            continue
    return 0


def _line(head: dict[str, Any], fields: dict[str, Any]) -> bytes:
    event = {**head, **fields, **head}
    line = _encode(event)
    while (over := len(line) - LONGEST) > 0:
        event["cut"] = True
        sizes = {name: len(_encode(event[name])) for name in event if name not in head and name != "cut"}
        if not sizes:
            break
        name = max(sizes, key=lambda name: sizes[name] + len(name))
        value = event.pop(name)
        if isinstance(value, str) and len(value) > _SHORTEST_TEXT:
            kept = (sizes[name] - over - 24) / sizes[name]
            event[name] = value[: max(0, int(len(value) * kept))] + "…"
        line = _encode(event)
    return line


def _encode(value: Any) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_plain(value))
    return f"{PREFIX}{text}\n".encode()


def _plain(value: Any, depth: int = 0) -> Any:
    """Turn any value into what JSON has: a number of numpy or torch into a number, the rest into text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _word(value)
    if isinstance(value, Mapping) and depth < 8:
        return {str(name): _plain(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple) and depth < 8:
        return [_plain(inner, depth + 1) for inner in value]
    try:
        return _plain(value.item(), 8)
    except Exception:  # whatever it is, its text will do
        return _described(value)


def _described(value: Any) -> str:
    try:
        return str(value)[:LONGEST]
    except Exception:
        return type(value).__name__


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _write(fd: int, line: bytes) -> None:
    try:
        while line:  # all at once; only a signal or a full pipe of a non-blocking reader cuts it
            line = line[os.write(fd, line) :]
    except OSError:
        pass  # nobody reads any more, or the disk is full, and that is no reason to end a training
