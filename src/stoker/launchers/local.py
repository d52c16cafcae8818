"""Local launcher: run a job as processes of this machine, watched by a supervisor in the background."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import msgspec

from stoker.core.processes import run as run_program
from stoker.core.processes import wait_for_exit, wait_until
from stoker.core.spec import run_checks
from stoker.core.units import pluralize
from stoker.errors import ConflictError, Fault, MissingExtraError, MissingProgramError
from stoker.jobs.launcher import LauncherTraits, SlotLogLine, check_traits, raise_faults
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, JobState, JobStatus
from stoker.jobs.topology import AddressBook, Command, Slot, Standby, list_slots, render_commands
from stoker.launchers.checks import (
    check_gpu_roles,
    check_gpus,
    check_module,
    check_secret_env,
    check_secret_files,
    check_via,
    find_missing_path,
    sum_gpus,
    visible_gpus,
)
from stoker.launchers.paths import programs_by_key, resolve_job_paths
from stoker.launchers.plan import (
    LOOPBACK,
    LocalPlan,
    find_free_ports,
    is_free,
    listening_slots,
    requested_ports,
)
from stoker.launchers.run_logs import read_run_logs
from stoker.launchers.supervise.background import START_TIMEOUT_S, start_supervisor
from stoker.launchers.supervise.process_group import stop_leftovers
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.remote import mpi_rank, profiler
from stoker.shards.manifest import MANIFEST


class LocalLauncher:
    """Launcher for this machine: slots are processes, started and watched by a supervisor."""

    traits: ClassVar[LauncherTraits] = LauncherTraits(
        name="local",
        supports_standby_workers=True,
        supports_address_per_slot=True,
        supports_elastic=True,
        supports_unequal_workers=True,
        prints_stacks=True,
    )

    def check(self, job: JobSpec) -> Iterator[Fault]:
        """Yield everything that the job needs and this machine lacks."""
        yield from check_traits(job, self.traits)
        yield from run_checks(
            job,
            _check_programs,
            check_gpu_roles,
            lambda job: _check_shards("data.train", job.data.train),
            lambda job: _check_shards("data.val", job.data.val),
            check_via,
            check_gpus,
            check_secret_env,
            check_secret_files,
        )

    def render(self, job: JobSpec) -> LocalPlan:
        """Return the command of every slot, with ports that are free now."""
        raise_faults((*self.check(job), *_check_ports(job)))
        for module in job.traits.required_modules:
            if find_spec(module) is None:
                raise MissingExtraError(module, module, purpose=f"topology {job.topology!r}")
        if job.traits.needs_open_mpi:
            _check_mpirun(job)
        notes = tuple(_ignored_settings(job))
        job = self.resolve_paths(job)
        requested, free = _assign_ports(job)
        port = job.port or next(iter(free.values()), 0) or find_free_ports(1)[0]
        rendered = render_commands(job, _address_book(job, port, {**requested, **free}))
        return LocalPlan(
            slots={
                str(slot): replace(command, env={**_gpu_env(job, slot), **command.env})
                for slot, command in rendered.items()
                if isinstance(command, Command)
            },
            port=port,
            ports={str(slot): slot_port for slot, slot_port in free.items()},
            notes=notes,
            delegated=tuple(str(slot) for slot, command in rendered.items() if isinstance(command, Standby)),
        )

    def resolve_paths(self, job: JobSpec) -> JobSpec:
        """Resolve relative paths against the current directory, whatever directory the program runs in."""
        return msgspec.structs.replace(
            resolve_job_paths(job, str(Path.cwd())),
            workers=_count_workers(job) if job.workers == "all" else job.workers,
            tensorboard=_absolute(job.tensorboard) if isinstance(job.tensorboard, str) else job.tensorboard,
        )

    def start(self, rendered: LocalPlan, run: RunFolder, *, detach: bool = False) -> str:  # noqa: ARG002
        """Start the supervisor, which starts the slots of the run's plan."""
        handle = f"local://{run.folder}"
        run.write_handle(handle)
        self.restart(run)
        return handle

    def restart(self, run: RunFolder, *, detach: bool = False) -> None:  # noqa: ARG002
        """Start a finished run again in its own run folder, and so from its own checkpoints."""
        if supervisor_pid(run) is not None:
            raise ConflictError("a supervisor is already running", where=run.id)
        before = run.read_status()
        # A new start time is the first thing that the supervisor writes.
        start_supervisor(run, lambda: run.read_status().began != before.began)

    def reattach(self, run: RunFolder) -> None:
        """Start a supervisor for a run whose remote slots kept running without one."""
        start_supervisor(
            run, lambda: supervisor_pid(run) is not None or run.read_status().state.is_final, reattach=True
        )

    def status(self, handle: str) -> JobStatus:
        """Return the status that the supervisor wrote last; LOST for an unfinished run without a supervisor."""
        run = _parse_handle(handle)
        status = run.read_status()
        if status.state.is_final:
            return status
        if supervisor_pid(run) is not None or (status.state is JobState.PENDING and _is_starting(run)):
            return status
        status = run.read_status()  # the supervisor may have finished between the two checks
        if status.state.is_final:
            return status
        message = f"the supervisor of the run has exited; resume with: stoker job run --resume {run.id}"
        state = run.folder / "state.json"
        ended = state.stat().st_mtime if state.exists() else time.time()
        return _with_final_state(status, JobState.LOST, message, ended)

    def logs(self, handle: str, slot: Slot | None, *, follow: bool, tail: int | None = None) -> Iterator[SlotLogLine]:
        """Yield the log lines of one slot or all, attempt by attempt."""
        run = _parse_handle(handle)
        is_over = lambda: not follow or self.status(handle).state.is_final  # noqa: E731
        return read_run_logs(run, slot, is_over=is_over, tail=tail, pause=partial(_wait_for_supervisor, run))

    def stop(self, handle: str) -> None:
        """Signal the supervisor to stop the run and wait for it; without one, stop the leftover processes."""
        run = _parse_handle(handle)
        grace = float(run.job.grace)
        wait_until(lambda: run.read_status().began > 0 or not _is_starting(run), START_TIMEOUT_S)
        if (pid := supervisor_pid(run)) is not None:
            try:
                _signal_supervisor(run, pid, signal.SIGTERM)
                # An empty lock (0) belongs to a supervisor that is exiting.
                wait_until(lambda: supervisor_pid(run) not in (pid, 0), grace + 15)
            except KeyboardInterrupt:  # a second Ctrl-C skips the grace period, a third must not interrupt the kill
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            _signal_supervisor(run, pid, signal.SIGKILL)
            wait_until(lambda: supervisor_pid(run) not in (pid, 0), 5)
            grace = 0.0
        if supervisor_pid(run) is not None:  # the run was restarted meanwhile
            return
        stop_leftovers(run, grace)
        status = self.status(handle)
        if status.state is JobState.LOST:
            run.write_status(_with_final_state(status, JobState.STOPPED, STOPPED_MESSAGE, time.time()))


def _address_book(job: JobSpec, port: int, ports: dict[Slot, int]) -> AddressBook:
    return AddressBook(
        hosts=dict.fromkeys(list_slots(job), LOOPBACK),
        port=port,
        ports=ports,
        python=sys.executable,
        # By path and without site-packages, so that no module of the user can shadow them.
        profiler=(sys.executable, "-I", "-S", profiler.__file__),
        mpi_rank=(sys.executable, "-I", "-S", mpi_rank.__file__),
        cores_per_rank=len(os.sched_getaffinity(0)) // job.world_size,
        # The host name of a laptop often does not resolve.
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )


def _assign_ports(job: JobSpec) -> tuple[dict[Slot, int], dict[Slot, int]]:
    """Return the ports of slots that listen: those that the job file sets, and free ones for the others."""
    slots = listening_slots(job)
    requested = requested_ports(job, slots)
    others = [slot for slot in slots if slot not in requested]
    free = (port for port in find_free_ports(len(slots)) if port not in requested.values())
    return requested, dict(zip(others, free, strict=False))


def _check_ports(job: JobSpec) -> Iterator[Fault]:
    """Yield a fault for each port that the job file sets and another process uses."""
    requested = requested_ports(job, listening_slots(job))
    has_master = job.traits.has_rendezvous or job.traits.has_standby_workers  # rank 0 of mpirun listens on MASTER_PORT
    ports = requested.values() if requested else [job.port] if job.port and has_master else []
    for port in ports:
        if not is_free(port):
            what = f"port {port} is in use on this machine"
            yield Fault("port", f"{what}; set another port (--set port=N), or remove the key to use a free one")


def _check_mpirun(job: JobSpec) -> None:
    """Raise unless Open MPI 4 is installed, whose options we use."""
    hint = "install it: apt-get install openmpi-bin"
    program = shutil.which("mpirun", path=_search_path(job, Path.cwd()))
    if program is None:
        raise MissingProgramError("mpirun not found on the PATH; topology 'mpi' needs Open MPI 4", hint=hint)
    output = run_program([program, "--version"], timeout_s=START_TIMEOUT_S, check=False).stdout.strip()
    if re.match(r"mpirun \(Open MPI\) (4\.\S+)", output) is None:
        version = output.splitlines()[0] if output else "of unknown version"
        raise MissingProgramError(f"{program} is {version}; topology 'mpi' needs Open MPI 4", hint=hint)


def _count_workers(job: JobSpec) -> int:
    """Return how many workers fit on this machine: by GPUs where workers have some, else one."""
    return max(1, len(visible_gpus()) // job.resources.gpus) if job.resources.gpus else 1


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path.cwd() / path)


def _check_programs(job: JobSpec) -> Iterator[Fault]:
    for where, program in programs_by_key(job).items():
        folder = Path.cwd() / (program.cwd or "")
        if fault := find_missing_path(where, program):
            yield fault
        elif program.command and shutil.which(program.command[0], path=_search_path(job, folder)) is None:
            yield Fault(f"{where}.command", f"program {program.command[0]!r} not found on the PATH")
        else:
            yield from check_module(where, program.module, folder, job.env)


def _check_shards(key: str, url: str | None) -> Iterator[Fault]:
    if not url or "://" in url or "{" in url:
        return
    if not Path(url).exists():
        yield Fault(key, f"no such file or directory: {Path.cwd() / url}")
    elif Path(url).is_dir() and not any(_looks_like_shards(path) for path in Path(url).iterdir()):
        sets = sorted(str(path.parent) for path in Path(url).glob(f"*/{MANIFEST}"))
        if sets:
            yield Fault(key, f"found {pluralize(len(sets), 'shard set')}: {', '.join(sets)}; use one of them")
            return
        yield Fault(key, f"no shards found in {Path.cwd() / url}; create them with: stoker data convert SOURCE DEST")


def _looks_like_shards(path: Path) -> bool:
    return path.name == MANIFEST or ".tar" in path.suffixes or "tfrecord" in path.name or "-of-" in path.name


def _search_path(job: JobSpec, folder: Path) -> str:
    """Return the PATH of the program; a name with a slash is searched in its working directory."""
    return os.pathsep.join((job.env.get("PATH") or os.environ.get("PATH", os.defpath), str(folder)))


def _gpu_env(job: JobSpec, slot: Slot) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a slot, so that workers do not share GPUs."""
    if slot.role != "worker" and not job.traits.has_standby_workers:
        return {"CUDA_VISIBLE_DEVICES": ""}  # TensorFlow would allocate the memory of every visible GPU
    needed = sum_gpus(job, range(job.max_workers))
    if not needed or job.max_workers == 1:
        return {}
    if slot.role != "worker":  # mpirun, for all workers
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:needed])}
    first = sum_gpus(job, range(slot.index))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[first : first + job.resources_of(slot.index).gpus])}


def _ignored_settings(job: JobSpec) -> Iterator[str]:
    """Yield a note for each setting of the job file that has no effect on this machine."""
    if job.image:
        yield "image is ignored: the local launcher uses this Python environment, not containers"
    if job.checkpoint.claim:
        target = job.checkpoint.dir or "the run folder"
        yield f"checkpoint.claim is ignored: the local launcher writes checkpoints to {target}"
    if job.data.via == "cluster":
        yield "data.via: cluster is ignored: the local launcher reads data without the cluster's cache"


def _parse_handle(handle: str) -> RunFolder:
    return RunFolder(Path(handle.partition("://")[2]))


def _with_final_state(status: JobStatus, state: JobState, message: str, ended: float) -> JobStatus:
    """Return the status with a final state for the run and for its unfinished slots."""
    slots = tuple(
        slot if slot.state.is_final else msgspec.structs.replace(slot, state=state, pid=None) for slot in status.slots
    )
    return msgspec.structs.replace(status, state=state, slots=slots, message=message, ended=ended)


def _signal_supervisor(run: RunFolder, pid: int | None, number: signal.Signals) -> None:
    """Signal the supervisor of a run if it still is that process."""
    if pid and supervisor_pid(run) == pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_for_supervisor(run: RunFolder, timeout_s: float) -> None:
    """Wait until the supervisor of a run exits, for at most `timeout_s`."""
    if pid := supervisor_pid(run):
        wait_for_exit(pid, timeout_s)
    else:  # it is being started
        time.sleep(timeout_s)


def _is_starting(run: RunFolder) -> bool:
    return time.time() - run.folder.stat().st_mtime < START_TIMEOUT_S
