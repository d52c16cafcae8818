"""Plan of the Ray launcher: what `job plan` prints and a run folder keeps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import msgspec

from stoker.core.spec import load
from stoker.core.units import format_bytes
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

    @property
    def gang(self) -> str:
        """All bundles as text: `2 × (8 CPU) + 1 × (1 CPU)`."""
        return " + ".join(f"{count} × ({_describe_bundle(bundle)})" for bundle, count in self.count_bundles())

    def count_bundles(self) -> list[tuple[dict[str, float], int]]:
        """Return each different bundle, and how many slots have it."""
        return [(bundle, len(list(same))) for bundle, same in groupby(map(self.bundle_of, self.slots))]

    def bundle_of(self, slot: str) -> dict[str, float]:
        """Return the resources that Ray reserves for a slot."""
        return self.bundles.get(slot, self.bundle)


def _describe_bundle(bundle: Mapping[str, float]) -> str:
    """Return the resources of a bundle as text, memory last."""
    amounts = [f"{amount:g} {name}" for name, amount in bundle.items() if name != "memory"]
    return ", ".join([*amounts, *([f"{format_bytes(int(bundle['memory']))} memory"] if "memory" in bundle else [])])


def read_ray_plan(run: RunFolder) -> RayPlan:
    """Read the plan of a run."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), RayPlan, path)
