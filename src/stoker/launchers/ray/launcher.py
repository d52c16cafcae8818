"""Ray launcher: run a job on a Ray cluster, under the same supervisor as on this machine.

`render` asks the cluster at most for its version and free resources. `start` packs the working directory and starts the
supervisor on this machine, which manages all slots through a driver on the cluster. Without a cluster, it starts Ray on
the hosts of the job, or on this machine, for the duration of the run.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from stoker.core.spec import run_checks
from stoker.core.text import join_all
from stoker.core.units import format_bytes, pluralize
from stoker.errors import Fault, InputError, StokerError, UnavailableError
from stoker.jobs.launcher import RUN_PLACEHOLDER, LauncherTraits, SlotLogLine, check_traits, raise_faults
from stoker.jobs.run_folder import RunFolder, stoker_home
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, list_slots, render_commands
from stoker.launchers.checks import check_gpus, check_module, check_secret_env, check_secret_files, check_via
from stoker.launchers.local import LocalLauncher
from stoker.launchers.paths import relative_to_workdir, resolve_job_paths
from stoker.launchers.plan import listening_slots, requested_ports
from stoker.launchers.ray.cluster import (
    MAX_UPLOAD_BYTES,
    UNKNOWN_VERSION,
    RayCluster,
    cluster_version,
    local_version,
    require_ray,
    resolve_address,
)
from stoker.launchers.ray.cluster_runs import RayClusterRuns
from stoker.launchers.ray.connection import ARCHIVE, DRIVER, remove_ray_folder, stop_submissions
from stoker.launchers.ray.host_cluster import prepare_nodes, stop_nodes
from stoker.launchers.ray.hosts import NodePlan, assign_hosts, check_hosts, plan_nodes
from stoker.launchers.ray.placement import count_fitting
from stoker.launchers.ray.plan import RayPlan, read_ray_plan, slot_bundle, worker_bundle
from stoker.launchers.ssh.client import expand_hosts, expand_slots
from stoker.launchers.ssh.gpus import describe_ranks
from stoker.launchers.upload import list_files
from stoker.remote import profiler

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PYTHON, WORKDIR, PORT, INTERFACE = "@ray:python@", "@ray:workdir@", "@ray:port@", "@ray:interface@"
"""Placeholders that the driver replaces once slots are placed."""
_UPLOAD_HINT = "exclude what the job does not need in .stokerignore; refer to shards by URL"
_WORKERS_HINT = "set a number of workers"
_RUNTIME_FILES = {
    DRIVER: ("stoker.launchers.ray", "driver.py"),
    ".stoker/profiler.py": ("stoker.remote", "profiler.py"),
}


class RayLauncher:
    """Launcher for Ray: slots are actors of one placement group."""

    traits: ClassVar[LauncherTraits] = LauncherTraits(
        name="ray",
        supports_address_per_slot=True,
        supports_unequal_workers=True,
        has_targets=True,
        hosts_key="ray.hosts",
        prints_stacks=True,
        follows_runs=True,
    )

    def __init__(self, target: str | None = None) -> None:
        self._target = target
        self._local = LocalLauncher()
        self._resolved: tuple[str | None] | None = None

    @property
    def _address(self) -> str | None:
        """URL of the cluster's dashboard, resolved once; None without a cluster."""
        if self._resolved is None:
            self._resolved = (resolve_address(self._target, os.environ),)
        return self._resolved[0]

    def _uses_hosts(self, job: JobSpec) -> bool:
        """Whether a cluster is started on the hosts of the job."""
        return self._target is None and bool(job.ray.hosts)

    def _is_remote(self, job: JobSpec) -> bool:
        """Whether Ray runs on other machines."""
        return self._uses_hosts(job) or self._address is not None

    def resolve_paths(self, job: JobSpec) -> JobSpec:
        """Resolve hosts and `workers: all`; paths stay relative to the working directory, which Ray copies to nodes."""
        if not self._is_remote(job):
            return self._local.resolve_paths(job)
        change = msgspec.structs.replace
        if self._uses_hosts(job):
            config = None if job.ssh.config is None else str(Path.cwd() / job.ssh.config)
            hosts = expand_hosts(job.ray.hosts)
            job = change(job, ssh=change(job.ssh, config=config), ray=change(job.ray, hosts=hosts))
            if isinstance(job.workers, str):
                capacity = max(1, len(expand_slots(hosts)))
                job = change(job, workers=min(capacity, job.traits.max_workers or capacity))
        program = change(
            job.program, script=relative_to_workdir(job.program.script), cwd=relative_to_workdir(job.program.cwd)
        )
        tensorboard = str(Path.cwd() / job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard
        workers = self._count_workers(job) if job.workers == "all" else job.workers
        return change(job, program=program, tensorboard=tensorboard, workers=workers)

    def _count_workers(self, job: JobSpec) -> int:
        """Return how many workers fit into the free resources of the nodes."""
        assert self._address is not None
        require_ray()
        nodes, bundle = RayCluster(self._address).free_by_node(), worker_bundle(job, 0)
        if not nodes:
            raise InputError(
                "workers: all: the cluster does not report its free resources", where=self._address, hint=_WORKERS_HINT
            )
        count = count_fitting(nodes, bundle, job.ray.strategy.upper())
        if not count:
            needed = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            what = f"workers: all: a worker needs {needed}, no node has that free now"
            raise InputError(what, where=self._address, hint=f"{_WORKERS_HINT} to wait for free resources")
        return count

    def check(self, job: JobSpec) -> Iterator[Fault]:
        """Yield the faults that can be found without asking the cluster."""
        yield from check_traits(job, self.traits)
        yield from run_checks(
            job,
            check_secret_env,
            check_via,
            self._check_paths,
            self._check_place,
        )

    def _check_place(self, job: JobSpec) -> Iterator[Fault]:
        if not self._is_remote(job):
            return run_checks(job, _check_module, _check_memory, check_secret_files)
        checks = (check_hosts,) if self._uses_hosts(job) else (_check_keep,)
        return run_checks(job, *checks, _check_checkpoint, _check_workdir)

    def _check_paths(self, job: JobSpec) -> Iterator[Fault]:
        data, script, cwd = job.data, job.program.script, job.program.cwd
        for key, path in (("data.train", data.train), ("data.val", data.val), ("program.script", script)):
            if path and "://" not in path and "{" not in path and self._is_local(job, path) and not Path(path).exists():
                yield Fault(key, f"no such file or directory: {Path.cwd() / path}")
        if cwd is not None and self._is_local(job, cwd) and not Path(cwd).is_dir():
            yield Fault("program.cwd", f"no such directory: {Path.cwd() / cwd}")

    def _is_local(self, job: JobSpec, path: str) -> bool:
        """Whether a path must exist on this machine: it is uploaded to the cluster, or Ray runs here."""
        return not Path(relative_to_workdir(path) or "").is_absolute() or not self._is_remote(job)

    def render(self, job: JobSpec) -> RayPlan:
        """Return the command of every slot, with placeholders for what Ray decides; no side effects."""
        require_ray()
        raise_faults(self.check(job))
        if self._uses_hosts(job):
            nodes = plan_nodes(self.resolve_paths(job))
            plan = self._build_plan(nodes.job, assign_hosts(nodes.job), nodes)
            return msgspec.structs.replace(plan, notes=tuple(self._host_notes(nodes)))
        version = None if self._address is None else cluster_version(self._address)
        job = self.resolve_paths(job)
        plan = self._build_plan(job, dict.fromkeys(list_slots(job), self._address or "ray"))
        return msgspec.structs.replace(plan, notes=tuple(self._notes(job, plan, version)))

    def _build_plan(self, job: JobSpec, hosts: Mapping[Slot, str], nodes: NodePlan | None = None) -> RayPlan:
        """Return the plan without notes; `hosts` is where each slot runs."""
        bundle = worker_bundle(job, 0)
        bundles = {
            slot: {**slot_bundle(job, slot), **(nodes.pin(host) if nodes else {})} for slot, host in hosts.items()
        }
        return RayPlan(
            slots={str(slot): command for slot, command in self._commands(job, list(hosts)).items()},
            hosts={str(slot): host for slot, host in hosts.items()},
            address=None if nodes else self._address,
            nodes=nodes.ssh if nodes else None,
            node_addresses=nodes.addresses if nodes else {},
            keep=job.ray.keep,
            bundle=bundle,
            bundles={str(slot): other for slot, other in bundles.items() if other != bundle},
            strategy="PACK" if nodes else job.ray.strategy.upper(),
            source=str(Path.cwd()),
            exclude=job.ray.exclude,
            secrets=tuple(job.secret_env),
            grace_s=float(job.grace),
            lost_after_s=float(job.ray.lost_after),
        )

    def _commands(self, job: JobSpec, slots: list[Slot]) -> dict[Slot, Command]:
        is_remote = self._is_remote(job)
        python = PYTHON if is_remote else sys.executable
        profiler_path = f"{WORKDIR}/.stoker/profiler.py" if is_remote else profiler.__file__
        book = AddressBook(
            hosts={slot: f"@ray:{slot}@" for slot in slots},
            port=job.port or PORT,
            ports=_slot_ports(job),
            python=python,
            profiler=(python, "-I", "-S", profiler_path),
            # Without resources.cpu, a bundle has one CPU for each rank.
            cores_per_rank=1,
            env=dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE),
        )
        rendered = render_commands(resolve_job_paths(job, WORKDIR) if is_remote else job, book)
        return {slot: command for slot, command in rendered.items() if isinstance(command, Command)}

    def _notes(self, job: JobSpec, plan: RayPlan, version: str | None) -> Iterator[str]:
        """Yield notes on what will be done and what to look out for."""
        yield f"placement group: {plan.gang}, strategy {job.ray.strategy}"
        if version is None:
            yield "no Ray cluster was specified or found; Ray will run on this machine for the duration of the run"
        else:
            yield from self._upload_notes(job, f"to {self._address}")
            yield from self._version_notes(version)
            if job.checkpoint.dir is None:
                yield (
                    f"checkpoints stay on the node of worker/0, in ~/stoker/{RUN_PLACEHOLDER}/checkpoints; a retry may "
                    "run on another node: set checkpoint.dir to a bucket or to a directory shared by all nodes"
                )
            yield from self._capacity_notes(plan)
        yield from _ignored_notes(job)

    def _host_notes(self, nodes: NodePlan) -> Iterator[str]:
        """Yield notes on a cluster that is started on hosts."""
        job, (head, *others) = nodes.job, nodes.addresses
        workers = f", workers on {join_all(others)}" if others else ""
        end = "until `stoker job stop`" if job.ray.keep else "for the duration of the run"
        yield f"starts Ray over ssh {end}: head on {head}{workers}"
        if ranks := describe_ranks(job, list(assign_hosts(job).values())):
            yield f"the hosts run different numbers of ranks: {ranks}"
        yield from self._upload_notes(job, "through Ray")
        if job.checkpoint.dir is None:
            folder = f"~/stoker/{RUN_PLACEHOLDER}/checkpoints"
            yield f"checkpoints are written to {folder} on {head}; set checkpoint.dir for elsewhere"
        yield from _ignored_notes(job)

    def _upload_notes(self, job: JobSpec, where: str) -> Iterator[str]:
        uploads = dict(_list_uploads(Path.cwd(), job.ray.exclude))
        size = sum(path.stat().st_size for path in uploads.values())
        yield f"uploads {pluralize(len(uploads), 'file')} ({format_bytes(size)}) of {Path.cwd()} {where}"
        if size > MAX_UPLOAD_BYTES:
            yield f"Ray accepts at most {format_bytes(MAX_UPLOAD_BYTES)}, compressed; {_UPLOAD_HINT}"
        if job.secret_files:
            yield f"secret_files are not distributed by Ray: every node must have {', '.join(job.secret_files)}"

    def _version_notes(self, version: str) -> Iterator[str]:
        if version not in (UNKNOWN_VERSION, local_version()):
            yield (
                f"Ray is {local_version()} on this machine and {version} on the cluster; the job API is the same in "
                f"all of 2.x, but if the cluster rejects the job: pip install 'ray[default]=={version}'"
            )

    def _capacity_notes(self, plan: RayPlan) -> Iterator[str]:
        """Yield a note if the cluster is currently too small for the job; it may scale up."""
        assert self._address is not None
        nodes = list[dict[str, float]]()
        with suppress(StokerError, ValueError):
            nodes = RayCluster(self._address).total_by_node()
        for amounts, count in plan.count_bundles() if nodes else ():
            # Not every version of Ray reports other resources.
            bundle = {name: amount for name, amount in amounts.items() if name in ("CPU", "GPU")}
            if (fitting := count_fitting(nodes, bundle, plan.strategy)) < count:
                total = ", ".join(f"{sum(node.get(name, 0) for node in nodes):g} {name}" for name in bundle)
                yield (
                    f"the cluster is too small now: {pluralize(len(nodes), 'node')} with {total} in total can run "
                    f"{fitting} of {pluralize(count, 'worker')}; the job will wait until the cluster scales up"
                )

    def start(self, rendered: RayPlan, run: RunFolder, *, detach: bool = False) -> str:  # noqa: ARG002
        """Pack the working directory, prepare the hosts if there are any, and start the supervisor here."""
        handle = f"ray://{run.folder}"
        if not rendered.runs_here:
            pack_working_dir(rendered, run.folder / ARCHIVE)
        run.write_handle(handle)
        self.restart(run)
        return handle

    def restart(self, run: RunFolder, *, detach: bool = False) -> None:  # noqa: ARG002
        """Start a finished run again, with the archive that was packed before."""
        if (nodes := read_ray_plan(run).nodes) is not None:
            prepare_nodes(run, nodes)
        self._local.restart(run)

    def status(self, handle: str) -> JobStatus:
        """Return the status that the supervisor wrote last."""
        return self._local.status(handle)

    def logs(self, handle: str, slot: Slot | None, *, follow: bool, tail: int | None = None) -> Iterator[SlotLogLine]:
        """Yield the log lines of one slot or all, which the supervisor writes on this machine."""
        return self._local.logs(handle, slot, follow=follow, tail=tail)

    def open_runs(self) -> RayClusterRuns:
        """Return the runs of the cluster, to be followed without changing them."""
        require_ray()
        if self._address is None:
            raise UnavailableError("no Ray cluster was specified or found", hint="use --on ray://host:8265")
        return RayClusterRuns(self._address)

    def stop(self, handle: str) -> None:
        """Stop the run through its supervisor, then any driver on the cluster that has not reported its end."""
        run = RunFolder(Path(handle.partition("://")[2]))
        self._local.stop(handle)
        plan = read_ray_plan(run)
        if not self.status(handle).state.is_final:  # the run was restarted meanwhile
            return
        if plan.nodes is not None:
            stop_nodes(run)
        elif plan.address is None:
            remove_ray_folder(run)
        else:
            try:
                stop_submissions(run, plan.address, plan.grace_s)
            except StokerError as error:
                note = f"processes left on the cluster stop by themselves after {plan.lost_after_s:g} s"
                raise type(error)(f"{error.what}; {note}", where=error.where) from error


def _slot_ports(job: JobSpec) -> dict[Slot, int | str]:
    """Return the port of every slot that needs its own, because slots may share a node."""
    slots = listening_slots(job)
    return {**{slot: f"@ray:{slot}:port@" for slot in slots}, **requested_ports(job, slots)}


def _ignored_notes(job: JobSpec) -> Iterator[str]:
    """Yield a note for each setting of the job file that has no effect on Ray."""
    if job.image:
        yield "image is ignored: the Ray launcher uses the Python environment of Ray, not containers"
    if job.checkpoint.claim:
        yield "checkpoint.claim is ignored: checkpoints are written to a directory on the node of worker/0"
    if job.data.via == "cluster":
        yield "data.via: cluster is ignored: the Ray launcher reads data without the cluster's cache"


def _check_keep(job: JobSpec) -> Iterator[Fault]:
    if job.ray.keep:
        yield Fault("ray.keep", "applies only to a cluster that is started on hosts, not to one with an address")


def _check_module(job: JobSpec) -> Iterator[Fault]:
    return check_module("program", job.program.module, Path.cwd() / (job.program.cwd or ""), job.env)


def _check_checkpoint(job: JobSpec) -> Iterator[Fault]:
    folder = job.checkpoint.dir
    if folder is not None and "://" not in folder and not Path(folder).is_absolute():
        what = f"{folder!r} would be inside Ray's temporary copy of the working directory"
        yield Fault("checkpoint.dir", f"{what}: set a bucket, or an absolute path shared by all nodes")


def _check_workdir(_: JobSpec) -> Iterator[Fault]:
    if Path.cwd() in (Path.home(), Path("/")):
        yield Fault("", f"the working directory is {Path.cwd()}: run the command in the directory of your project")


def _check_memory(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault for GPUs and memory that a run with its own Ray needs and this machine lacks."""
    yield from check_gpus(job)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (size := sum(int(job.resources_of(worker).memory or 0) for worker in range(job.max_workers))) > memory:
        yield Fault("resources.memory", f"job needs {format_bytes(size)}, this machine has {format_bytes(memory)}")


def _list_uploads(folder: Path, exclude: Sequence[str], parents: tuple[Path, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yield the files to upload by their names in the archive; symbolic links are followed."""
    parents = (*parents, folder.resolve())
    for name in list_files(folder, exclude, skip=stoker_home()):
        path = folder / name
        if path.is_dir():  # a symbolic link
            if path.resolve() in parents:
                raise InputError("symbolic link points to one of its parent directories", where=path, hint=_UPLOAD_HINT)
            yield from ((f"{name}/{rest}", target) for rest, target in _list_uploads(path, exclude, parents))
        elif path.exists():  # not for a broken link
            yield name, path


class _BoundedFile(io.BufferedWriter):
    """A file that cannot grow beyond what Ray accepts."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the data; raise if the file would become too large."""
        if self.tell() + memoryview(data).nbytes >= MAX_UPLOAD_BYTES:
            raise _TooLargeError
        return super().write(data)


class _TooLargeError(Exception):
    pass


def pack_working_dir(plan: RayPlan, path: Path) -> None:
    """Pack the working directory and the programs that run on the cluster into an archive."""
    folder = Path(plan.source)
    try:
        with (
            _BoundedFile(io.FileIO(path, "w")) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive,
        ):
            for name, source_path in _list_uploads(folder, plan.exclude):
                archive.write(source_path, name)
            for name, (package, source) in _RUNTIME_FILES.items():
                archive.writestr(name, files(package).joinpath(source).read_bytes())
    except BaseException as error:
        path.unlink()
        if not isinstance(error, _TooLargeError):
            raise
        what = f"the compressed working directory exceeds Ray's limit of {format_bytes(MAX_UPLOAD_BYTES)}"
        raise InputError(what, where=folder, hint=_UPLOAD_HINT) from None
