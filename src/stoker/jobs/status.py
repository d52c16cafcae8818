"""Status of a job, its slots and its attempts, the same for every launcher."""

from __future__ import annotations

import signal
from enum import StrEnum

import msgspec

from stoker.errors import InterruptError, JobFailedError


def signal_from_exit_code(code: int) -> int:
    """Return the signal that killed a program: 9 for exit code -9, or 137 as a shell reports it; 0: none."""
    number = -code if code < 0 else code - 128
    return number if number in signal.valid_signals() else 0


class JobState(StrEnum):
    """State of a job or a slot."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    """Its supervisor is gone; of a slot: its machine cannot be reached."""

    @property
    def is_final(self) -> bool:
        """Whether the state can no longer change."""
        return self not in (JobState.PENDING, JobState.RUNNING)


STOPPED_MESSAGE = "stopped"
"""Message of a job that was stopped with `stoker job stop` or Ctrl-C."""


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one slot; `code` is the exit code, negative for the signal that killed it."""

    slot: str
    state: JobState
    pid: int | None = None
    code: int | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A finished attempt of the whole gang, and why it ended."""

    number: int
    began: float
    ended: float
    code: int = 0
    """Exit code of the slot that failed first; 0 if none did."""
    cause: str = ""
    hung: bool = False
    lost: bool = False
    """Whether its machine was lost or unreachable."""
    steps: int = -1
    """The highest step reported; -1 if the program reports none."""
    is_retried: bool = False
    """Whether the next attempt was started because this one failed."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a job."""

    state: JobState
    attempt: int = 0
    slots: tuple[SlotStatus, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    message: str = ""
    began: float = 0.0
    ended: float | None = None

    @property
    def next_attempt(self) -> int:
        """The number of the next attempt."""
        return self.attempt + 1 if self.slots else 0

    @property
    def stopped_attempts(self) -> frozenset[int]:
        """The numbers of the attempts that were stopped on purpose."""
        return frozenset(attempt.number for attempt in self.attempts if attempt.cause == STOPPED_MESSAGE)

    def raise_for_state(self) -> None:
        """Raise JobFailedError or InterruptError if the job did not succeed."""
        if self.state in (JobState.FAILED, JobState.LOST):
            raise JobFailedError(self.message)
        if self.state is JobState.STOPPED and self.message not in ("", STOPPED_MESSAGE):  # not by a stoker command
            raise JobFailedError(self.message)
        if self.state is JobState.STOPPED:
            raise InterruptError("the job was stopped")
