"""Check a job spec for settings that no Kubernetes cluster can run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from stoker.core.spec import run_checks
from stoker.core.units import format_duration
from stoker.errors import Fault
from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import get_topology, list_slots
from stoker.launchers.checks import check_via
from stoker.launchers.kubernetes.addresses import slot_hostname
from stoker.launchers.kubernetes.scripts import CODE_DIR

MAX_NAME_LENGTH = 63
MIN_TTL_S = 30


def check_kubernetes_settings(job: JobSpec) -> Iterator[Fault]:
    """Yield every setting that cannot work on Kubernetes."""
    return run_checks(
        job,
        _check_image,
        _check_name,
        _check_gpu_type,
        _check_workers,
        _check_observers,
        _check_paths,
        _check_ttl,
        partial(check_via, has_cluster_cache=True),
    )


def _check_image(job: JobSpec) -> Iterator[Fault]:
    if job.image is None:
        yield Fault("image", "required on Kubernetes; set it, for example image: ghcr.io/acme/trainer:v1")


def _check_gpu_type(job: JobSpec) -> Iterator[Fault]:
    groups = job.workers if isinstance(job.workers, tuple) else ()
    sections = {
        "resources": job.resources,
        **{f"workers[{n}].resources": group.resources for n, group in enumerate(groups)},
    }
    for key, resources in sections.items():
        if resources is not None and resources.gpu_type is not None and not resources.gpus:
            yield Fault(f"{key}.gpu", f"required with gpu_type {resources.gpu_type}")


def _check_workers(job: JobSpec) -> Iterator[Fault]:
    if job.workers == "all":
        yield Fault("workers", "`all` is not supported on Kubernetes, because clusters can scale; set a number")
    elif job.traits.has_standby_workers and not job.has_equal_workers:
        what = "an MPIJob has one pod template for all workers, so they cannot differ"
        yield Fault("workers", f"{what}; use equal workers, or topology: torchrun")


def _check_ttl(job: JobSpec) -> Iterator[Fault]:
    if job.kubernetes.ttl < MIN_TTL_S:
        what = f"must be >= {MIN_TTL_S}s to fetch logs of finished pods, got {format_duration(job.kubernetes.ttl)}"
        yield Fault("kubernetes.ttl", what)


def _check_name(job: JobSpec) -> Iterator[Fault]:
    names = [slot_hostname(job, slot.role, slot.index).partition(".")[0] for slot in list_slots(job)]
    longest = max(names, key=len)
    if len(longest) > MAX_NAME_LENGTH:
        yield Fault(
            "name", f"is too long: host name {longest} has {len(longest)} characters, at most {MAX_NAME_LENGTH} allowed"
        )


def _check_observers(job: JobSpec) -> Iterator[Fault]:
    observers = [role.name for role in get_topology(job).roles(job) if role.is_observer]
    if observers and job.checkpoint.claim is not None and job.checkpoint.access == "rwo":
        readers = " and ".join(observers)
        what = f"with rwo, only one node can mount the claim, but {readers} must read it too; use rwx or a bucket"
        yield Fault("checkpoint.access", what)


def _check_paths(job: JobSpec) -> Iterator[Fault]:
    folder = job.checkpoint.dir
    if folder is not None and "://" not in folder and not folder.startswith("/"):
        yield Fault("checkpoint.dir", f"{folder!r} must be an absolute path in the container, or a bucket URL")
    for key, path in (("data.train", job.data.train), ("data.val", job.data.val)):
        if path is not None and "://" not in path and not path.startswith("/"):
            yield Fault(key, f"{path!r} is a local path: use a URL, or an absolute path on a volume")
    for role, key in (("", "program.cwd"), *((role, f"roles.{role}.program.cwd") for role in job.roles)):
        cwd = job.program_of(role).cwd
        if cwd is not None and not cwd.startswith("/") and (not role or job.roles[role].program is not None):
            what = f"{cwd!r} must be an absolute path in the container; copied files are in {CODE_DIR}"
            yield Fault(key, what)
    cache_dir = job.data.cache.dir
    if cache_dir is not None and not cache_dir.startswith("/"):
        yield Fault("data.cache.dir", f"{cache_dir!r} must be an absolute path in the container")
