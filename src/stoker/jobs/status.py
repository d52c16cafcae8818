"""How a job is doing, in one vocabulary for every launcher."""

from __future__ import annotations

import signal
from enum import StrEnum

import msgspec

from stoker.errors import JobFailedError, StoppedError


def signal_of(code: int) -> int:
    """Tell which signal ended a program, by its exit code: -9, or 137 where a shell or a profiler tells it; 0: none."""
    number = -code if code < 0 else code - 128
    return number if number in signal.valid_signals() else 0


class JobState(StrEnum):
    """What a job or a slot is at."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    """Whoever watched over it is gone."""

    @property
    def is_final(self) -> bool:
        """Whether nothing will change any more."""
        return self not in (JobState.PENDING, JobState.RUNNING)


STOPPED = "stopped"
"""What is said of a job that someone ended with our own command."""


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one slot is doing; `code` as the program gave it, negative for the signal that ended it."""

    slot: str
    state: JobState
    pid: int | None = None
    code: int | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of the whole gang that is over, and why it ended."""

    number: int
    began: float
    ended: float
    code: int = 0
    """Of the slot that failed first; 0 when none did."""
    cause: str = ""
    hung: bool = False
    lost: bool = False
    """Whether the machine it ran on was gone, or out of reach."""
    steps: int = -1
    """The highest step that was heard of; -1 when the program tells none."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is doing."""

    state: JobState
    attempt: int = 0
    slots: tuple[SlotStatus, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    message: str = ""
    began: float = 0.0
    ended: float | None = None

    @property
    def next_attempt(self) -> int:
        """The number of the attempt that would come next."""
        return self.attempt + 1 if self.slots else 0

    def raise_for_state(self) -> None:
        """Raise what a command should end with, when the job did not succeed."""
        if self.state in (JobState.FAILED, JobState.LOST):
            raise JobFailedError(self.message)
        if self.state is JobState.STOPPED and self.message not in ("", STOPPED):  # by others, and not as we know it
            raise JobFailedError(self.message)
        if self.state is JobState.STOPPED:
            raise StoppedError("the job was stopped")
