"""Retry policy: decide whether a failed job is restarted, from its attempts so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.core.units import pluralize
from stoker.errors import InputError, MissingError
from stoker.jobs.status import Attempt, signal_from_exit_code

BACKOFF_S = (1.0, 5.0, 15.0, 30.0)
NO_RETRIES = "retries is 0"
INVALID_INPUT = "exit codes 2 and 3 mean invalid input or a missing dependency"
NO_PROGRESS_AT_ALL = "the program failed before its heartbeats reported any progress"
NO_PROGRESS = "the program did not get further than in an earlier attempt, according to its heartbeats"


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the gang after a pause."""

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the job, and why it is not retried."""

    reason: str


Decision = Restart | GiveUp


def decide_retry(
    attempts: Sequence[Attempt], retries: int, *, is_elastic: bool = False, slot_restarts: int = 0
) -> Decision:
    """Decide whether to restart the gang after a failed attempt.

    In an elastic job torchrun restarts failed ranks itself, so only a lost rendezvous or hang is handled here. Invalid
    input and missing dependencies are never retried. A program that failed by itself is retried only if its heartbeats
    report more steps than in the attempts before. One that has sent no heartbeat in any attempt, was killed, hung, or
    was lost with its machine is always retried. Restarts of single slots count as retries.
    """
    last = attempts[-1]
    retried = len(attempts) - 1 + slot_restarts
    if retried >= retries:
        return GiveUp(attempts_exhausted(len(attempts), slot_restarts) if retries else NO_RETRIES)
    if last.code in (InputError.exit_code, MissingError.exit_code):
        return GiveUp(INVALID_INPUT)
    has_failed_by_itself = not last.hung and not last.lost and not signal_from_exit_code(last.code)
    if has_failed_by_itself and is_elastic:
        return GiveUp(f"torchrun has reached its limit of {pluralize(retries, 'restart')}")
    if has_failed_by_itself and not _has_progressed(attempts):
        has_ever_progressed = any(attempt.steps > 0 for attempt in attempts)
        return GiveUp(NO_PROGRESS if has_ever_progressed else NO_PROGRESS_AT_ALL)
    return Restart(backoff_s(retried))


def attempts_exhausted(attempts: int, slot_restarts: int = 0) -> str:
    """Return the reason why a job is not retried after its last attempt."""
    restarts = f" and {pluralize(slot_restarts, 'restart')} of single slots" if slot_restarts else ""
    return f"no retries are left after {pluralize(attempts, 'attempt')}{restarts}"


def not_retried(reason: str) -> str:
    """Return the note on a failed job that is not retried."""
    return f"not retried because {reason}"


def backoff_s(retried: int) -> float:
    """Return the pause before the next restart, after `retried` restarts."""
    return BACKOFF_S[min(retried, len(BACKOFF_S) - 1)]


def _has_progressed(attempts: Sequence[Attempt]) -> bool:
    """Whether the last attempt got further than all others; nothing speaks against it if none reported a step."""
    steps = [attempt.steps for attempt in attempts]
    return max(steps) < 0 or steps[-1] > max([0, *steps[:-1]])
