"""Print the stacks of all threads on SIGUSR1, without risk for the program that runs."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

STDERR = 2


def install_stack_signal() -> None:
    """Make `kill -USR1` print the stacks of all threads to standard error, unless the program handles that signal.

    The main thread prints its own stack at once, even while it waits in C code: it is the one that the signal
    interrupts. The stacks of other threads change while they run, and reading them from a signal handler would crash
    the process now and then, so they follow when the main thread executes Python code again.
    """
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:  # only the main thread may set handlers
        signal.signal(signal.SIGUSR1, _print_other_threads)
        atexit.register(_ignore_stack_signal)
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=False, chain=is_main)


def _ignore_stack_signal() -> None:
    """Keep a signal that arrives while the interpreter exits from ending the process."""
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _print_other_threads(_number: int, _frame: FrameType | None) -> None:
    own = threading.get_ident()
    stacks = [_format_stack(thread, frame) for thread, frame in sys._current_frames().items() if thread != own]
    with suppress(OSError):
        os.write(STDERR, "".join(stacks).encode(errors="backslashreplace"))


def _format_stack(thread: int, frame: FrameType | None) -> str:
    """Return a stack in the format of faulthandler."""
    lines = [f"\nThread 0x{thread:016x} (most recent call first):\n"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
