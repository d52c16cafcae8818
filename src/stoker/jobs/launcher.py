"""Where jobs run: what a launcher does, what it can, and which there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from stoker.core.registry import Registry
from stoker.errors import Fault
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import Job
from stoker.jobs.status import JobStatus
from stoker.jobs.topology import Slot

Rendered = TypeVar("Rendered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a launcher can do, as data."""

    name: str
    topologies: frozenset[str]
    elastic: bool = False
    claims: bool = False
    """Whether there are claims to mount."""
    places: bool = False
    """Whether there are several, one of which `--on name://place` names."""


class LogLine(NamedTuple):
    """One line of a slot's log, as it came."""

    slot: Slot
    attempt: int
    text: str


class Launcher(Protocol[Rendered]):
    """Carries the commands of a job to where it runs."""

    traits: ClassVar[Traits]

    def anchored(self, job: Job) -> Job:
        """Give the job as it will be kept: with paths that mean the same wherever later commands are given."""
        ...

    def render(self, job: Job) -> Rendered:
        """Give what would be started, as a value; refuse a job that cannot run here. No side effect."""
        ...

    def start(self, rendered: Rendered, run: Run, *, detach: bool = False) -> str:
        """Start it; give the handle, a URL by which the job is found again.

        With `detach`, slots on other machines go on when this one is gone, where the launcher can do that.
        """
        ...

    def restart(self, run: Run, *, detach: bool = False) -> None:
        """Start a run again that is over, in its own folder and so with its own checkpoints."""
        ...

    def status(self, handle: str) -> JobStatus:
        """Tell how it is doing."""
        ...

    def logs(self, handle: str, slot: Slot | None, *, follow: bool) -> Iterator[LogLine]:
        """Give the lines of one slot or all; with `follow`, until the job is over."""
        ...

    def stop(self, handle: str) -> None:
        """End it, and leave nothing behind; nothing happens when it is over."""
        ...


LAUNCHERS: Registry[type[Launcher[object]]] = Registry(
    "launcher",
    {
        "k8s": "stoker.launchers.kubernetes.launcher:KubernetesLauncher",
        "local": "stoker.launchers.local:LocalLauncher",
        "ray": "stoker.launchers.ray.launcher:RayLauncher",
        "ssh": "stoker.launchers.ssh.launcher:SshLauncher",
    },
)


def check(job: Job, traits: Traits) -> list[Fault]:
    """List every way in which a job asks for more than a launcher can do."""
    faults = []
    if job.topology not in traits.topologies:
        can = ", ".join(sorted(traits.topologies))
        faults.append(Fault("topology", f"{job.topology!r} does not run on {traits.name} (it can: {can})"))
    if job.is_elastic and not traits.elastic:
        faults.append(Fault("workers", f"{traits.name} cannot change the number of workers: give one number"))
    if not traits.claims:
        faults += [
            Fault(f"volumes[{index}].claim", f"there are no claims on {traits.name}: leave the volume away")
            for index, _ in enumerate(job.volumes)
        ]
    return faults
