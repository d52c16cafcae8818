"""The pause of the supervisor: what ends it before its time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from stoker.core.processes import wait_for_exit
from stoker.launchers.supervise.wakeup import Wakeup

FOREVER_S = 3600.0


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    before = signal.getsignal(signal.SIGCHLD)
    yield Wakeup()
    os.close(signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGCHLD, before)


def fork_child(*, wait_for: int) -> int:
    """Fork a child that exits when there is a byte in a pipe."""
    if (pid := os.fork()) == 0:
        os.read(wait_for, 1)
        os._exit(0)
    return pid


def test_exit_of_a_child_ends_the_pause(wakeup: Wakeup) -> None:
    read_fd, write_fd = os.pipe()
    child = fork_child(wait_for=read_fd)
    timer = threading.Timer(0.1, os.write, (write_fd, b"x"))
    timer.start()
    wakeup.pause(FOREVER_S)
    assert os.waitpid(child, 0) == (child, 0)
    timer.join()
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_notification_before_the_pause_counts(wakeup: Wakeup) -> None:
    for _ in range(100_000):  # more than a pipe holds
        wakeup.notify()
    wakeup.pause(FOREVER_S)
    before = time.monotonic()
    wakeup.pause(0.2)
    assert time.monotonic() - before >= 0.2


def test_notification_of_another_thread_ends_the_pause(wakeup: Wakeup) -> None:
    timer = threading.Timer(0.1, wakeup.notify)
    timer.start()
    wakeup.pause(FOREVER_S)
    timer.join()


def test_wait_for_the_exit_of_a_process_ends_in_time() -> None:
    before = time.monotonic()
    wait_for_exit(os.getpid(), 0.2)
    assert time.monotonic() - before >= 0.2
