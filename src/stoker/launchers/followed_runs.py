"""Follow the runs of a cluster that others started: copy their logs and status into run folders of this machine.

Nothing is changed in the cluster. A thread follows each run as long as this process runs; the copies stay, and can be
read without the cluster. What a cluster reports is not trusted: IDs of runs become names of directories.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from stoker.errors import InputError, StokerError
from stoker.jobs.run_folder import RunFolder, sort_key, stoker_home
from stoker.jobs.run_lookup import open_launcher
from stoker.jobs.status import JobState, JobStatus
from stoker.launchers.supervise.supervisor import supervisor_lock, supervisor_pid
from stoker.storage.local import translate_os_errors

FOLDER = "followed"
LIST_INTERVAL_S = 5.0
RETRY_S = 60.0
"""Between two attempts to follow a run that could not be followed."""
MAX_FINISHED = 20
"""Finished runs that are copied, the newest ones."""
GONE_MESSAGE = "the run is no longer in the cluster"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ClusterRun(NamedTuple):
    """A run as its cluster lists it."""

    id: str
    job: str
    is_active: bool


class ClusterRuns(Protocol):
    """The runs of one cluster; it reads them, and changes nothing."""

    url: str
    """The target, as `--on` takes it."""

    def list_runs(self) -> list[ClusterRun]:
        """List the runs of the cluster."""
        ...

    def follow(self, run: RunFolder) -> None:
        """Copy logs and status of a run into its folder until the run has finished."""
        ...


class FollowedRuns:
    """Copies of the runs of a cluster, all or those with these IDs or job names."""

    def __init__(self, source: ClusterRuns, names: Sequence[str] = ()) -> None:
        self.url, self._source, self._names = source.url, source, names
        self.folder = stoker_home() / FOLDER / re.sub(r"[^A-Za-z0-9._-]+", "-", source.url)
        self._threads: dict[str, threading.Thread] = {}
        self._failed_at: dict[str, float] = {}
        self._own: set[str] = set()
        """IDs of runs that were started from this machine, and have an up-to-date run folder."""
        self._stopped = threading.Event()

    def start(self) -> None:
        """List the runs and begin to follow them; raise StokerError if the cluster cannot be reached."""
        with translate_os_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.refresh()
        threading.Thread(target=self._refresh_forever, name="followed-runs", daemon=True).start()

    def stop(self) -> None:
        """Follow no further runs; threads that follow one end with this process."""
        self._stopped.set()

    def list_folders(self) -> list[RunFolder]:
        """Return the run folders, newest first."""
        copies = [path.name for path in self.folder.iterdir() if (path / "handle").is_file() and self._is_named(path)]
        ids = sorted({*copies, *self._own}, key=sort_key, reverse=True)
        return [_own_folder(run_id) if run_id in self._own else RunFolder(self.folder / run_id) for run_id in ids]

    def refresh(self) -> None:
        """List the runs of the cluster, and start a thread for each that is not followed yet."""
        rows = [row for row in self._source.list_runs() if _RUN_ID.fullmatch(row.id) and self._is_wanted(row)]
        rows.sort(key=lambda row: sort_key(row.id), reverse=True)
        self._own = {row.id for row in rows if _is_up_to_date(_own_folder(row.id))}
        finished = [row.id for row in rows if not row.is_active][:MAX_FINISHED]
        for row in rows:
            is_needed = row.is_active or (row.id in finished and not self._read_status(row.id).state.is_final)
            if is_needed and row.id not in self._own and not self._is_followed(row.id):
                self._threads[row.id] = threading.Thread(target=self._follow, args=[row.id], daemon=True)
                self._threads[row.id].start()
        self._close_gone({row.id for row in rows})

    def _refresh_forever(self) -> None:
        while not self._stopped.wait(LIST_INTERVAL_S):
            try:
                self.refresh()
            except (StokerError, OSError):
                continue  # followers report the outage in the status of their runs

    def _follow(self, run_id: str) -> None:
        run = RunFolder(self.folder / run_id)
        try:
            run.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            if supervisor_pid(run) is not None:
                return  # another dashboard follows it into the same folder
            with supervisor_lock(run):
                if not (run.folder / "handle").exists():
                    run.write("handle", f"{self._source.url}/{run_id}\n".encode())
                self._source.follow(run)
        except (StokerError, OSError) as error:
            self._failed_at[run_id] = time.monotonic()
            _write_lost(run, str(error))

    def _is_followed(self, run_id: str) -> bool:
        thread = self._threads.get(run_id)
        is_running = thread is not None and thread.is_alive()
        return is_running or time.monotonic() - self._failed_at.get(run_id, float("-inf")) < RETRY_S

    def _is_wanted(self, row: ClusterRun) -> bool:
        return not self._names or row.id in self._names or row.job in self._names

    def _is_named(self, path: Path) -> bool:
        return not self._names or path.name in self._names or RunFolder(path).name in self._names

    def _read_status(self, run_id: str) -> JobStatus:
        return RunFolder(self.folder / run_id).read_status()

    def _close_gone(self, listed: set[str]) -> None:
        """Record that a run which nobody follows is gone from the cluster."""
        for run in self.list_folders():
            is_open = run.id not in listed and run.id not in self._own and not run.read_status().state.is_final
            if is_open and not self._is_followed(run.id) and supervisor_pid(run) is None:
                _write_lost(run, GONE_MESSAGE)


def open_cluster_runs(target: str) -> ClusterRuns:
    """Return the runs of the cluster that `--on` names; raise InputError for other targets."""
    launcher: Any = open_launcher(target)
    if not launcher.traits.follows_runs:
        raise InputError(
            f"--on {target}: runs that others started cannot be followed there",
            hint="use k8s://context/namespace or ray://host:port; omit --on for the runs of this machine",
        )
    runs: ClusterRuns = launcher.open_runs()
    return runs


def _own_folder(run_id: str) -> RunFolder:
    return RunFolder(stoker_home() / "runs" / run_id)


def _is_up_to_date(run: RunFolder) -> bool:
    """Whether a run was started from this machine, and its own follower or supervisor is at work or has finished."""
    if not (run.folder / "handle").is_file():
        return False
    state = run.read_status().state
    return supervisor_pid(run) is not None or (state.is_final and state is not JobState.LOST)


def _write_lost(run: RunFolder, message: str) -> None:
    try:
        status = run.read_status()
        changes = {"state": JobState.LOST, "message": message, "ended": status.ended or time.time()}
        run.write_status(msgspec.structs.replace(status, **changes))
    except (StokerError, OSError):
        pass  # the folder was deleted, or the disk is full
