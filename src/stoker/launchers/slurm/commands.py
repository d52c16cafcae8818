"""Slurm's own programs: submit, query and cancel jobs; their error messages as errors of stoker."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.processes import CompletedProcess, run
from stoker.errors import AccessDeniedError, InputError, MissingProgramError, StokerError, UnavailableError
from stoker.jobs.spec import RESERVED_ENV

TIMEOUT_S = 60.0
QUERY_INTERVAL_S = 5.0
"""Between two queries of a job while it is followed: the controller serves all users of the cluster."""
_RUNNING = ("COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
_WAITING = ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_UNREACHABLE = re.compile(
    r"Unable to contact slurm controller|Could not establish a configuration source|Unable to process configuration|"
    r"Socket timed out|Connection (refused|timed out)|Protocol authentication error|munge|Zero Bytes were transmitted"
)
_UNKNOWN_JOB = "Invalid job id specified"
_FAULTY_KEYS = {
    r"partition": "slurm.partition",
    r"account": "slurm.account",
    r"qos": "slurm.qos",
    r"time limit": "slurm.time",
    r"feature": "slurm.constraint",
    r"[Gg]res": "resources.gpu",
    r"[Mm]emory": "resources.memory",
    r"node configuration|[Nn]ode count|[Mm]ore processors": "resources",
    r"unrecognized option": "slurm.options",
}
"""The key of the job file that a message of sbatch is about."""
_PENDING_REASONS = {
    "BeginTime": "Slurm starts a requeued job about two minutes after its end",
    "None": "the scheduler has not looked at it yet",
    "Priority": "jobs with a higher priority are first in the queue",
    "Resources": "it waits for free nodes",
}


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """State of a job in Slurm's queue, and why it is pending."""

    state: str
    reason: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it has an allocation."""
        return self.state in _RUNNING

    @property
    def is_over(self) -> bool:
        """Whether it can no longer run."""
        return self.state not in (*_RUNNING, *_WAITING)

    @property
    def pending_reason(self) -> str:
        """Why it is not running, as a sentence."""
        if self.is_running:
            return "the batch script is starting"
        explanation = _PENDING_REASONS.get(self.reason)
        return f"pending in Slurm: {self.reason}" + (f" ({explanation})" if explanation else "")


def require_slurm() -> None:
    """Raise MissingProgramError unless Slurm's programs are installed."""
    if shutil.which("sbatch") is None:
        raise MissingProgramError(
            "sbatch not found on the PATH; --on slurm needs Slurm's client programs",
            hint="run stoker on a login node of the cluster",
        )


def submit(script: Path, *arguments: str, output: Path, workdir: Path) -> str:
    """Submit a batch script and return the ID of its job."""
    options = [f"--output={str(output).replace('%', '%%')}", f"--chdir={workdir}"]
    completed = _run(["sbatch", "--parsable", *options, str(script), *arguments])
    if completed.exit_code:
        raise _explain_rejection(completed.stderr)
    return completed.stdout.strip().partition(";")[0]


class JobQuery:
    """Queries of one job, at most one in `QUERY_INTERVAL_S` seconds."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, QueuedJob | None]] = {}

    def get(self, job_id: str, *, max_age_s: float = QUERY_INTERVAL_S) -> QueuedJob | None:
        """Return the state of a job, which may be some seconds old; None if Slurm does not know it."""
        asked, queued = self._asked.get(job_id, (float("-inf"), None))
        if time.monotonic() - asked > max_age_s:
            queued = query(job_id)
            self._asked[job_id] = time.monotonic(), queued
        return queued


def query(job_id: str) -> QueuedJob | None:
    """Return the state of a job: from the queue, or from accounting if that is enabled; None if it is unknown."""
    completed = _run(["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%T|%r"])
    if completed.exit_code and _UNKNOWN_JOB not in completed.stderr:
        raise _unreachable(completed.stderr, "submitted jobs continue without it")
    if completed.stdout.strip():
        return QueuedJob(*completed.stdout.split("\n", 1)[0].strip().split("|", 1))
    if shutil.which("sacct") is None:
        return None
    accounted = _run(["sacct", "-X", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=State"]).stdout.split()
    return QueuedJob(accounted[0]) if accounted else None  # "CANCELLED by 1000"


def cancel(job_id: str, *options: str) -> None:
    """Cancel or signal a job; do nothing if it is over."""
    completed = _run(["scancel", *options, job_id])
    if completed.exit_code and _UNREACHABLE.search(completed.stderr):
        raise _unreachable(completed.stderr, "the job continues without it")


def _run(argv: Sequence[str]) -> CompletedProcess:
    """Run a program of Slurm, without the variables of an allocation or a job that this process may be part of."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    dropped = [
        name for name in os.environ if name not in kept and (RESERVED_ENV.fullmatch(name) or name.startswith("SLURM_"))
    ]
    require_slurm()
    return run(
        ["env", *(argument for name in dropped for argument in ("-u", name)), *argv], timeout_s=TIMEOUT_S, check=False
    )


def _explain_rejection(stderr: str) -> StokerError:
    """Return the error for a rejected submission, with the key of the job file that it is about."""
    if _UNREACHABLE.search(stderr):
        return _unreachable(stderr, "the job was not submitted")
    what = _last_message(stderr).removeprefix("Batch job submission failed: ")
    if re.search("permission denied|not permitted", what, re.IGNORECASE):
        return AccessDeniedError(f"Slurm rejected the job: {what}")
    keys = [key for pattern, key in _FAULTY_KEYS.items() if re.search(pattern, what)]
    return InputError(f"Slurm rejected the job: {what}", where=keys[0] if keys else None)


def _unreachable(stderr: str, consequence: str) -> UnavailableError:
    hint = f"{consequence}; check it with: scontrol ping"
    return UnavailableError(f"cannot reach the Slurm controller: {_last_message(stderr)}", hint=hint)


def _last_message(stderr: str) -> str:
    """Return the last line that a program of Slurm wrote, without its own name."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    return re.sub(r"^\w+: ((error|fatal): )?", "", lines[-1]) if lines else "no response"
