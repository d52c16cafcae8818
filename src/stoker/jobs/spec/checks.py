"""Invalid combinations of job file keys: values that are valid alone and contradict each other.

One `check_…` function per section; each yields faults with key paths relative to that section. Checks that read
different keys are separate functions, because an invalid key stops the checks that read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.core.spec import describe_wrong_choice, run_checks
from stoker.core.units import check_min_size, format_duration, pluralize
from stoker.errors import Fault, InputError
from stoker.jobs.mpirun import parse_mpirun_flags
from stoker.jobs.spec.types import MAX_WORKERS_PER_HOST, RESERVED_ENV
from stoker.jobs.topology_traits import TOPOLOGIES, list_traits
from stoker.storage import STORES

if TYPE_CHECKING:
    from stoker.jobs.spec.launcher_sections import KubernetesSpec, MpiSpec, RaySpec, SlurmSpec, SshSpec
    from stoker.jobs.spec.sections import (
        CacheSpec,
        CheckpointSpec,
        DataSpec,
        ElasticSpec,
        JobSpec,
        ProfileSpec,
        ProgramSpec,
    )

MIN_LOST_AFTER_S = 5
MIN_SLURM_TIME_S = 60
"""Slurm counts time limits in minutes."""
_SBATCH_CONFLICTS = {
    **dict.fromkeys(("array", "wrap"), "a run is one Slurm job with one script"),
    **dict.fromkeys(("job-name", "output", "error", "open-mode", "signal", "requeue", "no-requeue"), "Stoker sets it"),
    **dict.fromkeys(("ntasks", "ntasks-per-node"), "set workers and slurm.nodes"),
    **dict.fromkeys(("cpus-per-task", "mem", "mem-per-cpu", "gres", "gpus", "gpus-per-task"), "set resources"),
    **{name: f"set slurm.{name}" for name in ("partition", "account", "qos", "time", "nodes", "constraint", "exclude")},
}
"""Options of sbatch that other keys of the job file set, and what to do instead."""


def check_path(key: str, path: str | None) -> Iterator[Fault]:
    """Reject `s3:/bucket`, which would be used as a directory, and `~`, which only a shell expands."""
    if path is None:
        return
    if scheme := re.match(r"(s3|gs|gcs|https?|file)(:/?(?!/)|//)", path):
        yield Fault(key, f"{path!r} is neither a path nor a URL; URLs start with {scheme[1]}://")
    if path.startswith(("~", "$")):
        yield Fault(key, f"{path!r} starts with {path[0]}, which is not expanded; use the full path")


def check_lost_after(lost_after: float) -> Iterator[Fault]:
    """Reject a timeout that a short network interruption would exceed."""
    if lost_after < MIN_LOST_AFTER_S:
        yield Fault("lost_after", f"must be >= {MIN_LOST_AFTER_S}s, got {format_duration(lost_after)}")


def check_program(program: ProgramSpec) -> Iterator[Fault]:
    """Require exactly one entry point, and one argument per list item."""
    return run_checks(
        program, _check_entry_point, _check_script, _check_cwd, _check_module, _check_command, _check_args
    )


def _check_entry_point(program: ProgramSpec) -> Iterator[Fault]:
    entry_points = [name for name in ("script", "module", "command") if getattr(program, name) is not None]
    if len(entry_points) != 1:
        current = f" ({' and '.join(entry_points)} are set)" if entry_points else ""
        yield Fault("", f"set exactly one of script, module and command{current}")


def _check_script(program: ProgramSpec) -> Iterator[Fault]:
    if (script := program.script) is None:
        return
    yield from check_path("script", script)
    file, *arguments = script.split() or [""]
    if arguments and Path(file).suffix == ".py":
        yield Fault("script", f"{script!r} contains arguments; move them to args")
    elif Path(script).suffix in (".sh", ".bash"):
        yield Fault("script", f"{script!r} is not a Python file; use command: [bash, {script}]")


def _check_cwd(program: ProgramSpec) -> Iterator[Fault]:
    return check_path("cwd", program.cwd)


def _check_module(program: ProgramSpec) -> Iterator[Fault]:
    if program.module is not None and program.module.endswith(".py"):
        yield Fault("module", f"{program.module!r} is a file; use script, or remove .py")


def _check_command(program: ProgramSpec) -> Iterator[Fault]:
    if program.command == ():
        yield Fault("command", "must not be empty")
    elif program.command is not None and len(program.command) == 1 and " " in program.command[0]:
        arguments = ", ".join(program.command[0].split())
        yield Fault(
            "command", f"{program.command[0]!r} contains spaces; list each argument as a separate item: [{arguments}]"
        )


def _check_args(program: ProgramSpec) -> Iterator[Fault]:
    for index, argument in enumerate(program.args):
        if match := re.fullmatch(r"(--?[A-Za-z][\w-]*) +(\S+)", argument):
            option, value = match.groups()
            yield Fault(f"args[{index}]", f"{argument!r} is two arguments; use [{option}, {value}] or {option}={value}")


def check_elastic(elastic: ElasticSpec) -> Iterator[Fault]:
    """Require min <= max."""
    if elastic.min > elastic.max:
        yield Fault("", f"min ({elastic.min}) must not exceed max ({elastic.max})")


def check_cache(cache: CacheSpec) -> Iterator[Fault]:
    """Require that a cache with a size has a local directory."""
    return run_checks(cache, lambda cache: check_min_size("size", cache.size), _check_cache_dir)


def _check_cache_dir(cache: CacheSpec) -> Iterator[Fault]:
    yield from check_path("dir", cache.dir)
    if cache.size is not None and cache.dir is None:
        yield Fault("dir", "missing: size requires a cache directory")
    if cache.dir is not None and "://" in cache.dir:
        yield Fault("dir", f"{cache.dir!r} is a URL; the cache must be a local directory")


def check_data(data: DataSpec) -> Iterator[Fault]:
    """Check the paths and URLs of the datasets."""
    for key in ("train", "val"):
        url = getattr(data, key)
        yield from check_path(key, url)
        scheme, separator, _ = (url or "").partition("://")
        if separator and "/" not in scheme and scheme.lower() not in STORES:
            schemes = ", ".join(f"{name}://" for name in STORES.names())
            yield Fault(key, f"{url!r} has an unsupported URL scheme; supported schemes: {schemes}")


def check_checkpoint(checkpoint: CheckpointSpec) -> Iterator[Fault]:
    """Require a writable destination, and a complete claim."""
    return run_checks(
        checkpoint,
        _check_checkpoint_dir,
        lambda checkpoint: check_min_size("size", checkpoint.size),
        _check_no_claim,
        _check_mount_path,
        _check_claim_size,
    )


def _check_checkpoint_dir(checkpoint: CheckpointSpec) -> Iterator[Fault]:
    yield from check_path("dir", checkpoint.dir)
    if checkpoint.dir is not None and "://" in checkpoint.dir and not checkpoint.dir.startswith(("s3://", "gs://")):
        yield Fault("dir", f"{checkpoint.dir!r} is not writable; use a directory, s3://… or gs://…")


def _check_no_claim(checkpoint: CheckpointSpec) -> Iterator[Fault]:
    for key in ("create", "size", "storage_class"):
        if checkpoint.claim is None and getattr(checkpoint, key):
            yield Fault(key, "requires checkpoint.claim, which is not set")


def _check_mount_path(checkpoint: CheckpointSpec) -> Iterator[Fault]:
    """Require an absolute directory for a claim."""
    if checkpoint.claim is None:
        return
    if checkpoint.dir is None:
        yield Fault("dir", "missing: set the mount path of the claim, for example /checkpoint")
    elif "://" in checkpoint.dir:
        scheme = checkpoint.dir.split("://")[0]
        yield Fault("claim", f"dir is a bucket ({scheme}://) and needs no claim; remove one of claim, dir")
    elif not checkpoint.dir.startswith("/"):
        yield Fault("dir", f"{checkpoint.dir!r} is the mount path of a claim and must be absolute")


def _check_claim_size(checkpoint: CheckpointSpec) -> Iterator[Fault]:
    if checkpoint.claim is None:
        return
    if checkpoint.create and checkpoint.size is None:
        yield Fault("size", "missing: create: true requires a size, for example 10Gi")
    for key in ("size", "storage_class"):
        if getattr(checkpoint, key) is not None and not checkpoint.create:
            yield Fault(key, "applies only with create: true; set it, or remove this key")


def check_profile(profile: ProfileSpec) -> Iterator[Fault]:
    """Limit the sampling rate."""
    if 0 < profile.every < 1:
        yield Fault("every", f"must be 0 (disabled) or >= 1s, got {format_duration(profile.every)}")


def check_kubernetes(kubernetes: KubernetesSpec) -> Iterator[Fault]:
    """Require a unit for `shm`, and a queue for `queue_priority`."""
    return run_checks(kubernetes, lambda kubernetes: check_min_size("shm", kubernetes.shm), _check_queue)


def _check_queue(kubernetes: KubernetesSpec) -> Iterator[Fault]:
    if kubernetes.queue_priority is not None and kubernetes.queue is None:
        yield Fault("queue_priority", "requires queue, which is not set; set it, or use priority_class instead")


def check_ssh(ssh: SshSpec) -> Iterator[Fault]:
    """Check paths on the hosts, worker counts after `host:` and the timeout."""
    return run_checks(ssh, _check_ssh_paths, check_host_counts, lambda ssh: check_lost_after(ssh.lost_after))


def _check_ssh_paths(ssh: SshSpec) -> Iterator[Fault]:
    for key in ("workdir", "python", "config"):
        yield from check_path(key, getattr(ssh, key))


def check_host_counts(section: SshSpec | RaySpec) -> Iterator[Fault]:
    """Yield a fault for each host with an invalid number of workers."""
    for index, host in enumerate(section.hosts):
        name, colon, count = host.rpartition(":")
        if not colon or ":" in name or host.startswith("@"):  # more than one colon: an IPv6 address
            continue
        if not re.fullmatch("[0-9]{1,9}", count) or not 1 <= int(count) <= MAX_WORKERS_PER_HOST:
            yield Fault(
                f"hosts[{index}]",
                f"{host!r}: in HOST:N, N is the number of workers and must be between 1 and {MAX_WORKERS_PER_HOST}; "
                "to set a port, use your SSH config",
            )


def check_ray(ray: RaySpec) -> Iterator[Fault]:
    """Check worker counts after `host:`, require hosts for `keep`, and check the timeout."""
    return run_checks(ray, check_host_counts, _check_keep, lambda ray: check_lost_after(ray.lost_after))


def _check_keep(ray: RaySpec) -> Iterator[Fault]:
    if ray.keep and not ray.hosts:
        yield Fault("keep", "requires ray.hosts, which is not set; set it, or pass --on ray --hosts a,b")


def check_slurm(slurm: SlurmSpec) -> Iterator[Fault]:
    """Require a time limit that Slurm can count, and reject sbatch options that other keys set."""
    return run_checks(slurm, _check_slurm_time, _check_sbatch_options)


def _check_slurm_time(slurm: SlurmSpec) -> Iterator[Fault]:
    if slurm.time is not None and slurm.time < MIN_SLURM_TIME_S:
        yield Fault("time", f"must be >= {MIN_SLURM_TIME_S}s, got {format_duration(slurm.time)}")


def _check_sbatch_options(slurm: SlurmSpec) -> Iterator[Fault]:
    for index, option in enumerate(slurm.options):
        name = option.removeprefix("--").partition("=")[0].partition(" ")[0]
        if conflict := _SBATCH_CONFLICTS.get(name):
            yield Fault(f"options[{index}]", f"--{name} is not allowed here: {conflict}")


def check_mpi(mpi: MpiSpec) -> Iterator[Fault]:
    """Reject mpirun flags that contradict other keys of the job file."""
    if mpi.args and not mpi.args[0].startswith("-"):
        yield Fault("args[0]", f"{mpi.args[0]!r} is not a flag; mpirun would run it as the program")
    for index, argument in enumerate(mpi.args):
        if argument in ("-mca", "--mca") and len(mpi.args) < index + 3:
            yield Fault(f"args[{index}]", f"{argument} needs a name and a value, for example [--mca, btl, 'self,tcp']")
    for flag in parse_mpirun_flags(mpi.args):
        if reason := flag.conflict:
            yield Fault(f"args[{flag.position}]", f"{flag.text} {reason}")


# --- Combinations across sections


def check_job(job: JobSpec) -> Iterator[Fault]:
    """Reject combinations of sections that no launcher can run."""
    if isinstance(job.tensorboard, str):
        yield from check_path("tensorboard", job.tensorboard)
    yield from run_checks(
        job,
        _check_topology,
        _check_workers,
        _check_equal_workers,
        _check_processes_per_worker,
        _check_command_topology,
        _check_roles,
        _check_claim_access,
        _check_mount_paths,
        _check_env,
        _check_topology_env,
        _check_secret_env,
    )


def _check_topology(job: JobSpec) -> Iterator[Fault]:
    """Reject an unknown topology; the other checks stop when they read its traits."""
    name = job.topology
    try:
        TOPOLOGIES.get(name)
    except InputError:
        yield Fault("topology", describe_wrong_choice(name, TOPOLOGIES.names()))


def _check_workers(job: JobSpec) -> Iterator[Fault]:
    limit = job.traits.max_workers
    if limit is not None and job.max_workers > limit:
        what = f"topology {job.topology} runs {pluralize(limit, 'worker')}, not {job.max_workers}"
        yield Fault("workers", f"{what}; use topology: torchrun")
    elif job.is_elastic and not job.traits.supports_elastic:
        elastic = " and ".join(name for name, traits in list_traits().items() if traits.supports_elastic)
        what = f"a range is supported only with topology {elastic}"
        yield Fault("workers", f"{what}; set a fixed number of workers for {job.topology}")


def _check_equal_workers(job: JobSpec) -> Iterator[Fault]:
    if not job.traits.runs_ranks and not job.has_equal_workers:
        unequal = " and ".join(name for name, traits in list_traits().items() if traits.runs_ranks)
        what = f"topology {job.topology} runs one process per worker and needs equal workers"
        yield Fault("workers", f"{what}; use equal resources, or a topology that runs one rank per GPU: {unequal}")


def _check_processes_per_worker(job: JobSpec) -> Iterator[Fault]:
    if job.traits.runs_ranks:
        return
    processes = {"processes_per_worker": job.processes_per_worker}
    for index, group in enumerate(job.workers if isinstance(job.workers, tuple) else ()):
        processes[f"workers[{index}].processes_per_worker"] = group.processes_per_worker or "auto"
    is_alone = job.traits.max_workers == 1
    reason = "runs one process" if is_alone else "runs one process per worker, with all its GPUs"
    for key, count in processes.items():
        if count not in ("auto", 1):
            yield Fault(key, f"topology {job.topology} {reason}; remove this key")


def _check_command_topology(job: JobSpec) -> Iterator[Fault]:
    if not job.traits.supports_commands and job.program.command is not None:
        what = f"not supported with topology {job.topology}"
        yield Fault("program.command", f"{what}; set program.script or program.module, or use topology: single")


def _check_roles(job: JobSpec) -> Iterator[Fault]:
    for name in job.roles:
        checks = (_check_role, _check_role_keys, _check_logdir)
        yield from run_checks(job, *(partial(check, name=name) for check in checks))


def _check_role(job: JobSpec, name: str) -> Iterator[Fault]:
    role = job.roles[name]
    if name in ("worker", "workers"):
        yield Fault(f"roles.{name}", "workers are configured by the top-level keys workers, image, resources, port")
    elif (traits := job.traits.extra_roles.get(name)) is None:
        is_known = any(name in topology.extra_roles for topology in list_traits().values())
        if not is_known or role.count != 0:
            known = ", ".join(job.traits.extra_roles) or "none besides workers"
            yield Fault(f"roles.{name}", f"not a role of topology {job.topology} (its roles: {known})")
    else:
        count = traits.min_count if role.count is None else role.count
        if count < traits.min_count:
            what = f"must be >= {traits.min_count}, got {count}"
            yield Fault(f"roles.{name}.count", f"{what}: topology {job.topology} needs the role {name}")
        if traits.max_count is not None and count > traits.max_count:
            yield Fault(f"roles.{name}.count", f"must be 0 or {traits.max_count} for role {name}, got {count}")
        if role.resources.gpus and not traits.has_gpus:
            yield Fault(f"roles.{name}.resources.gpu", f"the role {name} gets no GPUs; remove this key")


def _check_logdir(job: JobSpec, name: str) -> Iterator[Fault]:
    role = job.roles[name]
    if name == "tensorboard" and role.count and not (role.program or role.logdir or job.checkpoint.dir):
        yield Fault("roles.tensorboard.logdir", "missing: set it, or set checkpoint.dir")


def _check_role_keys(job: JobSpec, name: str) -> Iterator[Fault]:
    """Reject keys that have no effect for a role."""
    role = job.roles[name]
    traits = job.traits.extra_roles.get(name)
    if traits is not None and traits.program and role.program is not None:
        what = f"the {name} runs {traits.program}, which starts the top-level program"
        yield Fault(f"roles.{name}.program", f"{what}; remove it")
    if name == "tensorboard":
        if role.program is not None and role.logdir is not None:
            yield Fault("roles.tensorboard.logdir", "has no effect if program is set; remove one of logdir, program")
        return
    for key, default in (("logdir", None), ("expose", "cluster"), ("ingress", None)):
        if getattr(role, key) != default:
            yield Fault(f"roles.{name}.{key}", "applies only to the role tensorboard; remove it")


def _check_claim_access(job: JobSpec) -> Iterator[Fault]:
    is_shared = job.max_workers > 1 and (job.is_elastic or job.traits.has_standby_workers)
    if job.checkpoint.claim is not None and job.checkpoint.access == "rwo" and is_shared:
        reason = "rank 0 may run on any worker" if job.is_elastic else "all workers of an MPIJob mount the same volumes"
        remedy = "a fixed number of workers" if job.is_elastic else "one worker"
        yield Fault(
            "checkpoint.access",
            f"an rwo claim can be mounted on only one node, and {reason}; use rwx, a bucket, or {remedy}",
        )


def _check_mount_paths(job: JobSpec) -> Iterator[Fault]:
    mounts = [(f"volumes[{index}].path", volume.path) for index, volume in enumerate(job.volumes)]
    mounts += [(f'secret_files["{path}"]', path) for path in job.secret_files]
    keys_by_path: dict[str, str] = {}
    if job.checkpoint.claim is not None and job.checkpoint.dir is not None:
        keys_by_path[job.checkpoint.dir.rstrip("/")] = "checkpoint.dir"
    for key, path in mounts:
        other = keys_by_path.setdefault(path.rstrip("/"), key)
        if other != key:
            yield Fault(key, f"{path!r} is already the mount path of {other}")


def _check_env(job: JobSpec) -> Iterator[Fault]:
    return _find_reserved(job, lambda name: RESERVED_ENV.fullmatch(name) is not None)


def _check_topology_env(job: JobSpec) -> Iterator[Fault]:
    return _find_reserved(job, job.traits.reserved_env.__contains__)


def _find_reserved(job: JobSpec, is_reserved: Callable[[str], bool]) -> Iterator[Fault]:
    for section in ("env", "secret_env"):
        for name in getattr(job, section):
            if is_reserved(name):
                is_own = name.startswith("STOKER_")
                reason = (
                    "names that start with STOKER_ are reserved"
                    if is_own
                    else "reserved, because Stoker sets this variable"
                )
                yield Fault(f"{section}.{name}", f"{reason}; remove or rename it")


def _check_secret_env(job: JobSpec) -> Iterator[Fault]:
    for name in job.secret_env:
        if name in job.env:
            yield Fault(f"secret_env.{name}", "also set in env; remove one of them")
