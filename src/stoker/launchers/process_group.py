"""All slots of one attempt as processes of this machine: started together, ended together."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from stoker.core.processes import Process, end_marked, marked, start, until
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import RESERVED
from stoker.jobs.status import signal_of
from stoker.jobs.topology import Command, Slot

LEFTOVER_GRACE_S = 5.0
STANDS_IN = {"STOKER_STANDS_IN": "1"}
"""The mark of a process that stands for a slot elsewhere, and has no slot's processes below it."""


class Gang:
    """The slots of one attempt; each writes its log itself, so that none is lost with whoever watches."""

    def __init__(
        self,
        run: Run,
        attempt: int,
        commands: Mapping[Slot, Command],
        *,
        last_s: float = 0.0,
        continues: bool = False,
    ) -> None:
        """Start them; `last_s` is what those have that stand for others elsewhere, to see them end.

        With `continues` they take up what goes on there already.
        """
        self._last_s = last_s
        self._run, self._attempt, self._commands = run, attempt, commands
        self._processes: dict[Slot, Process] = {}
        self._own = {
            "STOKER_RUN": run.id,
            "STOKER_ATTEMPT": str(attempt),
            "STOKER_CHECKPOINT_DIR": str(run.folder / "checkpoints"),
            **({"STOKER_CONTINUES": "1"} if continues else {}),
        }
        try:
            for slot in commands:
                self._processes[slot] = self._start(slot)
        except BaseException:
            self.end(0)
            raise

    def _start(self, slot: Slot) -> Process:
        command = self._commands[slot]
        outer = {name: value for name, value in os.environ.items() if not RESERVED.fullmatch(name)}
        env = {**outer, **self._own, **command.env}
        with open(self._run.log(slot, self._attempt), "ab", buffering=0) as log:
            return start(command.argv, env=env, cwd=command.cwd, stdout=log, stderr=log, dies_with_us=True)

    @property
    def pids(self) -> dict[Slot, int]:
        """The process of each slot."""
        return {slot: process.pid for slot, process in self._processes.items()}

    def codes(self) -> dict[Slot, int | None]:
        """Tell the exit code of each slot (negative: the signal that ended it), None while it runs."""
        return {slot: _plain(process.poll()) for slot, process in self._processes.items()}

    def is_alive(self, pid: int) -> bool:
        """Whether a process is one of this run's, and lives."""
        return pid in marked({"STOKER_RUN": self._run.id})

    def replace(self, slot: Slot) -> None:
        """Start a lost slot again, while the others go on; first what it left is ended."""
        self._processes[slot].end(0)
        end_marked({"STOKER_RUN": self._run.id, "STOKER_SLOT": str(slot)}, LEFTOVER_GRACE_S)
        self._own.pop("STOKER_CONTINUES", None)
        self._processes[slot] = self._start(slot)

    def leave(self, grace_s: float) -> None:
        """Let those that still run come to their end by themselves, for so long."""
        until(lambda: None not in self.codes().values(), grace_s)

    def end(self, grace_s: float) -> None:
        """End every slot: TERM to each, and then to what each left; after `grace_s` in all, KILL."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            process.terminate()
        self.leave(grace_s)
        if self._last_s:  # to those that stand for others, the second time means at once
            for process in self._processes.values():
                process.terminate()
            self.leave(self._last_s)
        for process in self._processes.values():
            process.end(max(0.0, deadline - time.monotonic()))
        end_left(self._run, max(0.0, deadline - time.monotonic()))


def end_left(run: Run, grace_s: float, *, standing_in: bool = False) -> None:
    """End whatever still runs of a run, also what an earlier watcher left; or only those that stand for others."""
    end_marked({"STOKER_RUN": run.id, **(STANDS_IN if standing_in else {})}, grace_s)


def _plain(code: int | None) -> int | None:
    """Write every death by a signal as the negative signal, also where a shell or the profiler tells it as 128 more."""
    return code if code is None or not signal_of(code) else -signal_of(code)
