"""Slots of an MPI job on this machine: mpirun is a process, and the workers are what it starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.mpi.mpirun_slot import SLOT_EXIT_MARK
from stoker.launchers.supervise.process_group import LocalBackend, LocalSlot, TaggedSlot
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotHandle
from stoker.remote.mpi_rank import OUTPUT_ENV
from stoker.telemetry.reader import find_marks, read_log

EXIT_TAIL_BYTES = 64 << 10
"""The exit mark is the last line of a worker's log."""


class MpiWorker(TaggedSlot):
    """A worker, whose ranks mpirun starts and stops; its exit code is in its log once mpirun has exited."""

    def __init__(self, run: RunFolder, slot: Slot, attempt: int, launcher: LocalSlot) -> None:
        super().__init__(run, slot)
        self._launcher, self._log = launcher, run.log_path(slot, attempt)
        self._exit: Exited | None = None

    def poll(self) -> Running | Exited:
        """Return the exit record that the ranks' exit marks amount to; without one, that of mpirun."""
        state = self._launcher.poll()
        if isinstance(state, Running):
            return Running()
        if self._exit is None:
            marks = find_marks(read_log(self._log, last=EXIT_TAIL_BYTES).events, SLOT_EXIT_MARK)
            self._exit = replace(state, code=int(marks[-1].fields["code"])) if marks else state
        return self._exit

    def terminate(self, *, force: bool = False) -> None:
        """Do nothing: mpirun stops its ranks when it is stopped."""


class LocalMpiBackend(LocalBackend):
    """Backend for mpirun, which runs inside a process that records the exit codes of the workers."""

    def start(self, attempt: int, *, reattach: bool = False) -> Mapping[Slot, SlotHandle]:  # noqa: ARG002
        """Start mpirun, and return handles of its process and of the workers."""
        plan = self._plan if self._keeps_port else self._plan.with_free_ports()
        wrapper = (sys.executable, "-P", "-m", "stoker.launchers.mpi.mpirun_slot", str(self._run.folder), "--")
        output = {OUTPUT_ENV: str(self._run.logs / f"{{slot}}.{attempt}.log")}
        commands = {
            slot: replace(command, argv=(*wrapper, *command.argv), env={**command.env, **output})
            for slot, command in plan.commands.items()
        }
        self._start_all(attempt, commands)
        (launcher,) = self._slots.values()
        workers = map(Slot.parse, plan.delegated)
        return {**self._slots, **{slot: MpiWorker(self._run, slot, attempt, launcher) for slot in workers}}
