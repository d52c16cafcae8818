"""Slots that are processes of this machine: start them together, poll them, stop them with all their descendants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from stoker.core.processes import (
    Process,
    find_processes_by_env,
    handles_signal,
    kill_children,
    parent_pid,
    read_env,
    start,
    terminate_by_env,
)
from stoker.core.spec import load
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import RESERVED_ENV
from stoker.jobs.status import signal_from_exit_code
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import LocalPlan
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotBackend, SlotHandle, StackRequest
from stoker.remote import profiler
from stoker.remote.guard import Guard
from stoker.remote.profiler import machine_oom_kills

LEFTOVER_GRACE_S = 5.0


class OomMonitor:
    """Counter of OOM kills on this machine during the last seconds."""

    def __init__(self) -> None:
        self._counts = [(time.monotonic(), machine_oom_kills())]

    def sample(self) -> None:
        """Record the count, at most once per second."""
        now = time.monotonic()
        if now - self._counts[-1][0] >= 1.0:
            self._counts = [*self._counts[-5:], (now, machine_oom_kills())]

    def has_recent_kills(self) -> bool:
        """Whether the kernel has killed a process since the oldest sample."""
        return machine_oom_kills() > self._counts[0][1]


class TaggedSlot:
    """A slot on this machine, whose processes are found by their environment variables."""

    reads_local_sources = True

    def __init__(self, run: RunFolder, slot: Slot, profiler: int | None = None) -> None:
        """Take the process of the profiler, if the slot has one: it forwards all signals to the program."""
        self._tags, self._profiler = {"STOKER_RUN": run.id, "STOKER_SLOT": str(slot)}, profiler

    def has_process(self, pid: int) -> bool:
        """Whether a process id belongs to a live process of the slot."""
        return pid in find_processes_by_env(self._tags)

    def dump_stacks(self) -> Iterator[StackRequest]:
        """Signal one process after the other, because the ranks of a slot share a log."""
        candidates = sorted(set(find_processes_by_env(self._tags)) - {self._profiler})
        pids = [pid for pid in candidates if handles_signal(pid, signal.SIGUSR1)]
        for pid in pids:
            rank = read_env(pid).get("RANK", "")
            is_rank = rank.isdigit() and parent_pid(pid) not in pids
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            yield StackRequest(pid, int(rank) if is_rank else None)


class LocalSlot(TaggedSlot):
    """A slot that is a process which we have started."""

    def __init__(
        self,
        run: RunFolder,
        slot: Slot,
        process: Process,
        oom: OomMonitor,
        keep_guard: Callable[[], None],
        *,
        is_profiled: bool,
    ) -> None:
        super().__init__(run, slot, profiler=process.pid if is_profiled else None)
        self.process, self._oom, self._keep_guard = process, oom, keep_guard
        self._exit: Exited | None = None

    def poll(self) -> Running | Exited:
        """Return the exit record once the process has exited; its descendants are stopped with the attempt."""
        self._oom.sample()
        if self._exit is None and (code := self.process.poll()) is not None:
            self._exit = Exited(normalize_exit_code(code), out_of_memory=self._oom.has_recent_kills())
        if self._exit is None:
            self._keep_guard()
        return self._exit or Running(pid=self.process.pid)

    def terminate(self, *, force: bool = False) -> None:
        """Send SIGTERM to the process, which stops its own children, or SIGKILL to its process group."""
        if not force:
            self.process.terminate()
        elif self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class LocalBackend:
    """Backend for processes of this machine; each writes its own log, so that no output is lost with the supervisor.

    During an attempt, a guard terminates all its processes if the supervisor is killed. A variable in their environment
    identifies the supervisor, so that the guard spares those of the next one, which may start at the same time.
    """

    report_delay_s = 0.0
    is_detached = False

    def __init__(self, run: RunFolder, plan: LocalPlan) -> None:
        self._run, self._plan = run, plan
        self._keeps_port = bool(run.job.port)
        self._grace_s = float(run.job.grace)
        self._oom = OomMonitor()
        self._tags = {"STOKER_RUN": run.id, "STOKER_SUPERVISOR": f"{os.getpid()}-{time.time_ns():x}"}
        self._guard: Guard | None = None
        self._commands: Mapping[Slot, Command] = {}
        self._env: dict[str, str] = {}
        self._attempt = 0
        self._slots: dict[Slot, LocalSlot] = {}

    def prepare(self, grace_s: float, *, reattach: bool = False) -> None:  # noqa: ARG002
        """Stop all processes that an earlier supervisor left behind."""
        stop_leftovers(self._run, grace_s)

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:  # noqa: ARG002
        """Start all slots, with other ports if those of the plan are in use."""
        plan = self._plan if self._keeps_port else self._plan.with_free_ports()
        self._start_all(attempt, plan.commands)
        return dict(self._slots)

    def _start_all(self, attempt: int, commands: Mapping[Slot, Command], env: Mapping[str, str] | None = None) -> None:
        self._attempt, self._commands, self._slots = attempt, commands, {}
        self._env = {
            **self._tags,
            "STOKER_ATTEMPT": str(attempt),
            "STOKER_CHECKPOINT_DIR": str(self._run.folder / "checkpoints"),
            **(env or {}),
        }
        try:
            self._keep_guard()
            for slot in commands:
                self._slots[slot] = self._start(slot)
        except BaseException:
            self.close(0)
            raise

    def _start(self, slot: Slot) -> LocalSlot:
        command = self._commands[slot]
        inherited = {name: value for name, value in os.environ.items() if not RESERVED_ENV.fullmatch(name)}
        env = {**inherited, **self._env, **command.env}
        with open(self._run.log_path(slot, self._attempt), "ab", buffering=0) as log:
            process = start(command.argv, env=env, cwd=command.cwd, stdout=log, stderr=log, terminate_with_parent=True)
        if self._guard is not None:
            self._guard.add_leader(process.pid)
        is_profiled = profiler.__file__ in command.argv
        return LocalSlot(self._run, slot, process, self._oom, self._keep_guard, is_profiled=is_profiled)

    def _keep_guard(self) -> None:
        """Fork the guard if there is none yet, or if it was killed."""
        if self._guard is None or self._guard.has_exited():
            self._dismiss_guard()
            open_fds = [int(name) for name in os.listdir("/proc/self/fd")]
            self._guard = Guard(self._tags, self._grace_s, closed_fds=open_fds)
            for slot in self._slots.values():
                self._guard.add_leader(slot.process.pid)

    def can_restart(self, slot: Slot) -> bool:  # noqa: ARG002
        """Whether a slot can be started again: always."""
        return True

    def restart_slot(self, slot: Slot) -> SlotHandle:
        """Start a slot again while the others keep running; its leftover processes are stopped first."""
        self._slots[slot].process.stop(0)
        terminate_by_env({"STOKER_RUN": self._run.id, "STOKER_SLOT": str(slot)}, LEFTOVER_GRACE_S)
        self._slots[slot] = self._start(slot)
        return self._slots[slot]

    def close(self, grace_s: float) -> None:
        """Stop every process group, every other process of the run, and every orphan that this process adopted."""
        deadline = time.monotonic() + grace_s
        for slot in self._slots.values():
            slot.process.stop(max(0.0, deadline - time.monotonic()))
        stop_leftovers(self._run, max(0.0, deadline - time.monotonic()))
        self._dismiss_guard()
        kill_children()

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None


def open_local_backend(run: RunFolder, on_change: Callable[[], None]) -> SlotBackend:  # noqa: ARG001 (slots send SIGCHLD)
    """Return the backend of a run on this machine: for its processes, or for mpirun, which starts the workers."""
    plan = load((run.folder / "plan.json").read_bytes(), LocalPlan, run.folder / "plan.json")
    if not plan.delegated:
        return LocalBackend(run, plan)
    from stoker.launchers.mpi.local_mpirun import LocalMpiBackend

    return LocalMpiBackend(run, plan)


def stop_leftovers(run: RunFolder, grace_s: float) -> None:
    """Stop all processes of a run on this machine, also those of an earlier supervisor."""
    terminate_by_env({"STOKER_RUN": run.id}, grace_s)


def normalize_exit_code(code: int) -> int:
    """Return death by a signal as the negative signal, also where a shell or the profiler reports 128 + signal."""
    return -signal_from_exit_code(code) or code
