"""Processes tagged by environment variables, which their children inherit: list them, signal them, stop them."""

from __future__ import annotations

import contextlib
import os
import signal
import time

POLL_S = 0.02


def terminate_tagged(tags: dict[str, str], grace_s: float, kill_timeout_s: float = 20.0) -> list[int]:
    """Send SIGTERM, after the grace period SIGKILL, to all processes with these tags; return the survivors.

    A process survives SIGKILL while it waits for a disk or a driver; it is given up after `kill_timeout_s`.
    """
    for pid in list_tagged(tags):
        signal_tagged(pid, tags, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while pids := list_tagged(tags):
        overdue_s = time.monotonic() - deadline
        if overdue_s > kill_timeout_s:
            break
        if overdue_s >= 0:
            for pid in pids:
                signal_tagged(pid, tags, signal.SIGKILL)
        time.sleep(POLL_S)
    return pids


def list_tagged(tags: dict[str, str]) -> list[int]:
    """List the processes with these tags."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _has_tags(int(name), tags)]


def signal_tagged(pid: int, tags: dict[str, str], number: int) -> None:
    """Send a signal to a process, if it has these tags."""
    with contextlib.suppress(OSError):
        if _has_tags(pid, tags):
            os.kill(pid, number)


def format_survivors(pids: list[int]) -> str:
    """Return the processes that could not be killed, for a message."""
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


def _has_tags(pid: int, tags: dict[str, str]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in environ for name, value in tags.items())
