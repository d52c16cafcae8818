"""Delete finished runs: what would be deleted, as a value, and the deletion itself."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import ConflictError
from stoker.jobs.run_folder import RunFolder, list_runs, stoker_home
from stoker.jobs.run_lookup import get_known_state
from stoker.jobs.status import JobState
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


def find_expired(age_s: float) -> list[RunFolder]:
    """Return the runs that finished, or were lost, longer ago."""
    limit = time.time() - age_s
    return [run for run in list_runs() if get_known_state(run).is_final and _end_time(run) <= limit]


def plan_deletion(run: RunFolder) -> RunDeletion:
    """Return what deleting a run removes; raise ConflictError if it is running or its checkpoints are in use."""
    state = get_known_state(run)
    if state is JobState.LOST:
        what = f"run {run.id} was lost, and its processes may still be running"
        raise ConflictError(what, hint=f"stop it first: stoker job stop {run.id}")
    if not state.is_final:
        raise ConflictError(f"run {run.id} is {state}", hint=f"stop it first: stoker job stop {run.id}")
    if user := next(_running_users(run), None):
        raise ConflictError(f"run {user.id}, which is running, uses the checkpoints of {run.id}")
    files = [path for path in run.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    checkpoints = [path for path in files if path.is_relative_to(run.folder / "checkpoints") and path.name[0] != "."]
    return RunDeletion(
        run=run.id,
        folder=str(run.folder),
        state=state,
        ended=_end_time(run),
        bytes=sum(path.stat().st_size for path in files),
        checkpoints=tuple(sorted(str(path.relative_to(run.folder)) for path in checkpoints)),
        kept=tuple(_list_kept(run)),
    )


def delete_run(deletion: RunDeletion) -> None:
    """Delete a run folder; a run that was resumed meanwhile is not deleted."""
    folder = Path(deletion.folder)
    doomed = folder.with_name(f".{folder.name}{_DELETED_SUFFIX}")
    with translate_os_errors(folder), open(folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"run {deletion.run} was resumed", hint="stop it before you delete it") from error
        folder.rename(doomed)  # an interrupted deletion leaves no run that looks complete
    remove_leftovers()


def remove_leftovers() -> None:
    """Remove what this deletion, or an interrupted one, has renamed."""
    for path in (stoker_home() / "runs").glob(f".*{_DELETED_SUFFIX}"):
        with translate_os_errors(path):
            shutil.rmtree(path)


def _end_time(run: RunFolder) -> float:
    return run.read_status().ended or (run.folder / "handle").stat().st_mtime


def _running_users(run: RunFolder) -> Iterator[RunFolder]:
    """Yield running runs whose checkpoints are in the folder of this run."""
    for other in list_runs():
        if other != run and not other.read_status().state.is_final:
            uses_folder = Path(other.checkpoint_dir).is_relative_to(run.folder)
            if uses_folder and not get_known_state(other).is_final:
                yield other


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
    elif kind == "ray" and _read_plan(run).get("address"):
        yield f"files on its nodes in ~/stoker/{run.id}"
    elif kind == "k8s":
        yield f"objects in {run.handle.rpartition('/')[0]}, which expire"


def _read_plan(run: RunFolder) -> dict[str, object]:
    plan: dict[str, object] = json.loads((run.folder / "plan.json").read_bytes())
    return plan
