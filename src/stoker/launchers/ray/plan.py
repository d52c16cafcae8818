"""What the Ray launcher starts, as a value."""

from __future__ import annotations

from stoker.core.spec import load
from stoker.jobs.run_folder import Run
from stoker.launchers.plan import LocalPlan


class RayPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, with words like `@ray:port@` for what is known only once it has its place."""

    address: str | None
    """Of the cluster's dashboard; None: a cluster of the run's own, on this machine."""
    bundle: dict[str, float]
    """What Ray reserves for each slot."""
    strategy: str
    source: str
    exclude: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0
    lost_after_s: float = 30.0


def read_ray_plan(run: Run) -> RayPlan:
    """Read what a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), RayPlan, path)
