"""Runs that the dashboard shows: their folders and indexes. IDs from requests are checked here."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from stoker.errors import NotFoundError, StokerError
from stoker.jobs.run_folder import STATUS_FILE, RunFolder, list_runs
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import sum_prices
from stoker.launchers.followed_runs import FollowedRuns
from stoker.telemetry.run_index import RunIndex

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class DashboardRun:
    """One run: its folder, and its index, which all requests share under a lock.

    With `is_followed`, the folder is a copy of a run that others started.
    """

    def __init__(self, folder: RunFolder, *, is_followed: bool = False) -> None:
        self.folder, self.is_followed = folder, is_followed
        self.lock = threading.RLock()
        self.stacks_lock = threading.Lock()
        """Held while the stacks of the ranks are requested."""
        self._index: RunIndex | None = None
        self._refreshed = -1e9
        self._status: tuple[tuple[int, int, int], JobStatus] | None = None

    @property
    def id(self) -> str:
        """The ID of the run."""
        return self.folder.id

    def status(self) -> JobStatus:
        """Return the last known status; that of a large run takes a while to decode, and is kept until it changes."""
        try:
            stat = (self.folder.folder / STATUS_FILE).stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if self._status is None or self._status[0] != version:
                self._status = (version, self.folder.read_status())
            return self._status[1]
        except FileNotFoundError:
            return self.folder.read_status()
        except (StokerError, OSError):
            return JobStatus(state=JobState.LOST, message="state.json cannot be read")

    @cached_property
    def price_per_hour(self) -> float | None:
        """The price of all slots per hour; None if the job file has none, or cannot be read."""
        try:
            return sum_prices(self.folder.job)
        except (StokerError, OSError):
            return None

    def index(self, max_age_s: float = 1.0) -> RunIndex:
        """Return the index, not older than this; call it, and use the index, with `lock` held."""
        if self._index is None:
            self._index = RunIndex(self.folder.logs)
        if time.monotonic() - self._refreshed >= max_age_s:
            if not self.folder.folder.is_dir():
                raise NotFoundError(f"run {self.id} was deleted")
            self._index.refresh()
            self._refreshed = time.monotonic()
        return self._index

    def job_yaml(self) -> str:
        """Return the job file; empty if it cannot be read."""
        try:
            return (self.folder.folder / "job.yaml").read_text(errors="replace")
        except OSError:
            return ""


class RunCatalog:
    """The runs that are shown: those named on the command line, all runs of this machine, or those of a cluster."""

    def __init__(self, folders: Sequence[Path] = (), followed: FollowedRuns | None = None) -> None:
        self._folders, self._followed = [RunFolder(folder) for folder in folders], followed
        self._runs: dict[str, DashboardRun] = {}
        self._lock = threading.Lock()

    def list(self) -> list[DashboardRun]:
        """Return the runs, newest first; the list of a machine changes while the dashboard is open."""
        followed = self._followed
        folders = self._folders or (list_runs() if followed is None else followed.list_folders())
        with self._lock:
            known = {
                run.id: self._runs[run.id] if self._is_known(run) else DashboardRun(run, is_followed=self._is_copy(run))
                for run in folders
            }
            self._runs = known
        return [*known.values()]

    @property
    def target(self) -> str:
        """The cluster whose runs are followed; empty for the runs of this machine."""
        return "" if self._followed is None else self._followed.url

    def _is_known(self, run: RunFolder) -> bool:
        return run.id in self._runs and self._runs[run.id].folder == run

    def _is_copy(self, run: RunFolder) -> bool:
        return self._followed is not None and run.folder.parent == self._followed.folder

    def find(self, run_id: str) -> DashboardRun:
        """Return a run by its ID; raise NotFoundError for any other text."""
        if _ID.fullmatch(run_id):
            run = self._runs.get(run_id) or next((run for run in self.list() if run.id == run_id), None)
            if run is not None:
                return run
        raise NotFoundError("no such run")
