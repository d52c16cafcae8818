"""Whose turn it is: where the next iteration of a dataset starts, known to a process and to its workers."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import msgspec

from stoker.sampling.cursor import Cursor

_LENGTH = struct.Struct("<Q")
CLAIMS = 8
"""Iterations whose beginning is remembered: as many can start their workers at the same time."""


class Claim(msgspec.Struct):
    """Where one iteration starts, and which of its workers know."""

    start: Cursor
    workers: list[int] = msgspec.field(default_factory=list)


class Turn(msgspec.Struct):
    """Where the next iteration of one consumer starts, and whether that is where the last one was left."""

    next: Cursor
    known: bool = True
    claims: dict[str, Claim] = msgspec.field(default_factory=dict)


class Turns:
    """The turn of each process that takes batches of a dataset, in memory that it shares with its workers.

    A worker has a copy of the dataset, and DataLoader tells neither the original that an iteration begins nor the copy
    which one it is. The lock is one of the system's: it is free again when its holder is killed.
    """

    def __init__(self, first: Turn | None, memory: int | None = None) -> None:
        self._memory = os.memfd_create("stoker-turns") if memory is None else memory
        self._threads: dict[int, threading.Lock] = {}
        """By process: what a forked one inherited may be held for ever."""
        weakref.finalize(self, os.close, self._memory)
        if first is not None:
            self._write({os.getpid(): first})

    @contextmanager
    def turn(self, consumer: int | None = None) -> Iterator[Turn]:
        """Give the turn of a process, this one by default, while no other can change it; keep what is changed."""
        with self._alone():
            turns = self._read()
            made_with = next(iter(turns.values()))  # a process that got a copy goes on from where the maker stands
            turn = turns.setdefault(consumer or os.getpid(), Turn(made_with.next, made_with.known))
            yield turn
            self._write(turns)

    def look(self) -> Turn:
        """Give the turn of this process as it is now."""
        with self._alone():
            turns = self._read()
        return turns.get(os.getpid()) or next(iter(turns.values()))

    def claim(self, iteration: str, worker: int) -> Cursor:
        """Tell a worker where its iteration starts; the first of them to ask begins it.

        Iterations are told apart by the seed that DataLoader drew. Where the user made it draw the same one again, the
        worker that asks a second time does so for a new iteration.
        """
        parent = multiprocessing.parent_process()
        with self.turn(None if parent is None else parent.pid) as turn:
            claim = turn.claims.get(iteration)
            if claim is None or worker in claim.workers:
                claim = Claim(turn.next)
                turn.claims.pop(iteration, None)
                turn.claims = dict([*turn.claims.items(), (iteration, claim)][-CLAIMS:])
                turn.next, turn.known = Cursor(claim.start.epoch + 1, 0, claim.start.plan), False
            claim.workers.append(worker)
            return claim.start

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _attached, (DupFd(self._memory),)
        turn = self.look()  # a copy that is not for a worker stands alone
        return Turns, (Turn(turn.next, turn.known),)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep out other threads, by a lock of this process's own, and other processes, by one of the system's."""
        with self._threads.setdefault(os.getpid(), threading.Lock()):
            fcntl.lockf(self._memory, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._memory, fcntl.LOCK_UN)

    def _read(self) -> dict[int, Turn]:
        data = os.pread(self._memory, os.fstat(self._memory).st_size, 0)
        (length,) = _LENGTH.unpack_from(data)
        return msgspec.msgpack.decode(data[_LENGTH.size : _LENGTH.size + length], type=dict[int, Turn])

    def _write(self, turns: dict[int, Turn]) -> None:
        data = msgspec.msgpack.encode(turns)
        os.pwrite(self._memory, _LENGTH.pack(len(data)) + data, 0)  # in one call: a kill falls before or after it


def _attached(memory: Any) -> Turns:
    return Turns(None, memory.detach())
