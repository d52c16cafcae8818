"""Guard: a forked process that terminates tagged processes on this machine if the process that forked it dies.

Standard library only, Python 3.8 or later: slot daemons use it on their hosts, the supervisor of a local run here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

from stoker.remote.tagged_processes import POLL_S, list_tagged, terminate_tagged

GUARD_NAME = "stoker-guard"
_DONE = b"done\n"
_PR_SET_NAME = 15


class Guard:
    """The guard process, as the process sees it that forked it."""

    def __init__(self, tags: dict[str, str], grace_s: float, *, closed_fds: Iterable[int] = ()) -> None:
        """Fork the guard, which keeps all files open except these, for example locks until no process is left."""
        closed_fds = set(closed_fds)
        read_fd, self._write_fd = os.pipe()
        self._is_reaped = False
        self._pid = os.fork()
        if self._pid:
            os.close(read_fd)
            return
        try:
            for fd in closed_fds - {read_fd} | {self._write_fd}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            _run_guard(read_fd, tags, grace_s)
        finally:
            os._exit(0)

    def add_leader(self, pid: int) -> None:
        """Name a process that gets SIGTERM when its parent dies, and stops its own children then."""
        self._write(b"%d\n" % pid)

    def has_exited(self) -> bool:
        """Whether it was killed."""
        return self._reap(os.WNOHANG)

    def dismiss(self) -> None:
        """Let it exit, if it was not killed: no process is left that it must terminate."""
        self._write(_DONE)
        os.close(self._write_fd)
        self._reap()

    def _reap(self, flags: int = 0) -> bool:
        if not self._is_reaped:
            try:
                self._is_reaped = os.waitpid(self._pid, flags)[0] != 0
            except ChildProcessError:
                self._is_reaped = True
        return self._is_reaped

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self._write_fd, line)


def _run_guard(read_fd: int, tags: dict[str, str], grace_s: float) -> None:
    """Wait until the other process dies or lets us exit."""
    set_process_name(GUARD_NAME)
    os.setsid()  # a signal to the process group of the other process must not reach both
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    received = b""
    while not received.endswith(_DONE):
        data = os.read(read_fd, 4096)
        if not data:
            _terminate(tags, grace_s, [int(line) for line in received.split()])
            return
        received += data


def _terminate(tags: dict[str, str], grace_s: float, leaders: list[int]) -> None:
    """Terminate a run; leaders must not get SIGTERM twice and have the grace period, others what is left of it."""
    kill_at = time.monotonic() + grace_s
    time.sleep(POLL_S)  # a process that was just being started has its environment in a moment
    while time.monotonic() < kill_at and list_tagged(tags, leaders):
        time.sleep(POLL_S)
    terminate_tagged(tags, max(0.0, kill_at - time.monotonic()))


def set_process_name(name: str) -> None:
    """Set the name of this process in `ps` and `top`, of at most 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
