"""Slot daemon on a Ray node: starts one slot, stops it, and never lets it outlive the actor that requested it.

Standard library only; the actor writes this file, with `remote.tagged_processes`, into its own directory and runs it.
Requests are lines of JSON on standard input, the exit code is reported on standard output. When standard input ends for
any reason, the slot is stopped: SIGTERM, the grace period, then SIGKILL for every process with the slot's environment
tags. Processes that an earlier daemon left behind get the same grace period before a new slot is started.
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

from stoker.remote.tagged_processes import format_survivors, list_tagged, signal_tagged, terminate_tagged

OUTPUT = "output"
"""The file with the slot's output, beside this file."""
LEFTOVER_GRACE_S = 0.5
KILL_TIMEOUT_S = 30.0
"""How long a killed process may take to disappear."""
POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
# Set by Ray for its own workers; user programs should not inherit them.
_RAY_VARIABLES = ("PYTHONBREAKPOINT", "RAY_JOB_STOP_WAIT_TIME_S", "RAY_worker_niceness")


class SlotDaemon:
    """Daemon of one slot, from its start to the exit of its last process."""

    def __init__(self, request: dict[str, Any], folder: str) -> None:
        self._request, self._folder = request, folder
        self._tags: dict[str, str] = request["tags"]
        self._stop_requests = 0
        self._is_actor_gone = False

    def run(self) -> None:
        """Run the slot until none of its processes is left and report the result; without a command, only clean up."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        reader = threading.Thread(target=self._read_requests, daemon=True)
        reader.start()
        self._report(self._clean_up_previous() or self._run_slot())
        while reader.is_alive() and not self._is_actor_gone:  # until the actor has read the output
            time.sleep(POLL_S)

    def _clean_up_previous(self) -> dict[str, Any]:
        """Stop what an earlier daemon left; that daemon, or the kernel at its death, has sent SIGTERM already."""
        deadline = time.monotonic() + self._request["grace_s"]
        while time.monotonic() < deadline and self._stop_requests < 2 and list_tagged(self._tags):
            time.sleep(POLL_S)
        survivors = terminate_tagged(self._tags, LEFTOVER_GRACE_S, KILL_TIMEOUT_S)
        return {"lost": f"{format_survivors(survivors)} cannot be killed"} if survivors else {}

    def _run_slot(self) -> dict[str, Any]:
        if "argv" not in self._request or self._is_actor_gone:
            return {"lost": ""}
        if self._stop_requests:
            return {"code": -signal.SIGTERM}
        try:
            child = self._start()
        except OSError as error:
            if error.filename == self._request["cwd"]:
                what = f"cannot change to the working directory {error.filename}"
            else:
                what = f"cannot start {self._request['argv'][0]!r}"
            return {"error": f"{what}: {error.strerror or error}"}
        code = self._wait(child)
        survivors = terminate_tagged(self._tags, 0 if self._stop_requests > 1 else LEFTOVER_GRACE_S, KILL_TIMEOUT_S)
        if survivors:
            with open(os.path.join(self._folder, OUTPUT), "a") as output:
                output.write(f"stoker: {format_survivors(survivors)} cannot be killed\n")
        return {"code": code}

    def _start(self) -> subprocess.Popen[bytes]:
        libc, parent = ctypes.CDLL(None), os.getpid()

        def set_parent_death_signal() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)

        inherited = {name: value for name, value in os.environ.items() if name not in _RAY_VARIABLES}
        with open(os.path.join(self._folder, OUTPUT), "ab", buffering=0) as output:
            return subprocess.Popen(
                self._request["argv"],
                env={**inherited, **self._request["env"], **self._tags},
                cwd=self._request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=set_parent_death_signal,
            )

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the slot to exit, signalling it on stop requests, and return its exit code."""
        sent, deadline = 0, float("inf")
        while True:
            code = child.poll()
            if code is not None:
                return code
            if self._is_actor_gone and deadline == float("inf"):
                deadline = time.monotonic() + (0 if self._stop_requests else self._request["grace_s"])
                self._stop_requests = max(self._stop_requests, 1)
            if time.monotonic() > deadline:
                self._stop_requests = 2
            if self._stop_requests > sent:
                sent = self._stop_requests
                child.send_signal(signal.SIGTERM if sent == 1 else signal.SIGKILL)
            time.sleep(POLL_S)

    def _read_requests(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["op"] == "stop":
                self._stop_requests += 1
            elif request["op"] == "signal":
                signal_tagged(request["pid"], self._tags, request["number"])
        self._is_actor_gone = True

    def _report(self, result: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(result).encode() + b"\n")

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002
        self._is_actor_gone = True


def main() -> None:
    """Run the slot that the first line on standard input requests, then remove our directory."""
    folder = str(Path(__file__).resolve().parent)
    try:
        SlotDaemon(json.loads(sys.stdin.readline()), folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main()
