"""Ray client: the local process of a run on Ray that writes the logs of all slots and reports their exit codes.

The supervisor starts it as `driver/0`. The driver on the cluster, and with it every slot, stops when this process is
gone: see `connection`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from stoker.core import json_io
from stoker.errors import SpecError, StokerError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.ray.connection import (
    EXIT_TIMEOUT_S,
    FRAME_PREFIX,
    DriverConnection,
    LocalDriver,
    SubmittedDriver,
)
from stoker.launchers.ray.host_cluster import HostCluster
from stoker.launchers.ray.plan import RayPlan, read_ray_plan
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE, TAIL_BYTES
from stoker.launchers.supervise.proxy_slots import LOST_MARK, PENDING_MARK, SLOT_EXIT_MARK
from stoker.telemetry.events import Recorder
from stoker.telemetry.reader import read_log


class RayClient:
    """Client of the driver: writes the output in its frames to the logs of the slots, and forwards stop signals."""

    def __init__(self, run: RunFolder, plan: RayPlan, attempt: int) -> None:
        self._run, self._plan, self._attempt = run, plan, attempt
        self._slots = [Slot.parse(name) for name in plan.slots]
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._logs = {str(slot): os.open(run.log_path(slot, attempt), flags, 0o600) for slot in self._slots}
        self._events = Recorder(slot="driver/0", attempt=attempt)
        self._is_line_complete = dict.fromkeys(self._logs, True)
        self._codes: dict[str, int] = {}
        self._last_frame = 0
        self._is_over = False
        self._cluster: HostCluster | None = None
        self._state: dict[str, Any] = {"stop_level": 0, "stacks": 0}
        self._stop_requests = self._stack_requests = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop_signal)
        signal.signal(signal.SIGUSR1, self._on_stacks_signal)

    def run(self) -> int:
        """Run the attempt to its end; return 0 if every slot succeeded, else the first other exit code."""
        try:
            with self._open_cluster() as plan:
                return self._run_driver(plan)
        except StokerError as error:
            return self._report_all_lost(str(error))
        except Exception as error:
            traceback.print_exc()  # into the driver's log
            return self._report_all_lost(f"the Ray client failed: {type(error).__name__}: {error}")

    @contextmanager
    def _open_cluster(self) -> Iterator[RayPlan]:
        """Yield the plan with the address of the cluster, which is started first and removed afterwards if need be."""
        if self._plan.nodes is None:
            yield self._plan
            return
        self._cluster = HostCluster(self._plan, self._run, self._attempt)
        try:
            self._report_pending(f"starting Ray on {', '.join(self._plan.node_addresses)}")
            self._cluster.start(lambda: bool(self._stop_requests))
            yield msgspec.structs.replace(self._plan, address=self._cluster.address)
        finally:
            self._cluster.close()

    def _run_driver(self, plan: RayPlan) -> int:
        if self._cluster is not None and self._stop_requests:  # it may not have started completely
            return self._finish()
        connection = self._connect(plan)
        try:
            if self._stop_requests:  # nothing has been started yet
                return self._finish()
            connection.begin(self._make_request())
            return self._process_output(connection)
        finally:
            connection.close(is_over=self._is_over)

    def _connect(self, plan: RayPlan) -> DriverConnection:
        if plan.address is None:
            return LocalDriver(plan, self._run, self._attempt)
        return SubmittedDriver(plan, self._run, self._attempt)

    def _process_output(self, connection: DriverConnection) -> int:
        deadline = float("inf")
        for line in connection.lines():
            if line is not None and self._process_line(line):
                self._is_over = True
                return self._finish()
            if (state := self._desired_state()) != self._state:
                self._state = state
                connection.send(state)
                if state["stop_level"]:
                    grace_s = self._plan.grace_s if state["stop_level"] == 1 else 0
                    deadline = time.monotonic() + EXIT_TIMEOUT_S * 2 + grace_s
            if time.monotonic() > deadline:
                return self._report_all_lost("the Ray driver did not report its end in time")
            if self._cluster is not None and (reason := self._cluster.failure()):
                return self._report_all_lost(reason)
        return self._report_all_lost(connection.exit_reason)

    def _process_line(self, line: str) -> bool:
        """Process one line of the driver's output and return whether it is the last."""
        start = line.find(FRAME_PREFIX)
        if start < 0:
            self._log_ray_output(line)
            return False
        try:
            frame = json_io.parse(line[start + len(FRAME_PREFIX) :], None)
        except SpecError:  # the driver died while writing it
            return False
        if frame["n"] <= self._last_frame:
            return False  # from a log that is read again
        self._last_frame = frame["n"]
        if "slot" in frame:
            self._process_slot_frame(frame)
        elif "pending" in frame:
            self._report_pending(frame["pending"])
        elif "addresses" in frame:
            self._events.mark(PENDING_MARK)
            self._run.write("places.json", json.dumps(frame["addresses"]).encode())
        elif "failed" in frame:
            self._report_all_lost(f"the driver on Ray failed: {frame['failed']}")
            return True
        return "finished" in frame

    def _report_pending(self, reason: str) -> None:
        """Report why the slots are not placed; an empty reason means that they are."""
        self._events.mark(PENDING_MARK, reason)
        if reason:
            print(f"pending: {reason}", flush=True)  # noqa: T201 (into the driver's log)

    def _process_slot_frame(self, frame: dict[str, Any]) -> None:
        name = frame["slot"]
        if frame.get("data"):
            self._write(name, frame["data"].encode("utf-8", "surrogateescape"))
        if "code" in frame:
            self._report_exit(name, frame["code"], frame.get("error", ""))

    def _report_exit(self, name: str, code: int, error: str = "") -> None:
        """Write the exit code of a slot, and an error, to the slot's log."""
        if error:
            newline = "" if self._is_line_complete[name] else "\n"
            self._write(name, f"{newline}stoker: {error}\n".encode())
        self._codes[name] = code
        events = Recorder(slot=name, attempt=self._attempt, fd=self._logs[name])
        if error and code == LOST_EXIT_CODE:  # a program may exit with this code too, but without our error
            events.mark(LOST_MARK, error)
        events.mark(SLOT_EXIT_MARK, code=code)

    def _finish(self) -> int:
        """Return the first exit code other than 0; slots that were never started count as terminated."""
        for name in self._logs:
            if name not in self._codes:
                self._report_exit(name, -signal.SIGTERM)
        return next((code for code in self._codes.values() if code), 0)

    def _report_all_lost(self, reason: str) -> int:
        """Report all slots without an exit code as lost."""
        for name in self._logs:
            if name not in self._codes:
                self._report_exit(name, LOST_EXIT_CODE, reason)
        return LOST_EXIT_CODE

    def _write(self, name: str, data: bytes) -> None:
        self._is_line_complete[name] = data.endswith(b"\n")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._logs[name], rest) :]

    def _log_ray_output(self, line: str) -> None:
        """Append a line of Ray's own output to the Ray log of the attempt."""
        if line.strip():
            with open(self._run.logs / f"ray.{self._attempt}.log", "a") as file:
                file.write(line.rstrip("\n") + "\n")

    def _make_request(self) -> dict[str, Any]:
        """Return what the driver is to start; secrets travel only here, on no command line and in no file."""
        secrets = {name: os.environ[name] for name in self._plan.secrets if name in os.environ}
        folder = str(self._run.folder) if self._plan.runs_here else f"@ray:home@/stoker/{self._run.id}"
        env = {"STOKER_ATTEMPT": str(self._attempt), "STOKER_CHECKPOINT_DIR": f"{folder}/checkpoints", **secrets}
        return {
            "slots": {
                name: {"argv": command.argv, "env": {**env, **command.env}, "cwd": command.cwd}
                for name, command in self._plan.slots.items()
            },
            "bundles": [self._plan.bundle_of(name) for name in self._plan.slots],
            "gang": self._plan.gang,
            "strategy": self._plan.strategy,
            "can_scale": self._plan.address is not None,
            "tags": {"STOKER_RUN": self._run.id},
            "grace_s": self._plan.grace_s,
            "daemon_files": read_daemon_files(),
        }

    def _desired_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {**self._state, "stop_level": self._stop_requests}
        if self._stack_requests != self._state["stacks"]:
            state |= {
                "stacks": self._stack_requests,
                "pids": {str(slot): self._rank_pids(slot) for slot in self._slots},
            }
        return state

    def _rank_pids(self, slot: Slot) -> list[int]:
        """Return the process ids in the heartbeats of a slot."""
        events = read_log(self._run.log_path(slot, self._attempt), last=TAIL_BYTES).events
        pids = {event.rank: int(event.fields.get("pid", 0)) for event in events if event.kind == "heartbeat"}
        return list(pids.values())

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stop_requests += 1

    def _on_stacks_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._stack_requests += 1


def read_daemon_files() -> dict[str, str]:
    """Return the slot daemon and what it imports, by their paths in the directory that it runs in."""
    return {
        "slot_daemon.py": files("stoker.launchers.ray").joinpath("slot_daemon.py").read_text(),
        "stoker/__init__.py": "",
        "stoker/remote/__init__.py": "",
        "stoker/remote/tagged_processes.py": files("stoker.remote").joinpath("tagged_processes.py").read_text(),
    }


def main() -> NoReturn:
    """Run the client of the run in the given folder."""
    run = RunFolder(Path(sys.argv[1]))
    code = RayClient(run, read_ray_plan(run), int(os.environ.get("STOKER_ATTEMPT", "0"))).run()
    os._exit(abs(code) + 128 if code < 0 else code)  # threads may still wait for the network


if __name__ == "__main__":
    main()
