"""Stacks on SIGUSR1: complete, and harmless however often they are requested."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.launchers.supervise.hangs import main_stacks
from tests.support.waiting import wait_until

BUSY = """
import importlib, threading
from stoker.telemetry import recorder

recorder()

def recurse(depth):
    return depth and recurse(depth - 1)

def import_for_ever():
    while True:
        recurse(60)
        try:
            importlib.import_module("missing.module")
        except ImportError:
            pass

for _ in range(6):
    threading.Thread(target=import_for_ever, daemon=True).start()
print("ready", flush=True)
while True:
    recurse(50)
"""
WAITING = """
import queue, threading
from stoker.telemetry import recorder

recorder()
items = queue.Queue()

def read_for_ever():
    print("ready", flush=True)
    threading.Event().wait()

def wait_for_ever():
    items.get()

threading.Thread(target=read_for_ever, daemon=True).start()
wait_for_ever()
"""
EXITING = """
from stoker.telemetry import recorder
recorder()
print("ready", flush=True)
"""


@contextmanager
def started(program: str, stderr: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        stderr.open("wb") as file,
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=file) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_busy_threads_survive_many_requests(tmp_path: Path) -> None:
    """Reading the stacks of running threads in a signal handler crashed after a few hundred requests."""
    dumps = tmp_path / "stderr"
    with started(BUSY, dumps) as process:
        for _ in range(1500):
            size = dumps.stat().st_size
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda size=size: dumps.stat().st_size > size or process.poll() is not None)  # type: ignore[misc]
            assert process.poll() is None
    text = dumps.read_text()
    assert "in import_for_ever" in text
    assert all(stack[-1].function == "<module>" for stack in main_stacks(text.splitlines()))


def test_waiting_main_thread_and_other_threads_are_printed(tmp_path: Path) -> None:
    dumps = tmp_path / "stderr"
    with started(WAITING, dumps) as process:
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "in read_for_ever" in dumps.read_text())
        assert process.poll() is None
    (stack,) = main_stacks(dumps.read_text().splitlines())
    assert "wait_for_ever" in [frame.function for frame in stack]


def test_request_while_the_interpreter_exits_does_not_end_the_process(tmp_path: Path) -> None:
    for _ in range(10):
        with started(EXITING, tmp_path / "stderr") as process:
            while process.poll() is None:
                process.send_signal(signal.SIGUSR1)
            assert process.returncode == 0
