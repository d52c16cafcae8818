"""Jobs on a Ray cluster, under the same supervisor as on this machine.

`render` asks the cluster at most for its version and what is free. `start` packs the working folder and starts the
supervisor here, in which one process carries all slots: `carrier` here, `driver` and `keeper` there. Without a cluster
to be found, that process starts one on this machine for the run.
"""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from stoker.core.spec import to_json
from stoker.core.units import counted, format_bytes
from stoker.errors import Fault, InputError, SpecError, StokerError
from stoker.jobs.launcher import LogLine, Traits, check
from stoker.jobs.run_folder import Run, home
from stoker.jobs.spec import Job
from stoker.jobs.status import JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, commands, slots_of
from stoker.launchers.local import LocalLauncher, gpus
from stoker.launchers.paths import inside, placed
from stoker.launchers.plan import LocalPlan
from stoker.launchers.ray.client import ARCHIVE, DRIVER, end_submissions, forget_folder
from stoker.launchers.ray.cluster import GUARDED, LARGEST, Cluster, address_of, need_ray, version_here, version_there
from stoker.launchers.ray.plan import RayPlan, read_ray_plan
from stoker.launchers.upload import listed
from stoker.telemetry import profiler

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PYTHON, WORKDIR, PORT, INTERFACE = "@ray:python@", "@ray:workdir@", "@ray:port@", "@ray:interface@"
"""What the driver puts there, once slots have their places."""
_LEAVE_OUT = ".stokerignore leaves out what is not needed there; name shards by URL"
_SENT = {
    DRIVER: ("stoker.launchers.ray", "driver.py"),
    ".stoker/slot_daemon.py": ("stoker.launchers.ray", "slot_daemon.py"),
    ".stoker/profiler.py": ("stoker.telemetry", "profiler.py"),
}


class RayLauncher:
    """Runs slots as actors of a placement group."""

    traits: ClassVar[Traits] = Traits(name="ray", topologies=frozenset({"single", "torchrun"}), places=True)

    def __init__(self, place: str | None = None) -> None:
        self._place = place
        self._here = LocalLauncher()
        self._found: tuple[str | None] | None = None

    @property
    def _address(self) -> str | None:
        """The cluster's dashboard, looked for once; None: there is none."""
        if self._found is None:
            self._found = (address_of(self._place, os.environ),)
        return self._found[0]

    def anchored(self, job: Job) -> Job:
        """Count `all` workers; relative paths start at the working folder, which Ray copies to every node."""
        if self._address is None:
            return self._here.anchored(job)
        change = msgspec.structs.replace
        program = change(job.program, script=inside(job.program.script), cwd=inside(job.program.cwd))
        board = str(Path.cwd() / job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard
        workers = self._every(job) if job.workers == "all" else job.workers
        return change(job, program=program, tensorboard=board, workers=workers)

    def _every(self, job: Job) -> int:
        """Count the workers for which the nodes have room now, each for itself."""
        assert self._address is not None
        need_ray()
        nodes, bundle = Cluster(self._address).free_by_node(), _bundle(job)
        if not nodes:
            why = "the cluster does not tell what is free"
            raise InputError(f"workers: all: {why}; give a number", where=self._address)
        count = room_in(nodes, bundle, job.ray.strategy)
        if not count:
            wanted = ", ".join(f"{each:g} {name}" for name, each in bundle.items())
            why = f"no node there has {wanted} free for a worker"
            raise InputError(f"workers: all: {why}; give a number to wait for it", where=self._address)
        return count

    def render(self, job: Job) -> RayPlan:
        """Give the command of every slot, with words for what Ray will decide; changes nothing."""
        need_ray()
        faults = [*check(job, self.traits), *_missing(job, self._address)]
        if faults:
            raise SpecError(faults, where=f"job {job.name!r} on ray")
        there = None if self._address is None else version_there(self._address)
        job = self.anchored(job)
        slots = slots_of(job)
        return RayPlan(
            slots={str(slot): command for slot, command in self._commands(job, slots).items()},
            hosts=dict.fromkeys(map(str, slots), "ray" if self._address is None else self._address),
            address=self._address,
            bundle=_bundle(job),
            strategy=job.ray.strategy.upper(),
            source=str(Path.cwd()),
            exclude=job.ray.exclude,
            secrets=tuple(job.secret_env),
            grace_s=float(job.grace),
            lost_after_s=float(job.ray.lost_after),
            notes=tuple(self._notes(job, len(slots), there)),
        )

    def _commands(self, job: Job, slots: list[Slot]) -> dict[Slot, Command]:
        far = self._address is not None
        python = PYTHON if far else sys.executable
        sent = f"{WORKDIR}/.stoker/profiler.py" if far else profiler.__file__
        book = AddressBook(
            hosts={slot: f"@ray:{slot}@" for slot in slots},
            port=job.port or PORT,
            python=python,
            profiler=(python, "-I", "-S", sent),
            cores=math.ceil(_bundle(job)["CPU"]),
            env=dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE),
        )
        found = commands(placed(job, WORKDIR) if far else job, book)
        return {slot: command for slot, command in found.items() if isinstance(command, Command)}

    def _notes(self, job: Job, count: int, there: str | None) -> Iterator[str]:
        """Tell what will be done, and what is odd."""
        wanted = ", ".join(f"{name} {value:g}" for name, value in _bundle(job).items() if name != "memory")
        memory = f", {format_bytes(int(job.resources.memory))} of memory" if job.resources.memory else ""
        yield f"Ray places {count} × ({wanted}{memory}) together, {job.ray.strategy}"
        if there is None:
            yield "no Ray cluster was named or found: one is started on this machine for the run, and ended with it"
        else:
            yield from self._far_notes(job, there)
            yield from self._room_notes(job, count)
        if job.image:
            yield "no containers on ray: the image is left aside, and the Python of Ray is used"
        if job.checkpoint.claim:
            yield "no claims on ray: checkpoints go into the folder as it is on the node of worker/0"
        if job.data.via == "cluster":
            yield "no cluster's cache on ray: data is read without it"

    def _far_notes(self, job: Job, there: str) -> Iterator[str]:
        sent = dict(_sent(Path.cwd(), job.ray.exclude))
        size = sum(path.stat().st_size for path in sent.values())
        yield f"{counted(len(sent), 'file')} ({format_bytes(size)}) of {Path.cwd()} go to {self._address}"
        if size > LARGEST:
            yield f"Ray takes at most {format_bytes(LARGEST)}, packed: .stokerignore leaves out what they need not"
        if there not in (GUARDED, version_here()):
            yield (
                f"Ray is {version_here()} here and {there} there: its job API is the same in all of 2.x; should the "
                f"job not be taken: pip install 'ray[default]=={there}' here"
            )
        if job.secret_files:
            yield f"no secrets as files on ray: every node must have {', '.join(job.secret_files)}"
        if job.checkpoint.dir is None:
            yield (
                "checkpoints stay on the node where worker/0 is, in stoker/<run>/checkpoints of the home there; "
                "checkpoint.dir names a bucket or a folder that every node has, for a new attempt may be elsewhere"
            )

    def _room_notes(self, job: Job, count: int) -> Iterator[str]:
        """Tell that a job would wait for a cluster that is too small as it is, where that can be known; it may grow."""
        assert self._address is not None
        nodes = list[dict[str, float]]()
        with suppress(StokerError, ValueError):
            nodes = Cluster(self._address).total_by_node()
        # Of other resources not every version tells.
        bundle = {name: each for name, each in _bundle(job).items() if name in ("CPU", "GPU")}
        if nodes and (room := room_in(nodes, bundle, job.ray.strategy)) < count:
            there = ", ".join(f"{name} {sum(node.get(name, 0) for node in nodes):g}" for name in bundle)
            yield (
                f"the cluster is too small as it is: {counted(len(nodes), 'node')} with {there} in all have room for "
                f"{room} of {counted(count, 'worker')}; the job would wait until it grows"
            )

    def start(self, rendered: RayPlan, run: Run, *, detach: bool = False) -> str:  # noqa: ARG002
        """Pack the working folder, and start the supervisor here."""
        handle = f"ray://{run.folder}"
        if rendered.address is not None:
            _pack(rendered, run.folder / ARCHIVE)
        run.write("handle", f"{handle}\n".encode())
        run.write("processes.json", to_json(_carrier(rendered, run)))
        self.restart(run)
        return handle

    def restart(self, run: Run, *, detach: bool = False) -> None:  # noqa: ARG002
        """Start a run again that is over, with what was packed before."""
        self._here.restart(run)

    def status(self, handle: str) -> JobStatus:
        """Tell what the supervisor wrote last."""
        return self._here.status(handle)

    def logs(self, handle: str, slot: Slot | None, *, follow: bool) -> Iterator[LogLine]:
        """Give what the slots wrote, which comes here as it is written."""
        return self._here.logs(handle, slot, follow=follow)

    def stop(self, handle: str) -> None:
        """Have the supervisor end the run; a driver there that has not told its end is told to."""
        run = Run(Path(handle.partition("://")[2]))
        self._here.stop(handle)
        plan = read_ray_plan(run)
        if not self.status(handle).state.is_final:  # someone has started it again
            return
        if plan.address is None:
            forget_folder(run)
        else:
            try:
                end_submissions(run, plan.address, plan.grace_s)
            except StokerError as error:
                after = f"what may still run there ends by itself after {plan.lost_after_s:g} s"
                raise type(error)(f"{error.what}; {after}", where=error.where) from error


def room_in(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], strategy: str) -> int:
    """Count the bundles that fit into what each node has free."""
    # What is told is rounded, in memory above all.
    rooms = [min(int(free.get(name, 0) / each + 1e-3) for name, each in bundle.items()) for free in nodes]
    if strategy == "strict_pack":
        return max(rooms)
    return sum(room > 0 for room in rooms) if strategy == "strict_spread" else sum(rooms)


def _bundle(job: Job) -> dict[str, float]:
    """Give what Ray reserves for a slot: without `resources.cpu` a CPU for each rank."""
    resources = job.resources
    bundle: dict[str, float] = {"CPU": resources.cpu or float(job.ranks_per_worker)}
    if resources.gpu:
        bundle["GPU"] = resources.gpu
    if resources.memory:
        bundle["memory"] = float(resources.memory)
    if resources.gpu_type:
        bundle[f"accelerator_type:{resources.gpu_type}"] = 0.001
    return bundle


def _missing(job: Job, address: str | None) -> Iterator[Fault]:
    """List what is wrong before the cluster is asked."""
    for name in job.secret_env:
        if name not in os.environ:
            yield Fault(f"secret_env.{name}", "secrets come from the environment here, and this variable is not set")
    paths = {"data.train": job.data.train, "data.val": job.data.val, "program.script": job.program.script}
    for key, path in paths.items():
        if path is None or "://" in path or "{" in path:
            continue
        comes = address is None or not Path(inside(path) or "").is_absolute()
        if comes and not Path(path).exists():
            yield Fault(key, f"there is nothing at {Path.cwd() / path}")
    cwd = job.program.cwd
    if cwd is not None and (address is None or not Path(inside(cwd) or "").is_absolute()) and not Path(cwd).is_dir():
        yield Fault("program.cwd", f"there is no folder {Path.cwd() / cwd}")
    if address is None:
        yield from _missing_here(job)
        return
    folder = job.checkpoint.dir
    if folder is not None and "://" not in folder and not Path(folder).is_absolute():
        why = "would lie in Ray's copy of the working folder, which is not kept"
        yield Fault("checkpoint.dir", f"{folder!r} {why}: give a bucket, or an absolute path that every node has")
    if Path.cwd() in (Path.home(), Path("/")):
        yield Fault("", f"the working folder is {Path.cwd()}: give the command in the folder of your project")


def _missing_here(job: Job) -> Iterator[Fault]:
    """List what this machine has not, where the cluster is of the run's own."""
    workers = 1 if job.workers == "all" else job.max_workers
    here, wanted = len(gpus()), job.resources.gpu * workers
    if wanted > here:
        yield Fault("resources.gpu", f"{wanted} are wanted and {here} are here (--set resources.gpu=0 does without)")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (size := int(job.resources.memory or 0) * workers) > memory:
        yield Fault("resources.memory", f"{format_bytes(size)} are wanted and {format_bytes(memory)} are here")
    for path in job.secret_files:
        if not Path(path).exists():
            yield Fault(f"secret_files.{path}", "there are no secrets here but files, and this one does not exist")


def _sent(folder: Path, exclude: Sequence[str], above: tuple[Path, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Give the files that go along, by their names there; what a link leads to is in its place."""
    above = (*above, folder.resolve())
    for name in listed(folder, exclude, away=home()):
        path = folder / name
        if path.is_dir():  # then it is a link
            if path.resolve() in above:
                raise InputError("this link leads back to a folder that it is in", where=path, hint=_LEAVE_OUT)
            yield from ((f"{name}/{rest}", found) for rest, found in _sent(path, exclude, above))
        elif path.exists():  # a link may lead nowhere
            yield name, path


class _Bounded(io.BufferedWriter):
    """A file that Ray would take."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, unless it is too much by now."""
        if self.tell() + memoryview(data).nbytes >= LARGEST:
            raise _TooLargeError
        return super().write(data)


class _TooLargeError(Exception):
    pass


def _pack(plan: RayPlan, path: Path) -> None:
    """Pack the working folder, with what the driver needs."""
    folder = Path(plan.source)
    try:
        with (
            _Bounded(io.FileIO(path, "w")) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive,
        ):
            for name, found in _sent(folder, plan.exclude):
                archive.write(found, name)
            for name, (package, source) in _SENT.items():
                archive.writestr(name, files(package).joinpath(source).read_bytes())
    except BaseException as error:
        path.unlink()
        if not isinstance(error, _TooLargeError):
            raise
        what = f"the working folder is more than the {format_bytes(LARGEST)} that Ray takes, when packed"
        raise InputError(what, where=folder, hint=_LEAVE_OUT) from None


def _carrier(plan: RayPlan, run: Run) -> LocalPlan:
    """Give the process here, which carries all slots there."""
    argv = (sys.executable, "-m", "stoker.launchers.ray.client", str(run.folder))
    command = Command(argv, {"STOKER_SLOT": "driver/0", "STOKER_ROLE": "driver"}, str(run.folder))
    return LocalPlan(slots={"driver/0": command}, hosts=plan.hosts, carried=tuple(plan.slots))
