"""Slots on Ray: the backend of the supervisor, with one connection to a driver that runs all slots of an attempt.

A thread of the supervisor connects to the driver, writes the output of the slots to their logs, and passes on what the
supervisor wants. The driver, and with it every slot, stops when the supervisor is gone: see `connection`.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from stoker.errors import MissingError, StokerError, UnavailableError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.ray.connection import (
    EXIT_TIMEOUT_S,
    FRAME_PREFIX,
    DriverConnection,
    LocalDriver,
    SubmittedDriver,
    parse_frame,
)
from stoker.launchers.ray.host_cluster import HostCluster
from stoker.launchers.ray.placement import explain_no_capacity
from stoker.launchers.ray.plan import RayPlan, read_ray_plan
from stoker.launchers.ssh.client import REMOTE_MODULES, module_source
from stoker.launchers.supervise.diagnosis import LOST_EXIT_CODE, TAIL_BYTES
from stoker.launchers.supervise.process_group import normalize_exit_code, stop_leftovers
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotHandle, SlotState, StackRequest, Unreachable
from stoker.launchers.supervise.status_writer import log_remark
from stoker.remote.frames import write_all
from stoker.remote.tagged_processes import format_survivors
from stoker.telemetry.reader import read_log

GONE_MARGIN_S = 10.0
"""How much later than after its lease and grace period a lost slot is surely gone: Ray must notice the loss first."""
CLOSE_TIMEOUT_S = 60.0


class RaySlot:
    """A slot on a Ray node. All slots of an attempt stop together."""

    def __init__(self, attempt: RayAttempt, name: str, *, is_first: bool, reads_local_sources: bool) -> None:
        self._attempt, self._name, self._is_first = attempt, name, is_first
        self.reads_local_sources = reads_local_sources

    def poll(self) -> SlotState:
        """Return the state of the slot, as far as the driver has reported it."""
        return self._attempt.states[self._name]

    def has_process(self, pid: int) -> bool:  # noqa: ARG002
        """Whether the slot has not exited: of its processes nothing is known here."""
        return not isinstance(self.poll(), Exited)

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Signal the ranks of all slots that have sent a heartbeat, once for the first slot."""
        if self._is_first:
            self._attempt.request_stacks()
            yield StackRequest()

    def terminate(self, *, force: bool = False) -> None:
        """Ask the driver to stop all slots."""
        self._attempt.stop(2 if force else 1)


class RayBackend:
    """Backend for slots on Ray."""

    report_delay_s = 12.0
    is_detached = False

    def __init__(self, run: RunFolder, on_change: Callable[[], None] = lambda: None) -> None:
        """Call `on_change`, in any thread, when a slot has exited."""
        self._run, self._plan, self._on_change = run, read_ray_plan(run), on_change
        self._attempt: RayAttempt | None = None
        self._handles: dict[Slot, RaySlot] = {}

    def prepare(self, grace_s: float, *, reattach: bool = False) -> None:  # noqa: ARG002
        """Stop what an earlier supervisor left behind of a Ray on this machine."""
        stop_leftovers(self._run, grace_s)

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:  # noqa: ARG002
        """Start the driver in the background, and with it all slots."""
        self._attempt = RayAttempt(self._plan, self._run, attempt, self._on_change)
        self._attempt.start()
        first = next(iter(self._plan.slots))
        self._handles = {
            Slot.parse(name): RaySlot(
                self._attempt, name, is_first=name == first, reads_local_sources=self._plan.runs_here
            )
            for name in self._plan.slots
        }
        return dict(self._handles)

    def can_restart(self, slot: Slot) -> bool:
        """Whether its node is there: the others know its address, and Ray would place it on any other node."""
        assert self._attempt is not None
        state = self._attempt.states[str(slot)]
        return isinstance(state, Exited) and not state.is_lost

    def restart_slot(self, slot: Slot) -> SlotHandle:
        """Start a slot again on the node where it ran; its log continues."""
        assert self._attempt is not None
        self._attempt.restart(str(slot))
        return self._handles[slot]

    def close(self, grace_s: float) -> None:
        """Wait until the driver is gone, and with it a cluster of the run's own; stop leftovers on this machine.

        Raise UnavailableError if that takes too long: slots may still be started or running.
        """
        is_closed = True
        if self._attempt is not None:
            self._attempt.stop(1)
            is_closed = self._attempt.join(CLOSE_TIMEOUT_S)
        if self._plan.runs_here:
            stop_leftovers(self._run, grace_s)
        if not is_closed:
            what = f"the connection to Ray was not closed within {CLOSE_TIMEOUT_S:g} s"
            raise UnavailableError(what, where=self._run.id, hint=f"run: stoker job stop {self._run.id}")


class RayAttempt:
    """One attempt: what is known of its slots, and the thread that talks to their driver."""

    def __init__(self, plan: RayPlan, run: RunFolder, attempt: int, on_exit: Callable[[], None] = lambda: None) -> None:
        self._plan, self._run, self._attempt, self._on_exit = plan, run, attempt, on_exit
        self.states: dict[str, SlotState] = dict.fromkeys(plan.slots, Running(is_placed=False))
        """The state of each slot; changed by the thread, and by `restart`."""
        self._restarts = dict.fromkeys(plan.slots, 0)
        self._lock, self._has_ended = threading.Lock(), False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        paths = {name: run.log_path(Slot.parse(name), attempt) for name in plan.slots}
        self._logs = {name: os.open(path, flags, 0o600) for name, path in paths.items()}
        self._stop_level = self._stack_requests = 0
        self._sent: dict[str, Any] = {"stop_level": 0, "stacks": 0, "restarts": {}}
        self._last_frame = 0
        self._has_begun = self._is_over = False
        self._cluster: HostCluster | None = None
        self._thread = threading.Thread(target=self._run_thread, name="ray", daemon=True)

    # --- For the supervisor

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, level: int) -> None:
        """Stop all slots: 1 by SIGTERM, 2 by SIGKILL."""
        self._stop_level = max(self._stop_level, level)

    def request_stacks(self) -> None:
        """Ask the ranks of all slots for their stacks."""
        self._stack_requests += 1

    def restart(self, name: str) -> None:
        """Start a slot again that has exited, unless the driver has ended meanwhile."""
        with self._lock:
            if not self._has_ended:
                self.states[name] = Running()
                self._restarts[name] += 1

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing is left of the driver, or of a cluster of the run's own; return whether that is so."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- The thread

    def _run_thread(self) -> None:
        try:
            with self._open_cluster() as plan:
                self._run_driver(plan)
        except StokerError as error:
            self._lose_all(str(error))
        except Exception as error:
            log_remark(traceback.format_exc())
            self._lose_all(f"the connection to Ray failed: {type(error).__name__}: {error}")
        finally:
            for fd in self._logs.values():
                os.close(fd)

    @contextmanager
    def _open_cluster(self) -> Iterator[RayPlan]:
        """Yield the plan with the address of the cluster, which is started first and removed afterwards if need be."""
        if self._plan.nodes is None:
            yield self._plan
            return
        self._cluster = HostCluster(self._plan, self._run, self._attempt)
        try:
            self._set_pending(f"starting Ray on {', '.join(self._plan.node_addresses)}")
            self._cluster.start(self._is_stopping)
            yield msgspec.structs.replace(self._plan, address=self._cluster.address)
        finally:
            self._cluster.close()

    def _run_driver(self, plan: RayPlan) -> None:
        if self._is_stopping():  # nothing has been started yet
            self._finish()
            return
        connection = self._connect(plan)
        try:
            if self._is_stopping():
                self._finish()
            else:
                connection.begin(self._make_request())
                self._has_begun = True
                self._process_output(connection)
        finally:
            connection.close(is_over=self._is_over)

    def _connect(self, plan: RayPlan) -> DriverConnection:
        if plan.address is None:
            return LocalDriver(plan, self._run, self._attempt)
        return SubmittedDriver(plan, self._run, self._attempt)

    def _process_output(self, connection: DriverConnection) -> None:
        deadline = float("inf")
        for line in connection.lines():
            if line is not None and self._process_line(line):
                self._is_over = True
                self._finish()
                return
            if (state := self._desired_state()) != self._sent:
                self._sent = state
                connection.send(state)
                if state["stop_level"]:
                    grace_s = self._plan.grace_s if state["stop_level"] == 1 else 0
                    deadline = time.monotonic() + EXIT_TIMEOUT_S * 2 + grace_s
            if time.monotonic() > deadline:
                self._lose_all("the Ray driver did not report its end in time")
                return
            if self._cluster is not None and (reason := self._cluster.failure()):
                self._lose_all(reason)
                return
        self._lose_all(connection.exit_reason)

    def _process_line(self, line: str) -> bool:
        """Process one line of the driver's output and return whether it is the last."""
        if FRAME_PREFIX not in line:
            self._log_ray_output(line)
            return False
        frame = parse_frame(line)
        if frame is None:
            return False
        if frame["n"] <= self._last_frame:
            return False  # from a log that is read again
        self._last_frame = frame["n"]
        if "slot" in frame:
            self._process_slot_frame(frame)
        elif "capacity" in frame:
            self._process_capacity(frame["capacity"])
        elif "addresses" in frame:
            self._set_pending("")
            self._run.write("places.json", json.dumps(frame["addresses"]).encode())
        elif "failed" in frame:
            self._lose_all(f"the driver on Ray failed: {frame['failed']}")
            return True
        return "finished" in frame

    def _process_capacity(self, capacity: dict[str, Any] | None) -> None:
        """Process the capacity of a cluster that has not placed the slots yet; None when it has."""
        if capacity is None:
            self._set_pending("")
            return
        nodes, free = capacity["nodes"], capacity["free"]
        reason, is_too_small = explain_no_capacity(self._plan.list_bundles(), self._plan.strategy, nodes, free)
        if is_too_small and self._plan.address is None:  # a cluster with an address may be scaled up
            self._reject_all(f"Ray cannot place {self._plan.gang}: {reason}")
        else:
            self._set_pending(f"Ray has not placed {self._plan.gang}: {reason}")

    def _process_slot_frame(self, frame: dict[str, Any]) -> None:
        name = frame["slot"]
        if frame.get("data"):
            write_all(self._logs[name], frame["data"].encode("latin-1"))
        if "lease_s" in frame:
            self.states[name] = self._lost_state(frame["error"], frame["lease_s"])
        elif "code" in frame:
            error = frame.get("error", "")
            # A program may exit with this code too, but without our error.
            is_lost = bool(error) and frame["code"] == LOST_EXIT_CODE
            code = normalize_exit_code(frame["code"])
            is_oom = bool(code and frame.get("oom"))
            self.states[name] = Exited(code, error, is_lost=is_lost, out_of_memory=is_oom)
            self._on_exit()
            if survivors := frame.get("survivors"):
                log_remark(f"cannot kill {format_survivors(survivors)} of {name}")

    # --- States

    def _is_stopping(self) -> bool:
        return self._stop_level > 0

    def _set_pending(self, reason: str) -> None:
        """Record why the slots are not placed; an empty reason means that they are."""
        if reason:
            log_remark(f"pending: {reason}")
        state = Running(is_placed=not reason, pending_reason=reason)
        for name, old in self.states.items():
            if isinstance(old, Running):
                self.states[name] = state

    def _finish(self) -> None:
        """Record slots that were never started as terminated."""
        self._end_running(Exited(-signal.SIGTERM))

    def _end_running(self, end: SlotState) -> None:
        """Record the end of the slots that have none yet; no slot is started any more."""
        with self._lock:
            self._has_ended = True
            self.states.update({name: end for name, state in self.states.items() if isinstance(state, Running)})

    def _reject_all(self, reason: str) -> None:
        """Record that the slots cannot run here, so that they are not retried, and stop the driver."""
        self.states.update(dict.fromkeys(self.states, Exited(MissingError.exit_code, reason)))
        self.stop(1)

    def _lose_all(self, reason: str) -> None:
        """Record all slots without an end as lost: their driver or actors stop them when the lease has expired."""
        log_remark(reason)
        self._end_running(self._lost_state(reason, self._plan.lost_after_s))

    def _lost_state(self, reason: str, lease_s: float) -> SlotState:
        """Return the state of a lost slot, which may be running until its lease and grace period are over.

        Not if no slot was started; and on this machine, processes are stopped at the end of the attempt.
        """
        if self._plan.runs_here or not self._has_begun:
            return Exited(LOST_EXIT_CODE, reason, is_lost=True)
        now = time.monotonic()
        return Unreachable(now, reason, now + lease_s + self._plan.grace_s + GONE_MARGIN_S, is_lost=True)

    def _log_ray_output(self, line: str) -> None:
        """Append a line of Ray's own output to the Ray log of the attempt."""
        if line.strip():
            with open(self._run.logs / f"ray.{self._attempt}.log", "a") as file:
                file.write(line.rstrip("\n") + "\n")

    # --- Requests

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
            "bundles": self._plan.list_bundles(),
            "strategy": self._plan.strategy,
            "tags": {"STOKER_RUN": self._run.id},
            "grace_s": self._plan.grace_s,
            "lost_after_s": None if self._plan.runs_here else self._plan.lost_after_s,
            "daemon_files": read_daemon_files(),
        }

    def _desired_state(self) -> dict[str, Any]:
        restarts = {name: count for name, count in self._restarts.items() if count}
        state: dict[str, Any] = {**self._sent, "stop_level": self._stop_level, "restarts": restarts}
        if self._stack_requests != self._sent["stacks"]:
            pids = {name: self._rank_pids(Slot.parse(name)) for name in self._plan.slots}
            state |= {"stacks": self._stack_requests, "pids": pids}
        return state

    def _rank_pids(self, slot: Slot) -> list[int]:
        """Return the process ids in the heartbeats of a slot."""
        events = read_log(self._run.log_path(slot, self._attempt), last=TAIL_BYTES).events
        pids = {event.rank: int(event.fields.get("pid", 0)) for event in events if event.kind == "heartbeat"}
        return list(pids.values())


def read_daemon_files() -> dict[str, str]:
    """Return the slot daemon and what it imports, by their paths in the directory that it runs in."""
    packages = dict.fromkeys(("stoker/__init__.py", "stoker/remote/__init__.py"), "")
    return {**packages, **{f"{name.replace('.', '/')}.py": module_source(name) for name in REMOTE_MODULES}}
