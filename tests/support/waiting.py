"""Waiting for conditions, with a timeout that a busy machine does not miss; and whether a process is alive."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 60.0
MAX_PAUSE_S = 0.1


def eventually(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> bool:
    """Poll until the condition is true; return whether it was within the timeout."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, MAX_PAUSE_S)
    return True


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Poll until the condition is true; fail the test with the condition's source after the timeout."""
    __tracebackhide__ = True
    if not eventually(condition, timeout_s):
        raise AssertionError(f"not true within {timeout_s:g} s: {_source(condition)}")


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):  # a partial, or a built-in
        return repr(condition)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
