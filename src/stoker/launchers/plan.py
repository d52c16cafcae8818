"""What the local launcher starts, as a value: what `job plan` prints, and what a run folder keeps."""

from __future__ import annotations

import msgspec

from stoker.core.spec import load
from stoker.jobs.runs import Run
from stoker.jobs.topology import Command, Slot


class LocalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The command of every slot, and what the user should know of them."""

    slots: dict[str, Command]
    notes: tuple[str, ...] = ()
    hosts: dict[str, str] = {}
    """The host of each slot, where that is not this machine: then the processes here only stand for those there."""

    @property
    def commands(self) -> dict[Slot, Command]:
        """By slot."""
        return {Slot.parse(name): command for name, command in self.slots.items()}


def read_plan(run: Run) -> LocalPlan:
    """Read which processes a run has here: those of its plan, or those that stand for them."""
    path = run.folder / "processes.json"
    path = path if path.exists() else run.folder / "plan.json"
    return load(path.read_bytes(), LocalPlan, path)
