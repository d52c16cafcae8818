"""Jobs as processes of this machine, under a supervisor of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import msgspec

from stoker.core.processes import run as run_program
from stoker.core.processes import until
from stoker.core.spec import to_json
from stoker.errors import ConflictError, Fault, MissingExtraError, MissingProgramError, SpecError, UnavailableError
from stoker.jobs.launcher import LogLine, Traits, check
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import Job
from stoker.jobs.status import STOPPED, JobState, JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, Standby, commands, slots_of
from stoker.launchers.paths import placed, programs
from stoker.launchers.plan import HOST, LocalPlan, free_ports, gpu_faults, listeners, named_ports
from stoker.launchers.process_group import end_left
from stoker.launchers.supervisor import watcher
from stoker.telemetry import mpi_rank, profiler
from stoker.telemetry.reader import RunFollower

POLL_S = 0.1
START_S = 10.0
SUPERVISOR = "stoker.launchers.supervisor"


class LocalLauncher:
    """Runs slots as processes of this machine."""

    traits: ClassVar[Traits] = Traits(
        name="local", topologies=frozenset({"mpi", "single", "tf-mirrored", "tf-ps", "torchrun"}), elastic=True
    )

    def render(self, job: Job) -> LocalPlan:
        """Give the command of every slot, with a port that is free now."""
        faults = [*check(job, self.traits), *_missing(job)]
        if faults:
            raise SpecError(faults, where=f"job {job.name!r} on this machine")
        if job.topology == "torchrun" and find_spec("torch") is None:
            raise MissingExtraError("torch", "torch", purpose="the topology 'torchrun'")
        if job.topology == "mpi":
            _check_mpirun(job)
        notes = tuple(_left_aside(job))
        job = self.anchored(job)
        slots = slots_of(job)
        named, free = _ports(job)
        port = job.port or next(iter(free.values()), 0) or free_ports(1)[0]
        book = AddressBook(
            hosts=dict.fromkeys(slots, HOST),
            port=port,
            ports={**named, **free},
            python=sys.executable,
            # By its path and without site: a module of the user's cannot stand in its way.
            profiler=(sys.executable, "-I", "-S", profiler.__file__),
            mpi_rank=(sys.executable, "-I", "-S", mpi_rank.__file__),
            cores=max(1, len(os.sched_getaffinity(0)) // job.max_workers),
            # Host names of laptops often lead nowhere.
            env={"GLOO_SOCKET_IFNAME": "lo"},
        )
        found = commands(job, book)
        return LocalPlan(
            slots={
                str(slot): replace(command, env={**_own_gpus(job, slot), **command.env})
                for slot, command in found.items()
                if isinstance(command, Command)
            },
            port=port,
            ports={str(slot): one for slot, one in free.items()},
            notes=notes,
            carried=tuple(str(slot) for slot, command in found.items() if isinstance(command, Standby)),
        )

    def anchored(self, job: Job) -> Job:
        """Make relative paths absolute: they start where the command is given, whatever folder the program runs in."""
        return msgspec.structs.replace(
            placed(job, str(Path.cwd())),
            workers=_every(job) if job.workers == "all" else job.workers,
            tensorboard=_absolute(job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard,
        )

    def start(self, rendered: LocalPlan, run: Run, *, detach: bool = False) -> str:  # noqa: ARG002
        """Start the supervisor, which starts the slots as the run's plan has them."""
        handle = f"local://{run.folder}"
        if rendered.carried:
            run.write("processes.json", to_json(_with_carrier(rendered, run)))
        run.write("handle", f"{handle}\n".encode())
        self.restart(run)
        return handle

    def restart(self, run: Run, *, detach: bool = False) -> None:  # noqa: ARG002
        """Start a run again that is over, in its own folder and so with its own checkpoints."""
        if watcher(run) is not None:
            raise ConflictError("is being watched over already", where=run.id)
        before = run.read_status()
        watch_over(run, lambda: run.read_status().began != before.began)  # the first that it writes

    def go_on(self, run: Run) -> None:
        """Watch again over a run whose slots are elsewhere and have gone on by themselves."""
        watch_over(run, lambda: watcher(run) is not None or run.read_status().state.is_final, "--continue")

    def status(self, handle: str) -> JobStatus:
        """Tell what the supervisor wrote last; without a supervisor a run that is not over is lost."""
        run = _run(handle)
        status = run.read_status()
        if status.state.is_final:
            return status
        if watcher(run) is not None or (status.state is JobState.PENDING and _is_young(run)):
            return status
        status = run.read_status()  # it may have ended between the two looks
        if status.state.is_final:
            return status
        message = f"the process that watched over the run is gone; go on with: stoker job run --resume {run.id}"
        state = run.folder / "state.json"
        return _ended(status, JobState.LOST, message, state.stat().st_mtime if state.exists() else time.time())

    def logs(self, handle: str, slot: Slot | None, *, follow: bool) -> Iterator[LogLine]:
        """Give what the slots wrote, attempt by attempt."""
        return kept_logs(_run(handle), slot, is_over=lambda: not follow or self.status(handle).state.is_final)

    def stop(self, handle: str) -> None:
        """Ask the supervisor to end the run, and wait for it; end what is left where there is none."""
        run = _run(handle)
        grace = float(run.job.grace)
        until(lambda: run.read_status().began > 0 or not _is_young(run), START_S)  # it is being watched over
        if (pid := watcher(run)) is not None:
            try:
                _signal(run, pid, signal.SIGTERM)
                until(lambda: watcher(run) != pid, grace + 15)
            except KeyboardInterrupt:  # a second Ctrl-C cuts the grace short, and a third must not cut this short
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            _signal(run, pid, signal.SIGKILL)
            until(lambda: watcher(run) != pid, 5)
            grace = 0.0
        if watcher(run) is not None:  # someone has started it again
            return
        end_left(run, grace)
        status = self.status(handle)
        if status.state is JobState.LOST:
            stopped = _ended(status, JobState.STOPPED, STOPPED, time.time())
            run.write_status(stopped)


def _ports(job: Job) -> tuple[dict[Slot, int], dict[Slot, int]]:
    """Give each slot that listens a port: those that the job names, and free ones."""
    every = listeners(job)
    named = named_ports(job, every)
    rest = [slot for slot in every if slot not in named]
    found = (port for port in free_ports(len(every)) if port not in named.values())
    return named, dict(zip(rest, found, strict=False))


def kept_logs(run: Run, slot: Slot | None, *, is_over: Callable[[], bool]) -> Iterator[LogLine]:
    """Give the lines in a run's folder, and those that come until it is over."""
    logs = RunFollower(run.logs, slot=None if slot is None else str(slot))
    while True:
        over = is_over()  # looked at before the last read
        for line in logs.lines(final=over):
            yield LogLine(Slot.parse(line.log.slot), line.log.attempt, line.text)
        if over:
            return
        time.sleep(POLL_S)


def _with_carrier(plan: LocalPlan, run: Run) -> LocalPlan:
    """Put what carries the workers in front of mpirun."""
    words = (sys.executable, "-P", "-m", "stoker.launchers.mpi_slot", str(run.folder), "--")
    slots = {name: replace(command, argv=(*words, *command.argv)) for name, command in plan.slots.items()}
    return msgspec.structs.replace(plan, slots=slots)


def _check_mpirun(job: Job) -> None:
    """Refuse a machine without Open MPI 4, whose flags we give."""
    hint = "install it: apt-get install openmpi-bin"
    program = shutil.which("mpirun", path=_path(job, Path.cwd()))
    if program is None:
        raise MissingProgramError("there is no mpirun here, which the topology 'mpi' needs", hint=hint)
    said = run_program([program, "--version"], timeout_s=START_S, check=False).stdout.strip()
    version = re.match(r"mpirun \(Open MPI\) (4\.\S+)", said)
    if version is None:
        found = said.splitlines()[0] if said else "something that does not tell its version"
        raise MissingProgramError(f"{program} is {found}, and the topology 'mpi' needs Open MPI 4", hint=hint)


def watch_over(run: Run, has_begun: Callable[[], bool], *more: str, module: str = SUPERVISOR) -> None:
    """Start the process that watches over a run, and wait until the run is its own."""
    with open(run.folder / "supervisor.log", "a+b") as log:
        told = log.seek(0, os.SEEK_END)
        argv = [sys.executable, "-P", "-m", module, str(run.folder), *more]
        # In a session of its own from the first moment: a Ctrl-C here is not meant for it.
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=False)
        deadline = time.monotonic() + START_S
        while not has_begun():
            log.seek(told)
            said = log.read().decode(errors="replace").strip().splitlines()
            if said or time.monotonic() > deadline:
                raise UnavailableError(f"the supervisor did not start: {said[-1] if said else 'no reason given'}")
            time.sleep(0.01)


def _every(job: Job) -> int:
    """Count all workers that there is room for: by GPUs where a worker has some, else one."""
    return max(1, len(gpus()) // job.resources.gpu) if job.resources.gpu else 1


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path.cwd() / path)


def _missing(job: Job) -> Iterator[Fault]:
    """List what the job needs and this machine has not."""
    for where, program in programs(job).items():
        folder = Path.cwd() / (program.cwd or "")
        if not folder.is_dir():
            yield Fault(f"{where}.cwd", f"there is no folder {folder}")
        elif program.script is not None and not Path(program.script).is_file():
            yield Fault(f"{where}.script", f"there is no file {Path.cwd() / program.script}")
        elif program.command is not None and shutil.which(program.command[0], path=_path(job, folder)) is None:
            yield Fault(f"{where}.command", f"there is no program {program.command[0]!r} on the PATH")
    yield from gpu_faults(job)
    for key in ("train", "val"):
        url = getattr(job.data, key)
        if not url or "://" in url or "{" in url:
            continue
        if not Path(url).exists():
            yield Fault(f"data.{key}", f"there is nothing at {Path.cwd() / url}")
        elif Path(url).is_dir() and not any(_looks_like_shards(path) for path in Path(url).iterdir()):
            yield Fault(f"data.{key}", f"there are no shards in {Path.cwd() / url}: stoker data convert makes them")
    here, wanted = len(gpus()), job.resources.gpu * job.max_workers
    if wanted > here:
        yield Fault("resources.gpu", f"{wanted} are wanted and {here} are here (--set resources.gpu=0 does without)")
    for name in job.secret_env:
        if name not in os.environ:
            yield Fault(f"secret_env.{name}", "secrets come from the environment here, and this variable is not set")
    for path in job.secret_files:
        if not Path(path).exists():
            yield Fault(f"secret_files.{path}", "there are no secrets here but files, and this one does not exist")


def _looks_like_shards(path: Path) -> bool:
    return path.name == "manifest.json" or ".tar" in path.suffixes or "tfrecord" in path.name or "-of-" in path.name


def _path(job: Job, folder: Path) -> str:
    """Give the search path of the program; a name with a slash is looked for in its folder."""
    return os.pathsep.join((job.env.get("PATH") or os.environ.get("PATH", os.defpath), str(folder)))


def gpus() -> list[str]:
    """List the GPUs that programs here may use, as the driver's device files show them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one.strip() for one in visible.split(",") if one.strip() not in ("", "-1")]
    return sorted((path.name[6:] for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()), key=int)


def _own_gpus(job: Job, slot: Slot) -> dict[str, str]:
    """Give each of several workers GPUs of its own."""
    each = job.resources.gpu
    if slot.role != "worker" and job.topology != "mpi":  # TensorFlow would take all memory of all that it sees
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not each or job.max_workers == 1:
        return {}
    if slot.role != "worker":  # mpirun, for all of them
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus()[: job.max_workers * each])}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus()[slot.index * each : (slot.index + 1) * each])}


def _left_aside(job: Job) -> Iterator[str]:
    """Tell what of the job file means nothing here."""
    if job.image:
        yield "no containers here: the image is left aside, and this Python environment is used"
    if job.checkpoint.claim:
        yield f"no claims here: checkpoints go into the folder {job.checkpoint.dir or 'of the run'}"
    if job.data.via == "cluster":
        yield "no cluster here: data is read without its cache"


def _run(handle: str) -> Run:
    return Run(Path(handle.partition("://")[2]))


def _ended(status: JobStatus, state: JobState, message: str, ended: float) -> JobStatus:
    """Give a status as it is for a run, and for its slots, that nobody saw end."""
    slots = tuple(
        one if one.state.is_final else msgspec.structs.replace(one, state=state, pid=None) for one in status.slots
    )
    return msgspec.structs.replace(status, state=state, slots=slots, message=message, ended=ended)


def _signal(run: Run, pid: int | None, number: signal.Signals) -> None:
    """Signal the process that watches over a run, if it still does."""
    if pid and watcher(run) == pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_young(run: Run) -> bool:
    return time.time() - run.folder.stat().st_mtime < START_S
