"""Plan of the Ray launcher: what `job plan` prints and a run folder keeps."""

from __future__ import annotations

import msgspec

from stoker.core.spec import load
from stoker.jobs.run_folder import RunFolder
from stoker.launchers.plan import LocalPlan


class RayPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, with placeholders such as `@ray:port@` for what is known only after placement."""

    address: str | None
    """URL of the cluster's dashboard; None: a Ray of the run's own, on this machine."""
    bundle: dict[str, float]
    """Resources that Ray reserves for each slot."""
    bundles: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """The same of slots that differ, by name."""
    strategy: str
    source: str
    exclude: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0
    lost_after_s: float = 30.0

    def bundle_of(self, slot: str) -> dict[str, float]:
        """Return the resources that Ray reserves for a slot."""
        return self.bundles.get(slot, self.bundle)


def read_ray_plan(run: RunFolder) -> RayPlan:
    """Read the plan of a run."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), RayPlan, path)
