"""The launcher protocol, the traits of a launcher, and the registry of launchers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from stoker.core.registry import Registry
from stoker.core.spec import run_checks
from stoker.errors import Fault, SpecError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobStatus
from stoker.jobs.topology import Slot
from stoker.jobs.topology_traits import TopologyTraits, list_traits

Rendered = TypeVar("Rendered")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherTraits:
    """What a launcher supports, as data."""

    name: str
    supports_standby_workers: bool = False
    """Whether one slot can start processes in others, as mpirun does."""
    supports_address_per_slot: bool = False
    """Whether every slot can have a role and an address of its own, as TensorFlow needs."""
    supports_elastic: bool = False
    supports_unequal_workers: bool = False
    """Whether workers can differ in their resources and number of ranks."""
    supports_claims: bool = False
    """Whether PersistentVolumeClaims can be mounted."""
    shares_files: bool = False
    """Whether slots read and write the run folder over a file system that their machines share with this one."""
    has_targets: bool = False
    """Whether `--on NAME://TARGET` selects one of several clusters."""
    hosts_key: str = ""
    """The key of the job file that `--hosts` sets; empty if the launcher takes no hosts."""
    lists_runs: bool = False
    """Whether the target itself knows its runs: the launcher has the methods `runs` and `adopt`."""
    follows_runs: bool = False
    """Whether runs that others started can be followed: the launcher has the method `open_runs`."""
    prints_stacks: bool = False
    """Whether its supervisor prints the stacks of ranks on request."""
    has_rbac: bool = False
    """Whether users need permissions on the target: the launcher has the method `render_rbac`."""

    def supports(self, topology: TopologyTraits) -> bool:
        """Return whether a topology can run here."""
        return (self.supports_standby_workers or not topology.has_standby_workers) and (
            self.supports_address_per_slot or not topology.has_address_per_slot
        )


RUN_PLACEHOLDER = "<run>"
"""The ID of the run in the notes of a plan, which has none yet."""


class SlotLogLine(NamedTuple):
    """One line of the log of a slot, and when it was written (0 if that is not known)."""

    slot: Slot
    attempt: int
    text: str
    time: float = 0.0
    is_partial: bool = False
    """Whether it is the current state of a progress bar, whose line is not finished; only when logs are followed."""

    def __str__(self) -> str:
        return f"[{self.slot}] {self.text}"


class Launcher(Protocol[Rendered]):
    """Launcher of jobs on one kind of target: this machine, SSH hosts, Ray, Kubernetes."""

    traits: ClassVar[LauncherTraits]

    def resolve_paths(self, job: JobSpec) -> JobSpec:
        """Return the job with absolute paths, so that it does not depend on the current directory."""
        ...

    def check(self, job: JobSpec) -> Iterable[Fault]:
        """Yield what is wrong with a job here, without contacting the target. The job may be partial."""
        ...

    def render(self, job: JobSpec) -> Rendered:
        """Return what would be started; raise SpecError for a job that cannot run here. No side effects."""
        ...

    def start(self, rendered: Rendered, run: RunFolder, *, detach: bool = False) -> str:
        """Start a job and return its handle, a URL that identifies the run.

        With `detach`, slots on other machines keep running when this machine is gone, if the launcher supports it.
        """
        ...

    def restart(self, run: RunFolder, *, detach: bool = False) -> None:
        """Restart a finished run in its own run folder, and so from its own checkpoints."""
        ...

    def status(self, handle: str) -> JobStatus:
        """Return the status of a run."""
        ...

    def logs(self, handle: str, slot: Slot | None, *, follow: bool, tail: int | None = None) -> Iterator[SlotLogLine]:
        """Yield the log lines of one slot or all, or the last `tail` of them; with `follow`, until the job finishes."""
        ...

    def stop(self, handle: str) -> None:
        """Stop a run and remove what it started; do nothing if it has finished."""
        ...


LAUNCHERS: Registry[type[Launcher[object]]] = Registry(
    "launcher",
    {
        "k8s": "stoker.launchers.kubernetes.launcher:KubernetesLauncher",
        "local": "stoker.launchers.local:LocalLauncher",
        "ray": "stoker.launchers.ray.launcher:RayLauncher",
        "slurm": "stoker.launchers.slurm.launcher:SlurmLauncher",
        "ssh": "stoker.launchers.ssh.launcher:SshLauncher",
    },
)


def check_traits(job: JobSpec, traits: LauncherTraits) -> Iterator[Fault]:
    """Yield everything in a job that a launcher does not support."""

    def check_topology(job: JobSpec) -> Iterator[Fault]:
        if not traits.supports(job.traits):
            supported = ", ".join(name for name, topology in list_traits().items() if traits.supports(topology))
            yield Fault("topology", f"{job.topology!r} is not supported on {traits.name} (supported: {supported})")

    def check_elastic(job: JobSpec) -> Iterator[Fault]:
        if job.is_elastic and not traits.supports_elastic:
            yield Fault("workers", f"elastic jobs are not supported on {traits.name}; set a fixed number of workers")

    def check_equal_workers(job: JobSpec) -> Iterator[Fault]:
        if not job.has_equal_workers and not traits.supports_unequal_workers:
            what = f"workers that differ are not supported on {traits.name}"
            yield Fault("workers", f"{what}; set a number of workers and their resources")

    def check_claims(job: JobSpec) -> Iterator[Fault]:
        for index, _ in enumerate(() if traits.supports_claims else job.volumes):
            what = f"PersistentVolumeClaims are not supported on {traits.name}; remove the volume"
            yield Fault(f"volumes[{index}].claim", what)

    return run_checks(job, check_topology, check_elastic, check_equal_workers, check_claims)


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise SpecError if there are faults."""
    if found := list(faults):
        raise SpecError(found)
