"""What /proc says about processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path


def child_pids(pid: int) -> list[int]:
    """Return the children of a process's main thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_signal_handler(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has installed a handler for a signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)
