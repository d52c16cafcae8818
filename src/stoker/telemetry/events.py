"""Events: lines of JSON behind a prefix on standard output, which every launcher already carries.

A line is written by one `os.write` of at most 4,096 bytes, so that lines of many writers do not tear each other apart;
each has a number, so that a reader sees what is missing. Standard library alone: it rides into any image.
"""

from __future__ import annotations

import json
import os
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


@dataclass(frozen=True, slots=True)
class Event:
    """One event: when, who (`slot`, `rank`, `attempt`, and the number of the event there), what kind, and its fields."""

    t: float
    slot: str
    rank: int
    attempt: int
    seq: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """Writes the events of one process, known by its slot, rank and attempt; any thread may call it."""

    def __init__(self, *, slot: str = "", rank: int = 0, attempt: int = 0, fd: int = 1) -> None:
        self.slot, self.rank, self.attempt = slot, rank, attempt
        self._fd, self._seq, self._lock = fd, 0, threading.Lock()

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
        self.emit("heartbeat", step=step, shard=shard, sample=sample, pid=os.getpid())

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event; the longest text in it is cut where the line would be too long."""
        with self._lock:
            head = {"v": VERSION, "t": round(time.time(), 6), "slot": self.slot, "rank": self.rank}
            event = {**head, "attempt": self.attempt, "seq": self._seq, "k": kind, **fields}
            self._seq += 1
            _write(self._fd, _line(event))


def recorder(environ: Mapping[str, str] | None = None) -> Recorder:
    """Make the recorder of this process: its slot and attempt from stoker, its rank from whoever started it."""
    env = os.environ if environ is None else environ
    rank = next((env[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in env), "0")
    return Recorder(slot=env.get("STOKER_SLOT", ""), rank=int(rank), attempt=int(env.get("STOKER_ATTEMPT", "0")))


def parse(line: str) -> Event | None:
    """Read the event in a line, wherever in it the prefix stands; None where there is none, or it was torn."""
    at = line.find(PREFIX)
    if at < 0:
        return None
    try:
        raw = json.loads(line[at + len(PREFIX) :])
        if not isinstance(raw, dict) or raw.pop("v") != VERSION:
            return None
        return Event(
            t=float(raw.pop("t")),
            slot=str(raw.pop("slot")),
            rank=int(raw.pop("rank")),
            attempt=int(raw.pop("attempt")),
            seq=int(raw.pop("seq")),
            kind=str(raw.pop("k")),
            fields=raw,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _line(event: dict[str, Any]) -> bytes:
    while len(line := f"{PREFIX}{json.dumps(event, allow_nan=True)}\n".encode()) > LONGEST:
        name, text = max(((k, v) for k, v in event.items() if isinstance(v, str)), key=lambda item: len(item[1]))
        over = len(line) - LONGEST
        event = {**event, name: text[: max(0, len(text) - max(over // 6, 16) - 1)] + "…"}
    return line


def _write(fd: int, line: bytes) -> None:
    try:
        while line:  # all at once; only a signal or a full pipe of a non-blocking reader cuts it
            line = line[os.write(fd, line) :]
    except (BrokenPipeError, BlockingIOError):
        pass  # nobody reads any more, and that is no reason to end a training
