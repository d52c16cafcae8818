"""Checks of a job against this machine that several launchers share: GPUs, secrets, GPU requests of roles."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from stoker.core.units import pluralize
from stoker.errors import Fault
from stoker.jobs.spec import JobSpec, ProgramSpec
from stoker.jobs.topology import list_slots
from stoker.launchers.module_search import explain_missing_module
from stoker.storage.cache_url import ORIGIN_SCHEMES


def visible_gpus() -> list[str]:
    """List the GPUs that programs may use, from CUDA_VISIBLE_DEVICES or the driver's device files."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
    return sorted((path.name[6:] for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()), key=int)


def check_gpus(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault if this machine has too few GPUs for the workers of a job."""
    available, needed = len(visible_gpus()), sum_gpus(job, range(job.max_workers))
    if needed > available:
        what = f"the job needs {pluralize(needed, 'GPU')}, but this machine has {available or 'none'}"
        if isinstance(job.workers, tuple):
            yield Fault("workers", f"{what} (use fewer workers, or fewer GPUs)")
        else:
            yield Fault("resources.gpu", f"{what} (to run on CPUs, pass --set resources.gpu=0)")


def sum_gpus(job: JobSpec, workers: Iterable[int]) -> int:
    """Return how many GPUs some workers of a job need."""
    return sum(job.resources_of(worker).gpus for worker in workers)


def check_gpu_roles(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault for each role other than the workers that requests GPUs where slots share a machine."""
    local_roles = {slot.role for slot in list_slots(job)}
    for name, role in job.roles.items():
        if role.resources.gpus and name in local_roles:
            yield Fault(f"roles.{name}.resources.gpu", "only workers can have GPUs here; remove this key")


def check_secret_env(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault for each secret variable that is not set in this environment."""
    for name in job.secret_env:
        if name not in os.environ:
            yield Fault(
                f"secret_env.{name}",
                f"environment variable {name} is not set; set it, because its value is passed to the program",
            )


def check_secret_files(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault for each secret file that does not exist on this machine."""
    for path in job.secret_files:
        if not Path(path).exists():
            yield Fault(f"secret_files.{path}", "file not found; secret files must already exist on this machine")


def find_missing_path(key: str, program: ProgramSpec) -> Fault | None:
    """Return the fault of a program whose working directory or script does not exist on this machine."""
    folder = Path.cwd() / (program.cwd or "")
    if not folder.is_dir():
        return Fault(f"{key}.cwd", f"no such directory: {folder}")
    if program.script is not None and not Path(program.script).is_file():
        return Fault(f"{key}.script", f"no such file or directory: {Path.cwd() / program.script}")
    return None


def check_module(key: str, module: str | None, folder: Path, env: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault if the Python that runs stoker would not find a module in this working directory."""
    if module is None:
        return
    search_path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    paths = [str(folder / path) for path in search_path.split(os.pathsep) if path]
    if reason := explain_missing_module(module, [str(folder), *paths]):
        yield Fault(f"{key}.module", reason)


def check_via(job: JobSpec, *, has_cluster_cache: bool = False) -> Iterator[Fault]:
    """Yield a fault for each dataset that the caching proxy in `data.via` cannot fetch."""
    via = job.data.via
    if via is None or (via == "cluster" and not has_cluster_cache):  # ignored there, as a note says
        return
    for key in ("train", "val"):
        url = getattr(job.data, key)
        if url is None:
            continue
        if not url.startswith(ORIGIN_SCHEMES):
            schemes = ", ".join(ORIGIN_SCHEMES)
            yield Fault(
                f"data.{key}",
                f"{url!r} cannot be read through data.via: a cache can fetch only from {schemes} URLs; "
                "use a URL, or remove data.via (--set data.via=)",
            )
        elif url.startswith(f"{via.rstrip('/')}/"):
            yield Fault(f"data.{key}", f"{url!r} is a URL of the cache in data.via; use the URL of its origin")
