"""Places of a drill on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stoker.core.processes import child_pids
from stoker.jobs.run_folder import RunFolder
from stoker.remote.guard import GUARD_NAME
from tests.support.drill.faults import Fault, command_name, find_modules, find_programs, find_torchrun
from tests.support.drill.place import Place
from tests.support.ssh_runs import supervisors


def find_guards(run: RunFolder) -> list[int]:
    """The guard, which stops the slots if their supervisor is killed."""
    children = [pid for supervisor in supervisors(run) for pid in child_pids(supervisor)]
    return [pid for pid in children if command_name(pid) == GUARD_NAME]


class ThisMachinePlace(Place):
    """Processes of this machine. A guard that is killed is replaced."""

    def common_faults(self) -> list[Fault]:
        return [*super().common_faults(), Fault("guard", self.one_of(find_guards), 2, ends_attempt=False)]


class LocalPlace(ThisMachinePlace):
    """Processes of this machine under one torchrun."""

    def job_keys(self, folder: Path) -> dict[str, Any]:
        return {"workers": 1, "processes_per_worker": 2}

    def faults(self) -> Sequence[Fault]:
        return [*self.common_faults(), Fault("torchrun", self.one_of(find_torchrun), 3)]


class MpiPlace(ThisMachinePlace):
    """Processes of this machine under mpirun, whose pipes are lost with it."""

    def job_keys(self, folder: Path) -> dict[str, Any]:
        return {"topology": "mpi"}

    def faults(self) -> Sequence[Fault]:
        mpirun = Fault("mpirun", self.one_of(partial(find_programs, name="mpirun")), 3, cuts_logs=True)
        wrapper = Fault("rank wrapper", self.one_of(partial(find_modules, name="mpi_rank")), 2, cuts_logs=True)
        slot = Fault("mpirun slot", self.one_of(partial(find_modules, name="mpirun_slot")), 2, cuts_logs=True)
        return [*self.common_faults(), mpirun, wrapper, slot]
