"""Process group of one attempt: start all slots of this machine together, poll them, stop them together."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from stoker.core.processes import Process, find_processes_by_env, start, terminate_by_env, wait_until
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import RESERVED_ENV
from stoker.jobs.status import signal_from_exit_code
from stoker.jobs.topology import Command, Slot, list_slots
from stoker.telemetry.log_times import LogTimesSampler

LEFTOVER_GRACE_S = 5.0
REMOTE_SLOT_ENV = {"STOKER_STANDS_IN": "1"}
"""Environment that identifies the local process of a remote slot, which has no processes of the slot below it."""


class ProcessGroup:
    """The processes of one attempt; each writes its own log, so that no output is lost with the supervisor."""

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        commands: Mapping[Slot, Command],
        *,
        final_grace_s: float = 0.0,
        reattach: bool = False,
    ) -> None:
        """Start all slots.

        `final_grace_s` is how long the local processes of remote slots have to see those killed. With `reattach` they
        connect to slots that are running already.
        """
        self._final_grace_s = final_grace_s
        self._run, self._attempt, self._commands = run, attempt, commands
        self._processes: dict[Slot, Process] = {}
        logs = {run.log_path(slot, attempt) for slot in (*commands, *list_slots(run.job))}
        self.log_times = LogTimesSampler(logs)
        """Writer of the times of log lines; `sample` is called while the slots run."""
        self._env = {
            "STOKER_RUN": run.id,
            "STOKER_ATTEMPT": str(attempt),
            "STOKER_CHECKPOINT_DIR": str(run.folder / "checkpoints"),
            **({"STOKER_CONTINUES": "1"} if reattach else {}),
        }
        try:
            for slot in commands:
                self._processes[slot] = self._start(slot)
        except BaseException:
            self.stop(0)
            raise

    def _start(self, slot: Slot) -> Process:
        command = self._commands[slot]
        inherited = {name: value for name, value in os.environ.items() if not RESERVED_ENV.fullmatch(name)}
        env = {**inherited, **self._env, **command.env}
        with open(self._run.log_path(slot, self._attempt), "ab", buffering=0) as log:
            return start(command.argv, env=env, cwd=command.cwd, stdout=log, stderr=log, terminate_with_parent=True)

    @property
    def pids(self) -> dict[Slot, int]:
        """The process id of each slot."""
        return {slot: process.pid for slot, process in self._processes.items()}

    def exit_codes(self) -> dict[Slot, int | None]:
        """Return the exit code of each slot (negative: the signal that killed it), None while it runs."""
        return {slot: _normalize_exit_code(process.poll()) for slot, process in self._processes.items()}

    def is_alive(self, pid: int) -> bool:
        """Whether a process id belongs to a live process of this run."""
        return pid in find_processes_by_env({"STOKER_RUN": self._run.id})

    def restart_slot(self, slot: Slot) -> None:
        """Start a lost slot again while the others keep running; its leftover processes are stopped first."""
        self._processes[slot].stop(0)
        terminate_by_env({"STOKER_RUN": self._run.id, "STOKER_SLOT": str(slot)}, LEFTOVER_GRACE_S)
        self._env.pop("STOKER_CONTINUES", None)
        self._processes[slot] = self._start(slot)

    def wait(self, timeout_s: float) -> None:
        """Wait until all slots have exited by themselves, for at most `timeout_s`."""
        wait_until(self._have_exited, timeout_s)

    def _have_exited(self) -> bool:
        self.log_times.sample()
        return None not in self.exit_codes().values()

    def stop(self, grace_s: float) -> None:
        """Stop every slot: SIGTERM to each and to its leftover processes, SIGKILL after `grace_s` in all."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            process.terminate()
        self.wait(grace_s)
        if self._final_grace_s:  # the local process of a remote slot kills the slot on its second SIGTERM
            for process in self._processes.values():
                process.terminate()
            self.wait(self._final_grace_s)
        for process in self._processes.values():
            process.stop(max(0.0, deadline - time.monotonic()))
        stop_leftovers(self._run, max(0.0, deadline - time.monotonic()))
        self.log_times.sample()


def stop_leftovers(run: RunFolder, grace_s: float, *, only_remote_slots: bool = False) -> None:
    """Stop all processes of a run, also those of an earlier supervisor; or only the local ones of remote slots."""
    terminate_by_env({"STOKER_RUN": run.id, **(REMOTE_SLOT_ENV if only_remote_slots else {})}, grace_s)


def _normalize_exit_code(code: int | None) -> int | None:
    """Return death by a signal as the negative signal, also where a shell or the profiler reports 128 + signal."""
    return code if code is None or not signal_from_exit_code(code) else -signal_from_exit_code(code)
