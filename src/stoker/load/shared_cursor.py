"""The cursor of a dataset, shared between a process and its DataLoader workers."""

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
MAX_CLAIMS = 8
"""Iterations whose start is remembered: as many may be starting their workers at the same time."""


class IterationClaim(msgspec.Struct):
    """The start of one iteration, and the workers that have claimed it."""

    start: Cursor
    workers: list[int] = msgspec.field(default_factory=list)


class ConsumerState(msgspec.Struct):
    """Start of the next iteration of one consumer process; `is_exact` unless workers may have read further."""

    next_start: Cursor
    is_exact: bool = True
    claims: dict[str, IterationClaim] = msgspec.field(default_factory=dict)


class SharedCursor:
    """State of each process that iterates over a dataset, in memory shared with its worker processes.

    A worker has a copy of the dataset. DataLoader does not notify the original that an iteration starts, nor the copy
    which iteration it is. The lock is a file lock: the kernel releases it when its holder is killed.
    """

    def __init__(self, initial: ConsumerState | None, fd: int | None = None) -> None:
        self._fd = os.memfd_create("stoker-cursor") if fd is None else fd
        self._locks: dict[int, threading.Lock] = {}
        """By process id: a lock inherited by fork may be held forever."""
        weakref.finalize(self, os.close, self._fd)
        if initial is not None:
            self._write({os.getpid(): initial})

    @contextmanager
    def update(self, consumer: int | None = None) -> Iterator[ConsumerState]:
        """Lock and yield the state of a process, by default this one; store the changes."""
        with self._locked():
            states = self._read()
            creator = next(iter(states.values()))  # a process with a copy starts from where the creator is
            state = states.setdefault(consumer or os.getpid(), ConsumerState(creator.next_start, creator.is_exact))
            yield state
            self._write(states)

    def get(self) -> ConsumerState:
        """Return the current state of this process."""
        with self._locked():
            states = self._read()
        return states.get(os.getpid()) or next(iter(states.values()))

    def claim(self, iteration: str, worker: int) -> Cursor:
        """Return where the iteration of a worker starts; the first worker to call starts the iteration.

        The base seed that DataLoader draws identifies an iteration. If the user resets the seed so that it is
        drawn again, a worker that calls a second time starts a new iteration.
        """
        parent = multiprocessing.parent_process()
        with self.update(None if parent is None else parent.pid) as state:
            claim = state.claims.get(iteration)
            if claim is None or worker in claim.workers:
                claim = IterationClaim(state.next_start)
                state.claims.pop(iteration, None)
                state.claims = dict([*state.claims.items(), (iteration, claim)][-MAX_CLAIMS:])
                state.next_start, state.is_exact = Cursor(claim.start.epoch + 1, 0, claim.start.plan), False
            claim.workers.append(worker)
            return claim.start

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return _attach, (DupFd(self._fd),)
        state = self.get()  # a copy that is not for a worker is independent
        return SharedCursor, (ConsumerState(state.next_start, state.is_exact),)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads with a lock of this process, and other processes with a file lock."""
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _read(self) -> dict[int, ConsumerState]:
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        (length,) = _LENGTH.unpack_from(data)
        return msgspec.msgpack.decode(data[_LENGTH.size : _LENGTH.size + length], type=dict[int, ConsumerState])

    def _write(self, states: dict[int, ConsumerState]) -> None:
        data = msgspec.msgpack.encode(states)
        os.pwrite(self._fd, _LENGTH.pack(len(data)) + data, 0)  # one call, which a kill cannot interrupt


def _attach(fd: Any) -> SharedCursor:
    return SharedCursor(None, fd.detach())
