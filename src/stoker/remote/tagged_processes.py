"""Processes tagged by environment variables, which their children inherit: list them, signal them, stop them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

POLL_S = 0.02
EXEC_TRIES, EXEC_RETRY_S = 10, 0.002
KILL_TIMEOUT_S = 20.0
"""How long a killed process may take to disappear: it survives SIGKILL while it waits for a disk or a driver."""


class Termination:
    """Termination of all processes with some tags, in steps that do not block: SIGTERM, grace period, SIGKILL."""

    def __init__(self, tags: dict[str, str], grace_s: float, kill_timeout_s: float = KILL_TIMEOUT_S) -> None:
        self._tags = tags
        self._kill_at = time.monotonic() + grace_s
        self._give_up_at = self._kill_at + kill_timeout_s
        self._signalled: set[int] = set()
        self.survivors: list[int] = []
        """The processes that are left; once `poll` has returned True, those that cannot be killed."""

    def expedite(self) -> None:
        """End the grace period."""
        now = time.monotonic()
        if now < self._kill_at:
            self._kill_at, self._give_up_at = now, now + self._give_up_at - self._kill_at

    def poll(self, among: Iterable[int] | None = None) -> bool:
        """Signal the processes that are due, and return whether it is over; `among` is as in `list_tagged`."""
        self.survivors = list_tagged(self._tags, among)
        now = time.monotonic()
        for pid in self.survivors:
            if now >= self._kill_at:
                signal_tagged(pid, self._tags, signal.SIGKILL)
            elif pid not in self._signalled:
                self._signalled.add(pid)
                signal_tagged(pid, self._tags, signal.SIGTERM)
        return not self.survivors or now > self._give_up_at


def terminate_tagged(tags: dict[str, str], grace_s: float, kill_timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """Send SIGTERM, after the grace period SIGKILL, to all processes with these tags; return the survivors."""
    termination = Termination(tags, grace_s, kill_timeout_s)
    while not termination.poll():
        time.sleep(POLL_S)
    return termination.survivors


def list_tagged(tags: dict[str, str], among: Iterable[int] | None = None) -> list[int]:
    """List the processes with these tags: of all on this machine, or of those that are `among` some."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit()) if among is None else among
    return [pid for pid in pids if _has_tags(pid, tags)]


def signal_tagged(pid: int, tags: dict[str, str], number: int) -> None:
    """Send a signal to a process, if it has these tags; never to another that has got its pid since."""
    with contextlib.suppress(OSError):
        pidfd = _open_pidfd(pid)
        try:
            if not _has_tags(pid, tags):
                return
            if pidfd is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            if pidfd is not None:
                os.close(pidfd)


def format_survivors(pids: list[int]) -> str:
    """Return the processes that could not be killed, for a message."""
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


def _open_pidfd(pid: int) -> int | None:
    """Open a file that refers to this process whatever becomes of its pid; None before Python 3.9 and Linux 5.3."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except ProcessLookupError:
        raise
    except OSError:  # the kernel or a sandbox does not have it
        return None


def _has_tags(pid: int, tags: dict[str, str]) -> bool:
    try:
        environ = _read_environ(pid).split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in environ for name, value in tags.items())


def _read_environ(pid: int) -> bytes:
    """Read the environment of a process, which is empty for a moment while the process executes another program."""
    for _ in range(EXEC_TRIES):
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
        if environ:
            return environ
        os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 (fails for a zombie and for a kernel thread; Python 3.8)
        time.sleep(EXEC_RETRY_S)
    return b""
