"""DNS names and ports of the slots of a job in a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.jobs.spec import DEFAULT_PORT, JobSpec, RoleSpec
from stoker.jobs.topologies.tensorflow import TENSORBOARD_PORT
from stoker.jobs.topology import AddressBook, Role, Slot
from stoker.launchers.kubernetes.mpijob import OUTPUT_FIFO, PASSED_ENV, SECRETS_DIR, build_ssh_options
from stoker.launchers.kubernetes.scripts import SCRIPTS_DIR
from stoker.launchers.shell_words import ANY_INDEX

PROFILER, MPI_RANK = "profiler.py", "mpi_rank.py"


def slot_hostname(job: JobSpec, role: str, index: int) -> str:
    """Return the DNS name of a slot within its namespace."""
    if job.traits.has_address_per_slot:
        return f"{job.name}-{role}-{index}"
    if job.traits.has_standby_workers:
        return f"{job.name}-worker-{index}.{job.name}" if role == "worker" else f"{job.name}-launcher"
    part = next(part for part in reversed(list_worker_jobs(job)) if index >= part.first)
    return f"{part.name}-{index - part.first}.{job.name}"


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """A Kubernetes Job for equal workers with consecutive indexes."""

    name: str
    first: int
    count: int
    script: str
    """The script of its pods, without `.sh`."""


def list_worker_jobs(job: JobSpec) -> list[WorkerJob]:
    """List the Jobs for the workers: one for each group of equal workers, and one for worker 0 with a claim of its own.

    The pods of a Job are equal, and so are all its mounts.
    """
    groups, is_split = job.worker_groups, has_separate_chief(job)
    parts = [WorkerJob(f"{job.name}-chief", 0, 1, "worker")] if is_split else []
    first = 0
    for number, group in enumerate(groups):
        suffix = f"-group-{number}" if len(groups) > 1 else "-rest" if is_split else ""
        script = f"worker-{number}" if number else "worker"
        skipped = 1 if is_split and not number else 0
        if group.count > skipped:
            parts.append(WorkerJob(f"{job.name}{suffix}", first + skipped, group.count - skipped, script))
        first += group.count
    return parts


def has_separate_chief(job: JobSpec) -> bool:
    """Whether worker 0 has a Job of its own, because only one node can mount the checkpoint claim."""
    checkpoint = job.checkpoint
    return (
        job.traits.has_rendezvous
        and checkpoint.claim is not None
        and checkpoint.access == "rwo"
        and not job.is_elastic
        and job.max_workers > 1
    )


def get_role_port(job: JobSpec, role: str) -> int:
    """Return the port that the slots of a role listen on."""
    port = job.roles.get(role, RoleSpec()).port
    return port or (TENSORBOARD_PORT if role == "tensorboard" else job.port or DEFAULT_PORT)


def build_address_book(job: JobSpec, roles: Sequence[Role]) -> AddressBook:
    """Build the address book of all slots, and of the placeholder index that stands for any slot of a role."""
    slots = [Slot(role.name, index) for role in roles for index in (*range(role.count), ANY_INDEX)]
    return AddressBook(
        hosts={slot: slot_hostname(job, slot.role, slot.index) for slot in slots},
        port=job.port or DEFAULT_PORT,
        profiler=("python3", "-I", "-S", f"{SCRIPTS_DIR}/{PROFILER}"),
        mpi_rank=("python3", "-I", "-S", f"{SCRIPTS_DIR}/{MPI_RANK}"),
        ssh_options=build_ssh_options(job),
        forward_env=PASSED_ENV,
        output_file=OUTPUT_FIFO,
        secrets_dir=SECRETS_DIR,
    )
