"""Keeps one slot on a Ray node: starts it, ends it, and never lets it outlive the actor that asked for it.

One file on the standard library alone; the actor writes it into a folder of its own and starts it there. It is asked by
lines of JSON on standard input, and tells the exit code on standard output. When standard input ends, by whatever
means, the slot is ended: TERM, the time for a last checkpoint, KILL for all that bears its marks. What another keeper
left of the slot has that time too, before a new one is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

OUTPUT = "output"
"""Where the slot's output lies, beside this file."""
LEFTOVER_S = 0.5
DEATH_S = 30.0
"""How long a killed process may take to be gone."""
POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
# What Ray tells its own workers, and means nothing to a program of the user's.
_RAYS = ("PYTHONBREAKPOINT", "RAY_JOB_STOP_WAIT_TIME_S", "RAY_worker_niceness")


class Keeper:
    """One slot, from its start to the end of the last process that came of it."""

    def __init__(self, request: dict[str, Any], folder: str) -> None:
        self._request, self._folder = request, folder
        self._marks: dict[str, str] = request["marks"]
        self._ends = 0
        self._is_alone = False

    def keep(self) -> None:
        """Start the slot, stay until nothing of it is left, and tell how it ended; without a command only the rest."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        hearing = threading.Thread(target=self._hear, daemon=True)
        hearing.start()
        self._tell(self._swept() or self._kept())
        while hearing.is_alive() and not self._is_alone:  # until the output has been read
            time.sleep(POLL_S)

    def _swept(self) -> dict[str, Any]:
        """End what another keeper left: it, or the kernel at its own end, has asked the slot to end."""
        deadline = time.monotonic() + self._request["grace_s"]
        while time.monotonic() < deadline and self._ends < 2 and _marked(self._marks):
            time.sleep(POLL_S)
        left = end_marked(self._marks, LEFTOVER_S)
        return {"lost": _undying(left)} if left else {}

    def _kept(self) -> dict[str, Any]:
        if "argv" not in self._request or self._is_alone:
            return {"lost": ""}
        if self._ends:
            return {"code": -signal.SIGTERM}
        try:
            child = self._start()
        except OSError as error:
            if error.filename == self._request["cwd"]:
                what = f"cannot work in the folder {error.filename}"
            else:
                what = f"cannot start {self._request['argv'][0]!r}"
            return {"fault": f"{what}: {error.strerror or error}"}
        code = self._watch(child)
        left = end_marked(self._marks, 0 if self._ends > 1 else LEFTOVER_S)
        if left:
            with open(os.path.join(self._folder, OUTPUT), "a") as output:
                output.write(f"stoker: {_undying(left)}\n")
        return {"code": code}

    def _start(self) -> subprocess.Popen[bytes]:
        libc, keeper = ctypes.CDLL(None), os.getpid()

        def die_with_us() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != keeper:
                os._exit(128 + signal.SIGTERM)

        outer = {name: value for name, value in os.environ.items() if name not in _RAYS}
        with open(os.path.join(self._folder, OUTPUT), "ab", buffering=0) as output:
            return subprocess.Popen(
                self._request["argv"],
                env={**outer, **self._request["env"], **self._marks},
                cwd=self._request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_us,
            )

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the slot, or bring it about."""
        told, deadline = 0, float("inf")
        while True:
            code = child.poll()
            if code is not None:
                return code
            if self._is_alone and deadline == float("inf"):
                deadline = time.monotonic() + (0 if self._ends else self._request["grace_s"])
                self._ends = max(self._ends, 1)
            if time.monotonic() > deadline:
                self._ends = 2
            if self._ends > told:
                told = self._ends
                child.send_signal(signal.SIGTERM if told == 1 else signal.SIGKILL)
            time.sleep(POLL_S)

    def _hear(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "end":
                self._ends += 1
            elif request["do"] == "signal":
                _signal_marked(request["pid"], self._marks, request["number"])
        self._is_alone = True

    def _tell(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(answer).encode() + b"\n")

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self._is_alone = True


def end_marked(marks: dict[str, str], grace_s: float) -> list[int]:
    """End all processes with these variables: TERM, some time, KILL until none is left; give those that stay."""
    for pid in _marked(marks):
        _signal_marked(pid, marks, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (found := _marked(marks)) and time.monotonic() < deadline + DEATH_S:
        if time.monotonic() >= deadline:
            for pid in found:
                _signal_marked(pid, marks, signal.SIGKILL)
        time.sleep(POLL_S)
    return found


def _undying(pids: list[int]) -> str:
    return f"processes that do not end, not even by SIGKILL: {', '.join(map(str, pids))}"


def _marked(marks: dict[str, str]) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _bears(int(name), marks)]


def _bears(pid: int, marks: dict[str, str]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={value}".encode() in environ for name, value in marks.items())


def _signal_marked(pid: int, marks: dict[str, str], number: int) -> None:
    with contextlib.suppress(OSError):
        if _bears(pid, marks):
            os.kill(pid, number)


def main() -> None:
    """Keep the slot that the first line asks for; then the folder is no longer needed."""
    folder = str(Path(__file__).resolve().parent)
    try:
        Keeper(json.loads(sys.stdin.readline()), folder).keep()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main()
