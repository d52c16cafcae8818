"""The plan of the Slurm launcher: the batch script."""

from __future__ import annotations

import msgspec

from stoker.core.spec import load
from stoker.jobs.run_folder import RunFolder


class SlurmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The batch script of a job, where it is submitted from, and notes for the user."""

    script: str
    workdir: str
    notes: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether the slots run on other machines."""
        return True

    def to_text(self) -> str:
        """Return the script, as `sbatch SCRIPT RUN_FOLDER` takes it."""
        return self.script


def read_slurm_plan(run: RunFolder) -> SlurmPlan:
    """Read the plan that a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), SlurmPlan, path)
