"""Delete finished runs: what would be deleted, as a value, and the deletion itself."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.core import json_io
from stoker.errors import ConflictError, SpecError
from stoker.jobs.run_folder import RunFolder, list_runs, stoker_home
from stoker.jobs.run_lookup import get_known_state
from stoker.jobs.status import JobState
from stoker.launchers.ssh.launcher import may_still_run
from stoker.storage import redacted
from stoker.storage.local import translate_os_errors

_DELETED_SUFFIX = ".deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDeletion:
    """What deleting a run removes, and what of it remains elsewhere."""

    run: str
    folder: str
    state: JobState
    ended: float
    bytes: int
    checkpoints: tuple[str, ...]
    """Checkpoint files in the run folder, which are deleted with it."""
    kept: tuple[str, ...]
    users: tuple[str, ...]
    """Other finished runs whose checkpoints are in the run folder."""


def find_expired(age_s: float) -> list[RunFolder]:
    """Return the runs that finished, or were lost, longer ago."""
    limit = time.time() - age_s
    return [run for run in list_runs() if get_known_state(run).is_final and _end_time(run) <= limit]


def find_checkpoint_users() -> dict[RunFolder, Path]:
    """Return the runs whose checkpoints are in a run folder, which may be that of another run, with that path."""
    users = {}
    for run in list_runs():
        with suppress(OSError, SpecError):  # it is being deleted, or its job cannot be read
            if run.job.checkpoint.dir and Path(run.job.checkpoint.dir).is_relative_to(run.folder.parent):
                users[run] = Path(run.job.checkpoint.dir)
    return users


def plan_deletion(run: RunFolder, checkpoint_users: Mapping[RunFolder, Path] | None = None) -> RunDeletion:
    """Return what deleting a run removes; raise ConflictError if it may be running or its checkpoints are in use.

    Pass the result of `find_checkpoint_users` to plan several deletions, because it reads every job.
    """
    with translate_os_errors(run.folder):  # another process may be deleting it
        all_users = find_checkpoint_users() if checkpoint_users is None else checkpoint_users
        users = {
            other.id: get_known_state(other)
            for other, folder in all_users.items()
            if other != run and folder.is_relative_to(run.folder)
        }
        state = get_known_state(run)
        _check_unused(run, state, users)
        files = [path for path in run.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        folder = run.folder / "checkpoints"
        checkpoints = [path for path in files if path.is_relative_to(folder) and path.name[0] != "."]
        return RunDeletion(
            run=run.id,
            folder=str(run.folder),
            state=state,
            ended=_end_time(run),
            bytes=sum(path.stat().st_size for path in files),
            checkpoints=tuple(sorted(str(path.relative_to(run.folder)) for path in checkpoints)),
            kept=tuple(_list_kept(run)),
            users=tuple(users),
        )


def delete_run(deletion: RunDeletion) -> None:
    """Delete a run folder, unless another process has; a run that was resumed meanwhile is not deleted."""
    folder = Path(deletion.folder)
    doomed = folder.with_name(f".{folder.name}{_DELETED_SUFFIX}")
    with translate_os_errors(folder), suppress(FileNotFoundError), open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"run {deletion.run} was resumed", hint="stop it before you delete it") from error
        folder.rename(doomed)  # an interrupted deletion leaves no run that looks complete
    with translate_os_errors(folder):
        while doomed.exists():
            with suppress(FileNotFoundError):  # another deletion removes it as a leftover at the same time
                shutil.rmtree(doomed)
    for leftover in (stoker_home() / "runs").glob(f".*{_DELETED_SUFFIX}"):  # of interrupted deletions
        shutil.rmtree(leftover, ignore_errors=True)


def _check_unused(run: RunFolder, state: JobState, users: Mapping[str, JobState]) -> None:
    """Raise ConflictError if a run may be running, or another run that uses its checkpoints."""
    hint = f"stop it first: stoker job stop {run.id}"
    if state is JobState.LOST:
        raise ConflictError(f"run {run.id} was lost, and its processes may still be running", hint=hint)
    if not state.is_final:
        raise ConflictError(f"run {run.id} is {state}", hint=hint)
    if run.handle.startswith("ssh://") and may_still_run(run):
        raise ConflictError(f"run {run.id} is {state}, but its slots may still be running on a host", hint=hint)
    if run.kept:
        raise ConflictError(f"run {run.id} has left processes running", hint=hint)
    for user, user_state in users.items():
        if _may_be_running(user_state):
            what = f"run {user}, which is {user_state}, uses the checkpoints of {run.id}"
            raise ConflictError(what, hint=f"stop it first: stoker job stop {user}")


def _may_be_running(state: JobState) -> bool:
    return not state.is_final or state is JobState.LOST


def _end_time(run: RunFolder) -> float:
    return run.read_status().ended or (run.folder / "handle").stat().st_mtime


def _list_kept(run: RunFolder) -> Iterator[str]:
    """Yield what a run has written elsewhere, which is not deleted."""
    job, kind = run.job, run.handle.partition("://")[0]
    directory = job.checkpoint.dir
    if directory is not None and not Path(directory).is_relative_to(run.folder):
        yield f"checkpoints in {redacted(directory)}"
    if isinstance(job.tensorboard, str):
        yield f"event files in {job.tensorboard}"
    if kind == "ssh":
        yield f"files on its hosts in .stoker/{run.id} of the working directory"
    elif kind == "ray" and (_read_plan(run).get("address") or _read_plan(run).get("nodes")):
        yield f"files on its nodes in ~/stoker/{run.id}"
    elif kind == "k8s":
        yield f"objects in {run.handle.rpartition('/')[0]}, which expire"


def _read_plan(run: RunFolder) -> dict[str, object]:
    path = run.folder / "plan.json"
    plan: dict[str, object] = json_io.parse(json_io.read_file(path), path)
    return plan
