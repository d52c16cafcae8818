"""Plan of the Ray launcher: what `job plan` prints and a run folder keeps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import msgspec

from stoker.core.spec import load
from stoker.core.units import format_bytes
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.spec.sections import ResourcesSpec
from stoker.jobs.topology import Slot
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ssh.plan import SshPlan


class RayPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, with placeholders such as `@ray:port@` for what is known only after placement."""

    address: str | None
    """URL of the cluster's dashboard; None: a Ray of the run's own, on this machine or on `nodes`."""
    nodes: SshPlan | None = None
    """The Ray nodes that are started over ssh for the run."""
    node_addresses: dict[str, str] = msgspec.field(default_factory=dict)
    """The address of each of them, by host."""
    keep: bool = False
    """Whether these nodes are left running after the run."""
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
    def runs_here(self) -> bool:
        """Whether Ray runs on this machine for the duration of the run."""
        return self.address is None and self.nodes is None

    @property
    def gang(self) -> str:
        """All bundles as text: `2 × (8 CPU) + 1 × (1 CPU)`."""
        return " + ".join(f"{count} × ({_describe_bundle(bundle)})" for bundle, count in self.count_bundles())

    def count_bundles(self) -> list[tuple[dict[str, float], int]]:
        """Return each different bundle, and how many slots have it."""
        return [(bundle, len(list(same))) for bundle, same in groupby(self.list_bundles())]

    def bundle_of(self, slot: str) -> dict[str, float]:
        """Return the resources that Ray reserves for a slot."""
        return self.bundles.get(slot, self.bundle)

    def list_bundles(self) -> list[dict[str, float]]:
        """Return the bundle of every slot, in their order."""
        return [self.bundle_of(slot) for slot in self.slots]

    def to_text(self) -> str:
        """Return the commands as shell text: first those that start Ray on the hosts, if any."""
        return "\n".join([*([self.nodes.to_text()] if self.nodes else []), super().to_text()])


def slot_bundle(job: JobSpec, slot: Slot) -> dict[str, float]:
    """Return the resources that Ray reserves for a slot: those of a worker, or of another role."""
    if slot.role == "worker":
        return worker_bundle(job, slot.index)
    role = job.roles.get(slot.role)
    return _build_bundle(role.resources if role is not None else ResourcesSpec(), 1)


def worker_bundle(job: JobSpec, worker: int) -> dict[str, float]:
    """Return the resources that Ray reserves for a worker; without `resources.cpu`, one CPU per rank."""
    return _build_bundle(job.resources_of(worker), job.ranks_of(worker))


def _build_bundle(resources: ResourcesSpec, ranks: int) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": resources.cpu or float(ranks)}
    if resources.gpus:
        bundle["GPU"] = resources.gpus
    if resources.memory:
        bundle["memory"] = float(resources.memory)
    if resources.gpu_type:
        bundle[f"accelerator_type:{resources.gpu_type}"] = 0.001
    return bundle


def _describe_bundle(bundle: Mapping[str, float]) -> str:
    """Return the resources of a bundle as text, memory last."""
    amounts = [f"{amount:g} {name}" for name, amount in bundle.items() if name != "memory"]
    return ", ".join([*amounts, *([f"{format_bytes(int(bundle['memory']))} memory"] if "memory" in bundle else [])])


def read_ray_plan(run: RunFolder) -> RayPlan:
    """Read the plan of a run."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), RayPlan, path)
