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

    @property
    def commands(self) -> dict[Slot, Command]:
        """By slot."""
        return {Slot.parse(name): command for name, command in self.slots.items()}


def read_plan(run: Run) -> LocalPlan:
    """Read what a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), LocalPlan, path)
