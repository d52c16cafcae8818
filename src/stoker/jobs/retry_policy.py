"""Whether a gang that failed is started again: a pure function of what happened so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.errors import InputError, MissingError
from stoker.jobs.status import Attempt, signal_of

LONG_S = 60.0
"""Who ran so long before it failed counts as having got somewhere, when it tells no steps."""
PAUSES_S = (1.0, 5.0, 15.0, 30.0)


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the gang again after a pause."""

    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Let the job fail; why it is not tried again."""

    why: str


Decision = Restart | GiveUp


def decide(attempts: Sequence[Attempt], retries: int, *, elastic: bool = False) -> Decision:
    """Decide after a failure.

    In an elastic world torchrun restarts ranks that fail, so that only a lost meeting point or a hang is for us. What
    the user must mend is never tried again. A program that failed by itself is tried again only when it had got further
    than before; one that was killed, hung, or lost with its machine, may have been unlucky.
    """
    last = attempts[-1]
    used = len(attempts) - 1
    if used >= retries:
        return GiveUp(f"tried {retries + 1} times" if retries else "the job allows no retries")
    if last.code in (InputError.exit_code, MissingError.exit_code):
        return GiveUp("the same input would fail again")
    failed = not last.hung and not last.lost and not signal_of(last.code)
    if failed and elastic:
        return GiveUp(f"torchrun has restarted it as often as it may, {retries} times")
    if failed and not _got_further(attempts):
        return GiveUp("it got no further than before, and would fail again" if used else "it would fail again")
    return Restart(pause_s(used))


def pause_s(used: int) -> float:
    """Give the pause before what failed is started again, after so many times."""
    return PAUSES_S[min(used, len(PAUSES_S) - 1)]


def _got_further(attempts: Sequence[Attempt]) -> bool:
    last = attempts[-1]
    before = max((attempt.steps for attempt in attempts[:-1]), default=0)
    return last.steps > before if last.steps >= 0 else last.ended - last.began >= LONG_S
