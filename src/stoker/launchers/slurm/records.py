"""Records that the batch script leaves in the run folder, and the status of a run that follows from them.

slurm.records lists what happened, one line each: time, event and arguments; the last argument is the Slurm job ID.

    1700000000.1 began 0 123 node[1-2]      attempt 0 began on these nodes
    1700000060.2 ended 0 failed 137 123     attempt 0 ended: succeeded, failed, limit, stopped or interrupted; exit code
    1700000061.3 finished failed 123        the script ended for good: succeeded, failed, stopped or limit

exit.<attempt>.<role>-<index> has the exit code of a slot, as a shell reports it. slurm.job has the current job ID.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import msgspec

from stoker.jobs.retry_policy import INVALID_INPUT, attempts_exhausted, not_retried
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, JobStatus, SlotStatus, signal_from_exit_code
from stoker.jobs.topology import Slot, lead_slots, list_slots, observer_slots
from stoker.launchers.slurm.batch import LIMIT_REASON, NOT_RETRIED_CODES, RECORDS, REQUEUE_REASON
from stoker.launchers.slurm.commands import QueuedJob
from stoker.launchers.supervise.diagnosis import LOG_SEPARATOR, diagnose_slot, insert_note
from stoker.launchers.supervise.slot_handle import Exited
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.reader import read_log

JOB_ID_FILE = "slurm.job"
BATCH_LOG = "slurm.log"
"""Output of the batch script and of srun."""
CANCELLED_MESSAGE = "was cancelled, but not by `stoker job stop`"
_END_REASONS = {
    "BOOT_FAIL": "failed because a node did not boot",
    "DEADLINE": "was ended at its deadline",
    "NODE_FAIL": "failed with one of its nodes, and Slurm did not requeue it",
    "OUT_OF_MEMORY": "ran out of memory; request more with resources.memory",
    "PREEMPTED": "was preempted, and Slurm did not requeue it",
    "TIMEOUT": "reached its time limit before its programs had exited; increase slurm.time or decrease grace",
}


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt as the script recorded it; without an outcome it is running, or was ended by Slurm."""

    number: int
    began: float
    job_id: str
    ended: float | None = None
    outcome: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Records:
    """All records of a run."""

    attempts: Sequence[AttemptRecord] = ()
    finished: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """How and when the script ended for good, by Slurm job ID."""


def read_records(run: RunFolder) -> Records:
    """Read the records of a run; an incomplete last line is ignored."""
    attempts: dict[int, AttemptRecord] = {}
    finished: dict[str, tuple[str, float]] = {}
    with suppress(FileNotFoundError):
        for line in (run.folder / RECORDS).read_text().splitlines():
            match line.split():
                case [time, "began", number, job_id, _]:
                    attempts[int(number)] = AttemptRecord(int(number), float(time), job_id)
                case [time, "ended", number, outcome, code, job_id]:
                    began = attempts[int(number)].began
                    attempts[int(number)] = AttemptRecord(
                        int(number), began, job_id, float(time), outcome, to_exit_code(int(code))
                    )
                case [time, "finished", state, job_id]:
                    finished[job_id] = state, float(time)
    return Records(list(attempts.values()), finished)


def to_exit_code(code: int) -> int:
    """Return an exit code of a shell with death by a signal as the negative signal."""
    return -number if (number := signal_from_exit_code(code)) else code


def read_exit_codes(run: RunFolder, job: JobSpec, record: AttemptRecord) -> dict[Slot, int | None]:
    """Return the exit code of every slot in an attempt; None without a record."""
    codes: dict[Slot, int | None] = {}
    for slot in list_slots(job):
        codes[slot] = None
        with suppress(FileNotFoundError, ValueError):
            codes[slot] = to_exit_code(int((run.folder / f"exit.{record.number}.{slot.filename}").read_text()))
        if job.traits.has_standby_workers and record.outcome and slot not in lead_slots(job):
            codes[slot] = _read_rank_exits(run.log_path(slot, record.number))
    return codes


def _read_rank_exits(log: Path) -> int | None:
    """Return the exit code of a worker of mpirun from the events of its ranks: that of the first one that failed."""
    if not log.exists():
        return None
    marks = (event.fields for event in read_log(log).events if event.kind == "mark")
    codes = [int(fields.get("code", 0)) for fields in marks if fields.get("name") == RANK_EXIT_MARK]
    return next(filter(None, codes), 0) if codes else None


def derive_status(run: RunFolder, job: JobSpec, records: Records, job_id: str, queued: QueuedJob | None) -> JobStatus:
    """Return the status of a run from its records, and from its Slurm job if they have no final one."""
    before = run.read_status()
    finished, finished_at = records.finished.get(job_id, ("", None))
    state, message = _derive_state(run, records, job_id, finished, queued)
    is_over = state.is_final
    attempts = _describe_attempts(run, job, records, before.attempts, is_over=is_over, last_cause=message)
    last = records.attempts[-1] if records.attempts else None
    if state is JobState.FAILED and not message and attempts:
        message = _with_retry_note(job, attempts)
    ended = finished_at or (last.ended if last and last.ended else before.ended) if is_over else None
    return JobStatus(
        state=state,
        attempt=last.number if last else 0,
        slots=_slot_statuses(run, job, last, state),
        attempts=attempts,
        message=message,
        began=before.began,
        ended=ended,
    )


def _derive_state(
    run: RunFolder, records: Records, job_id: str, finished: str, queued: QueuedJob | None
) -> tuple[JobState, str]:
    """Return the state of a run and its message; no message for a failure that its attempts explain."""
    if finished in ("succeeded", "failed"):
        return JobState(finished), ""
    is_stopping = (run.folder / STOP_REQUEST_FILE).exists()
    if finished == "stopped" or (is_stopping and (queued is None or queued.is_over)):
        return JobState.STOPPED, STOPPED_MESSAGE
    resume = f"resume with: stoker job run --resume {run.id}"
    if finished == "limit":
        return JobState.FAILED, f"Slurm job {job_id}: {LIMIT_REASON}, and Slurm refused to requeue it; {resume}"
    if queued is None:
        return JobState.LOST, f"Slurm no longer knows job {job_id}, which left no final record; {resume}"
    if not queued.is_over:
        is_running = queued.is_running and any(record.job_id == job_id for record in records.attempts)
        return (JobState.RUNNING, "") if is_running else (JobState.PENDING, queued.pending_reason)
    if queued.state == "CANCELLED":
        return JobState.STOPPED, f"Slurm job {job_id} {CANCELLED_MESSAGE}; {resume}"
    reason = _END_REASONS.get(queued.state) or _explain_batch_failure(run, records, queued)
    return JobState.FAILED, f"Slurm job {job_id} {reason}; {resume}{LOG_SEPARATOR}{run.folder / BATCH_LOG}"


def _explain_batch_failure(run: RunFolder, records: Records, queued: QueuedJob) -> str:
    """Explain the end of a script that could not record it."""
    if not (run.folder / BATCH_LOG).exists():
        return f"failed before its script ran: compute nodes must be able to write to {run.folder}"
    when = "" if records.attempts else " before its first attempt"
    return f"ended{when} in state {queued.state}"


def _describe_attempts(
    run: RunFolder, job: JobSpec, records: Records, known: Sequence[Attempt], *, is_over: bool, last_cause: str
) -> tuple[Attempt, ...]:
    """Return the finished attempts; those that are known already are not diagnosed again."""
    attempts: list[Attempt] = []
    for record, successor in zip_longest(records.attempts, records.attempts[1:]):
        lost = record.outcome in ("", "interrupted")
        if lost and successor is None and not is_over:  # it is running, or Slurm may requeue it
            break
        if len(attempts) < len(known):
            attempt = known[len(attempts)]
        else:
            cause = (REQUEUE_REASON if successor else last_cause) if lost else _explain(run, job, record)
            ended = record.ended or (successor.began if successor else time.time())
            attempt = Attempt(
                number=record.number, began=record.began, ended=ended, code=record.code, cause=cause, lost=lost
            )
        is_retried = successor is not None and successor.job_id == record.job_id
        attempts.append(msgspec.structs.replace(attempt, is_retried=is_retried))
    return tuple(attempts)


def _explain(run: RunFolder, job: JobSpec, record: AttemptRecord) -> str:
    """Return why an attempt ended: the diagnosis of the slot that failed by itself, or what the script recorded."""
    if record.outcome != "failed":
        return {"stopped": STOPPED_MESSAGE, "limit": LIMIT_REASON}.get(record.outcome, "")
    tolerated = observer_slots(job)
    diagnoses = [
        diagnose_slot(slot, Exited(code), run.log_path(slot, record.number))
        for slot, code in read_exit_codes(run, job, record).items()
        if code and slot not in tolerated
    ]
    if job.traits.has_standby_workers:  # mpirun fails with its ranks
        diagnoses = [diagnosis for diagnosis in diagnoses if diagnosis.slot not in lead_slots(job)] or diagnoses
    if not diagnoses:
        return f"srun exited with code {record.code}{LOG_SEPARATOR}{run.folder / BATCH_LOG}"
    return min(diagnoses, key=lambda diagnosis: diagnosis.sort_key).message


def _with_retry_note(job: JobSpec, attempts: Sequence[Attempt]) -> str:
    """Return the cause of the last attempt and why the run is not retried."""
    last = attempts[-1]
    if not job.retries:
        return last.cause
    reason = INVALID_INPUT if last.code in NOT_RETRIED_CODES else attempts_exhausted(job.retries + 1)
    return insert_note(last.cause, not_retried(reason))


def _slot_statuses(run: RunFolder, job: JobSpec, last: AttemptRecord | None, state: JobState) -> tuple[SlotStatus, ...]:
    if last is None:
        return tuple(SlotStatus(slot=str(slot), state=state) for slot in list_slots(job))
    codes = read_exit_codes(run, job, last)
    return tuple(SlotStatus(slot=str(slot), state=_slot_state(code, state), code=code) for slot, code in codes.items())


def _slot_state(code: int | None, state: JobState) -> JobState:
    """Return the state of a slot; one that was ended with the gang, or after the lead role succeeded, was stopped."""
    if code == 0:
        return JobState.SUCCEEDED
    if code is None:
        return JobState.STOPPED if state.is_final else state
    return JobState.FAILED if state in (JobState.FAILED, JobState.RUNNING) else JobState.STOPPED
