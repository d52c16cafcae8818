"""Slurm launcher: submit a run as one batch job, whose script starts, watches and retries the slots.

After `start` a run depends on no process on this machine: its logs, exit codes and records are files in the run folder,
which the login node and the compute nodes share.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import msgspec

from stoker.core.processes import defer_signal, wait_until
from stoker.core.spec import run_checks
from stoker.errors import ConflictError, Fault, NotFoundError, UnavailableError
from stoker.jobs.launcher import LauncherTraits, SlotLogLine, check_traits, raise_faults
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder, stoker_home
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, JobState, JobStatus
from stoker.jobs.topology import Slot
from stoker.launchers.checks import check_module, check_secret_env, check_secret_files, check_via, find_missing_path
from stoker.launchers.paths import programs_by_key, resolve_job_paths
from stoker.launchers.run_logs import read_run_logs
from stoker.launchers.slurm.commands import JobQuery, cancel, require_slurm, submit
from stoker.launchers.slurm.plan import SlurmPlan, read_slurm_plan
from stoker.launchers.slurm.records import BATCH_LOG, JOB_ID_FILE, derive_status, read_records
from stoker.launchers.slurm.script import MPI_RANK, PROFILER, build_script, list_tasks
from stoker.remote import mpi_rank, profiler

SCRIPT = "slurm.sh"
STOP_MARGIN_S = 45.0
"""After the grace period, for the script to record the end and for Slurm to notice it."""
KILL_TIMEOUT_S = 90.0
"""For a cancelled job: Slurm's own KillWait is 30 s by default."""
STOP_POLL_S = 0.5
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")


class SlurmLauncher:
    """Launcher for Slurm: slots are the tasks of one job step."""

    traits: ClassVar[LauncherTraits] = LauncherTraits(
        name="slurm", supports_standby_workers=True, supports_address_per_slot=True, shares_files=True
    )

    def __init__(self) -> None:
        self._query = JobQuery()

    def resolve_paths(self, job: JobSpec) -> JobSpec:
        """Resolve relative paths against the current directory, which the nodes share."""
        return resolve_job_paths(job, str(Path.cwd()))

    def check(self, job: JobSpec) -> Iterator[Fault]:
        """Yield what no cluster can run, and files that do not exist."""
        yield from check_traits(job, self.traits)
        yield from run_checks(
            job,
            _check_workers,
            _check_gpu_roles,
            _check_tensorboard,
            _check_programs,
            lambda job: _check_shards("data.train", job.data.train),
            lambda job: _check_shards("data.val", job.data.val),
            check_via,
            check_secret_env,
            check_secret_files,
        )

    def render(self, job: JobSpec) -> SlurmPlan:
        """Return the batch script; nothing is submitted, and Slurm is not contacted."""
        raise_faults(self.check(job))
        notes = tuple(_list_notes(job))
        job = self.resolve_paths(job)
        return SlurmPlan(
            script=build_script(job, job.slurm.python or sys.executable), workdir=str(Path.cwd()), notes=notes
        )

    def start(self, rendered: SlurmPlan, run: RunFolder, *, detach: bool = False) -> str:  # noqa: ARG002
        """Submit the batch script of a run and return its handle."""
        require_slurm()
        run.write(SCRIPT, rendered.script.encode())
        shutil.copy(profiler.__file__, run.folder / PROFILER)
        shutil.copy(mpi_rank.__file__, run.folder / MPI_RANK)
        self._submit(run, rendered)
        return run.handle

    def restart(self, run: RunFolder, *, detach: bool = False) -> None:  # noqa: ARG002
        """Submit a finished run again; attempt numbers continue."""
        if (queued := self._query.get(_read_job_id(run), max_age_s=0)) is not None and not queued.is_over:
            raise ConflictError(f"its Slurm job is {queued.state.lower()}", where=run.id)
        self._submit(run, read_slurm_plan(run))

    def _submit(self, run: RunFolder, plan: SlurmPlan) -> None:
        """Submit a run; an interrupt meanwhile is deferred, so that no job is left without a record."""
        with defer_signal(signal.SIGINT):
            job_id = submit(
                run.folder / SCRIPT, str(run.folder), output=run.folder / BATCH_LOG, workdir=Path(plan.workdir)
            )
            (run.folder / STOP_REQUEST_FILE).unlink(missing_ok=True)
            status = msgspec.structs.replace(run.read_status(), state=JobState.PENDING, ended=None, message="")
            run.write_status(msgspec.structs.replace(status, began=time.time()))
            run.write(JOB_ID_FILE, f"{job_id}\n".encode())
            run.write("handle", f"slurm://{run.folder}\n".encode())

    def status(self, handle: str) -> JobStatus:
        """Return the status of a run, and keep it in the run folder."""
        return self._update_status(_parse_handle(handle))

    def _update_status(self, run: RunFolder, *, max_age_s: float | None = None) -> JobStatus:
        before = run.read_status()
        if before.state.is_final and before.state is not JobState.LOST:
            return before
        job_id = _read_job_id(run)
        queued = None
        if job_id not in read_records(run).finished:
            queued = self._query.get(job_id) if max_age_s is None else self._query.get(job_id, max_age_s=max_age_s)
        # Read after the query: the script may have finished in between.
        status = derive_status(run, run.job, read_records(run), job_id, queued)
        if status.state.is_final and status.ended is None:
            status = msgspec.structs.replace(status, ended=time.time())
        if status != before:
            run.write_status(status)
        return status

    def logs(self, handle: str, slot: Slot | None, *, follow: bool, tail: int | None = None) -> Iterator[SlotLogLine]:
        """Yield the log lines of one slot or all, attempt by attempt."""
        run = _parse_handle(handle)

        def is_over() -> bool:
            with suppress(UnavailableError):  # the run continues while the controller is restarted
                return self._update_status(run).state.is_final or not follow
            return not follow

        return read_run_logs(run, slot, is_over=is_over, tail=tail)

    def stop(self, handle: str) -> None:
        """Signal the batch script to stop the run and wait for it; cancel the job after the grace period."""
        run = _parse_handle(handle)
        job_id, grace = _read_job_id(run), float(run.job.grace)
        if run.read_status().state.is_final and not self._is_queued(job_id):
            return
        (run.folder / STOP_REQUEST_FILE).touch()
        try:
            cancel(job_id, "--state=PENDING")
            cancel(job_id, "--batch", "--signal=USR2")
            is_over = wait_until(lambda: not self._is_queued(job_id), grace + STOP_MARGIN_S, max_interval_s=STOP_POLL_S)
        except KeyboardInterrupt:  # a second Ctrl-C skips the grace period, a third must not interrupt the kill
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            is_over = False
        if not is_over:
            cancel(job_id)
            if not wait_until(lambda: not self._is_queued(job_id), KILL_TIMEOUT_S, max_interval_s=STOP_POLL_S):
                hint = f"its nodes may be unreachable; look at it with: scontrol show job {job_id}"
                raise UnavailableError(f"Slurm job {job_id} is still ending", where=run.id, hint=hint)
        status = self._update_status(run, max_age_s=0)
        if status.state is JobState.LOST:
            changes = {"state": JobState.STOPPED, "message": STOPPED_MESSAGE}
            run.write_status(msgspec.structs.replace(status, **changes))

    def _is_queued(self, job_id: str) -> bool:
        queued = self._query.get(job_id, max_age_s=0)
        return queued is not None and not queued.is_over


def _parse_handle(handle: str) -> RunFolder:
    return RunFolder(Path(handle.partition("://")[2]))


def _read_job_id(run: RunFolder) -> str:
    try:
        return (run.folder / JOB_ID_FILE).read_text().strip()
    except FileNotFoundError as error:
        raise NotFoundError(f"{JOB_ID_FILE} not found", where=run.folder, hint="the run was never started") from error


# --- Checks


def _check_workers(job: JobSpec) -> Iterator[Fault]:
    if job.workers == "all":
        yield Fault("workers", "'all' is not supported on slurm, which decides later what is free; set a number")


def _check_gpu_roles(job: JobSpec) -> Iterator[Fault]:
    """Reject GPUs where some slots have none: all tasks of a Slurm job get the same resources."""
    others = list(dict.fromkeys(slot.role for slot in list_tasks(job) if slot.role != "worker"))
    if job.resources_of(0).gpus and others:
        what = f"all slots of a job on slurm get the same resources, but {', '.join(others)} cannot use GPUs"
        yield Fault("resources.gpu", f"{what}; remove the roles or the GPUs")
    for name, role in job.roles.items():
        if role.resources.gpus:
            yield Fault(f"roles.{name}.resources.gpu", "only workers can have GPUs here; remove this key")


def _check_tensorboard(job: JobSpec) -> Iterator[Fault]:
    if job.tensorboard:
        what = "not supported on slurm: no process of Stoker watches the run and could write event files; remove it"
        yield Fault("tensorboard", what)


def _check_programs(job: JobSpec) -> Iterator[Fault]:
    for where, program in programs_by_key(job).items():
        folder = Path.cwd() / (program.cwd or "")
        if fault := find_missing_path(where, program):
            yield fault
        elif job.slurm.python is None and job.slurm.setup is None:
            yield from check_module(where, program.module, folder, job.env)


def _check_shards(key: str, path: str | None) -> Iterator[Fault]:
    if path and "://" not in path and "{" not in path and not Path(path).exists():
        yield Fault(key, f"no such file or directory: {Path.cwd() / path}")


def _list_notes(job: JobSpec) -> Iterator[str]:
    """Yield warnings, and a note for each setting of the job file that has no effect on Slurm."""
    for what, path in {"STOKER_HOME": stoker_home(), "the current directory": Path.cwd()}.items():
        if any(path.is_relative_to(folder) for folder in _NODE_LOCAL):
            yield f"{what} is {path}, which compute nodes usually do not share; use a shared file system"
    if job.image:
        yield "image is ignored: the Slurm launcher does not start containers"
    if job.checkpoint.claim:
        yield f"checkpoint.claim is ignored: checkpoints are written to {job.checkpoint.dir or 'the run folder'}"
    if job.data.via == "cluster":
        yield "data.via: cluster is ignored: the Slurm launcher reads data without a Kubernetes cluster's cache"
