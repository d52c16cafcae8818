"""The runs of a Ray cluster, wherever they were started: list them, and follow one by the logs of its drivers.

A driver writes the output of its slots to its own log, which anyone who reaches the cluster can read. Each attempt of a
run is a Ray job of its own. Nothing is submitted, stopped or stored in the cluster.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from stoker.core.spec import load, to_json
from stoker.errors import NotFoundError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, JobStatus, SlotStatus
from stoker.jobs.topology import Slot
from stoker.launchers.followed_runs import ClusterRun
from stoker.launchers.ray.cluster import RayCluster, SubmittedJob
from stoker.launchers.ray.connection import DriverLog, LineQueue, drain_lines, parse_frame
from stoker.launchers.supervise.diagnosis import Diagnosis, diagnose_slot
from stoker.launchers.supervise.process_group import normalize_exit_code
from stoker.launchers.supervise.slot_handle import Exited

POSITIONS_FILE = "streams.json"
SILENCE_TIMEOUT_S = 120.0
"""Reconnect to a log that has been silent for this long; how often a driver sends heartbeats is not known here."""
SAVE_INTERVAL_S = 1.0
NOT_PLACED = "Ray has not placed all slots yet"
_SUBMISSION = re.compile(r"stoker-(?P<run>[A-Za-z0-9][A-Za-z0-9._-]{0,127})-(?P<attempt>\d{1,9})-[0-9a-f]{4}")
_SLOT = re.compile(r"[a-z][a-z0-9-]{0,31}/\d{1,6}")


class Submission(NamedTuple):
    """The Ray job of one attempt of a run."""

    run: str
    attempt: int
    job: SubmittedJob


class AttemptEnd(NamedTuple):
    """How an attempt ended, why, and the exit code of the slot that caused it."""

    state: JobState
    cause: str = ""
    code: int = 0


class SubmissionLog(msgspec.Struct, kw_only=True):
    """How much of the log of a driver has been copied, and what it has reported."""

    attempt: int
    frame: int = 0
    """The number of the last frame that was copied."""
    sizes: dict[str, int] = {}
    """The size of the log of each slot after that frame."""
    codes: dict[str, int] = {}
    errors: dict[str, str] = {}
    failure: str = ""
    is_placed: bool = False
    is_done: bool = False


class RayClusterRuns:
    """The runs of one Ray cluster."""

    def __init__(self, address: str) -> None:
        self._cluster = RayCluster(address)
        self.url = f"ray://{address.partition('://')[2]}"

    def list_runs(self) -> list[ClusterRun]:
        """List the runs of the cluster."""
        runs: dict[str, bool] = {}
        for submission in list_submissions(self._cluster):
            runs[submission.run] = runs.get(submission.run, False) or not submission.job.is_over
        return [ClusterRun(run_id, run_id.rsplit("-", 3)[0], is_active) for run_id, is_active in runs.items()]

    def follow(self, run: RunFolder) -> None:
        """Copy logs and status of a run into its folder until its newest attempt is over."""
        SubmissionFollower(self._cluster, run).follow()


def list_submissions(cluster: RayCluster) -> list[Submission]:
    """List the Ray jobs that are attempts of runs, by run and attempt."""
    found = [(match, job) for job in cluster.jobs() if (match := _SUBMISSION.fullmatch(job.name))]
    submissions = [Submission(match["run"], int(match["attempt"]), job) for match, job in found]
    return sorted(submissions, key=lambda one: (one.run, one.attempt, one.job.began))


class SubmissionFollower:
    """Follower of one run: copies the logs of its drivers, one attempt after the other."""

    def __init__(self, cluster: RayCluster, run: RunFolder) -> None:
        self._cluster, self._run = cluster, run
        self._logs: dict[str, SubmissionLog] = {}
        """By the name of the Ray job."""
        self._saved_at = 0.0

    def follow(self) -> None:
        """Follow the attempts that exist; a later attempt is followed by another call."""
        self._load_positions()
        submissions = [one for one in list_submissions(self._cluster) if one.run == self._run.id]
        if not submissions:
            raise NotFoundError(f"run {self._run.id} is not in the cluster", where=self._cluster.address)
        for submission in submissions:
            log = self._logs.setdefault(submission.job.name, SubmissionLog(attempt=submission.attempt))
            if not log.is_done:
                self._copy(submission, log, submissions)
        self._write_end(self._refresh(submissions))

    def _refresh(self, submissions: Sequence[Submission]) -> list[Submission]:
        """Return the submissions with their final state."""
        known = {one.job.name: one for one in list_submissions(self._cluster)}
        return [known.get(one.job.name, one) for one in submissions]

    def _copy(self, submission: Submission, log: SubmissionLog, submissions: Sequence[Submission]) -> None:
        """Copy the log of a driver until the driver reports its end, or is over without."""
        driver_log, lines = DriverLog(self._cluster, submission.job.name, SILENCE_TIMEOUT_S), LineQueue()
        threading.Thread(target=lambda: asyncio.run(driver_log.follow(lines)), daemon=True).start()
        self._write_progress(submission, log, submissions)
        for line in drain_lines(lines):
            frame = parse_frame(line) if line is not None else None
            if frame is not None and frame["n"] > log.frame:
                was_placed, ended = log.is_placed, len(log.codes)
                self._process_frame(frame, log)
                if (was_placed, ended) != (log.is_placed, len(log.codes)):
                    self._write_progress(submission, log, submissions)
            if time.monotonic() - self._saved_at > SAVE_INTERVAL_S:
                self._save_positions()
            if frame is not None and ("finished" in frame or "failed" in frame):
                break
        log.is_done = True
        log.failure = log.failure or ("" if log.codes else driver_log.exit_reason)
        self._save_positions()

    def _process_frame(self, frame: dict[str, Any], log: SubmissionLog) -> None:
        log.frame = frame["n"]
        name = str(frame.get("slot", ""))
        if _SLOT.fullmatch(name):
            log.is_placed = True
            if frame.get("data"):
                self._append(name, log, str(frame["data"]).encode("latin-1", errors="replace"))
            if "code" in frame:
                log.codes[name] = normalize_exit_code(int(frame["code"]))
                log.errors[name] = str(frame.get("error", ""))
        elif "addresses" in frame:
            log.is_placed = True
            for slot in frame["addresses"]:
                if _SLOT.fullmatch(slot):
                    log.sizes.setdefault(slot, 0)
        elif "failed" in frame:
            log.failure = f"the driver on Ray failed: {frame['failed']}"

    def _append(self, name: str, log: SubmissionLog, data: bytes) -> None:
        with open(self._run.log_path(Slot.parse(name), log.attempt), "ab") as file:
            file.write(data)
            log.sizes[name] = file.tell()

    # --- Status

    def _write_progress(self, submission: Submission, log: SubmissionLog, submissions: Sequence[Submission]) -> None:
        """Write the status of an attempt that is not over yet."""
        state = JobState.RUNNING if log.is_placed else JobState.PENDING
        status = JobStatus(
            state=state,
            attempt=log.attempt,
            slots=_slot_statuses(log, state),
            attempts=self._describe_attempts([one for one in submissions if one.attempt < submission.attempt]),
            message="" if log.is_placed else NOT_PLACED,
            began=submissions[0].job.began,
        )
        self._run.write_status(status)

    def _write_end(self, submissions: Sequence[Submission]) -> None:
        """Write the final status, that of the last attempt."""
        last, attempts = submissions[-1], self._describe_attempts(submissions)
        log = self._logs[last.job.name]
        end = self._find_end(last, log)
        status = JobStatus(
            state=end.state,
            attempt=log.attempt,
            slots=_slot_statuses(log, end.state),
            attempts=attempts,
            message=end.cause,
            began=submissions[0].job.began,
            ended=last.job.ended or time.time(),
        )
        self._run.write_status(status)

    def _find_end(self, submission: Submission, log: SubmissionLog) -> AttemptEnd:
        """Return how an attempt ended: of several failed slots, the one that explains the most counts."""
        failed = {name: code for name, code in log.codes.items() if code}
        if log.codes and not failed and not log.failure:
            return AttemptEnd(JobState.SUCCEEDED)
        is_stopped = bool(failed) and all(code == -signal.SIGTERM for code in failed.values())
        if submission.job.is_stopped or is_stopped:
            return AttemptEnd(JobState.STOPPED, STOPPED_MESSAGE, -signal.SIGTERM)
        if not failed:
            return AttemptEnd(JobState.FAILED, log.failure or submission.job.message)
        diagnoses = [self._diagnose(Slot.parse(name), code, log) for name, code in failed.items()]
        diagnosis = min(diagnoses, key=lambda one: one.sort_key)
        return AttemptEnd(JobState.FAILED, diagnosis.message, diagnosis.code)

    def _diagnose(self, slot: Slot, code: int, log: SubmissionLog) -> Diagnosis:
        return diagnose_slot(slot, Exited(code, log.errors[str(slot)]), self._run.log_path(slot, log.attempt))

    def _describe_attempts(self, submissions: Sequence[Submission]) -> tuple[Attempt, ...]:
        attempts: dict[int, Attempt] = {}
        for one in submissions:
            if (log := self._logs.get(one.job.name)) is None or not log.is_done:
                continue
            end, ended = self._find_end(one, log), one.job.ended or time.time()
            attempts[one.attempt] = Attempt(
                number=one.attempt, began=one.job.began, ended=ended, code=end.code, cause=end.cause
            )
        return tuple(attempts.values())

    # --- Positions

    def _load_positions(self) -> None:
        path = self._run.folder / POSITIONS_FILE
        if path.exists():
            self._logs = load(path.read_bytes(), dict[str, SubmissionLog], path)
        for log in self._logs.values():
            for name, size in log.sizes.items():
                copy = self._run.log_path(Slot.parse(name), log.attempt)
                if copy.exists():  # frames after the saved one will be copied again
                    os.truncate(copy, min(size, copy.stat().st_size))

    def _save_positions(self) -> None:
        self._saved_at = time.monotonic()
        self._run.write(POSITIONS_FILE, to_json(self._logs))


def _slot_statuses(log: SubmissionLog, state: JobState) -> tuple[SlotStatus, ...]:
    statuses = []
    for name in sorted({*log.sizes, *log.codes}, key=Slot.parse):
        code = log.codes.get(name)
        own = state if code is None else JobState.SUCCEEDED if code == 0 else JobState.FAILED
        if own is JobState.FAILED and state is JobState.STOPPED:
            own = JobState.STOPPED
        statuses.append(SlotStatus(slot=name, state=own, code=code))
    return tuple(statuses)
