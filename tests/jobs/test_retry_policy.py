"""Retry policy: which failed attempts are retried."""

from __future__ import annotations

import pytest

from stoker.jobs.retry_policy import (
    INVALID_INPUT,
    NO_PROGRESS,
    NO_PROGRESS_AT_ALL,
    NO_RETRIES,
    GiveUp,
    Restart,
    decide_retry,
)
from stoker.jobs.status import Attempt


def attempts_of(*rows: tuple[int, int, float] | tuple[int, int, float, bool]) -> list[Attempt]:
    """Return attempts from rows of (exit code, steps, seconds[, hung])."""
    return [
        Attempt(number=number, began=0, ended=row[2], code=row[0], steps=row[1], hung=len(row) > 3)
        for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("attempts", "retries", "reason"),
    [
        (attempts_of((-9, 5, 9)), 0, NO_RETRIES),
        (attempts_of((-9, 5, 9), (-9, 6, 9)), 1, "no retries are left after 2 attempts"),
        (attempts_of((2, 5, 999)), 3, INVALID_INPUT),
        (attempts_of((3, -1, 999)), 3, INVALID_INPUT),
        (attempts_of((1, -1, 2), (1, -1, 2)), 1, "no retries are left after 2 attempts"),
        (attempts_of((1, 0, 2)), 3, NO_PROGRESS_AT_ALL),
        (attempts_of((255, 0, 2)), 3, NO_PROGRESS_AT_ALL),
        (attempts_of((1, -1, 2), (1, 0, 2)), 3, NO_PROGRESS_AT_ALL),
        (attempts_of((1, 100, 9), (1, 100, 9)), 3, NO_PROGRESS),
        (attempts_of((1, 100, 9), (1, -1, 2)), 3, NO_PROGRESS),
        (attempts_of((1, 100, 9), (-9, -1, 2), (1, -1, 2)), 3, NO_PROGRESS),
        (attempts_of((1, 100, 9), (1, 0, 2)), 3, NO_PROGRESS),
        (attempts_of((1, 0, 9), (1, -1, 2)), 3, NO_PROGRESS_AT_ALL),
    ],
)
def test_not_retried(attempts: list[Attempt], retries: int, reason: str) -> None:
    decision = decide_retry(attempts, retries)
    assert isinstance(decision, GiveUp)
    assert decision.reason == reason


@pytest.mark.parametrize(
    "attempts",
    [
        attempts_of((-9, -1, 0.1)),
        attempts_of((137, -1, 0.1)),
        attempts_of((1, 100, 2)),
        attempts_of((1, 100, 9), (1, 101, 9)),
        attempts_of((1, -1, 2)),
        attempts_of((255, -1, 2), (255, -1, 2)),
        attempts_of((1, -1, 2), (1, 5, 9)),
        attempts_of((1, 100, 9), (-9, -1, 2)),
        attempts_of((0, 5, 600, True)),
        attempts_of((1, 7, 9), (-9, 7, 9)),
    ],
)
def test_retried(attempts: list[Attempt]) -> None:
    assert isinstance(decide_retry(attempts, 3), Restart)


def test_lost_host_is_retried_without_progress() -> None:
    lost = [Attempt(number=number, began=0, ended=2, code=255, lost=True) for number in range(2)]
    assert isinstance(decide_retry(lost, 3), Restart)
    assert isinstance(decide_retry(lost, 3, is_elastic=True), Restart)
    assert isinstance(decide_retry(lost, 1), GiveUp)


def test_elastic_job_is_restarted_by_torchrun_only() -> None:
    assert isinstance(decide_retry(attempts_of((1, 100, 9)), 3, is_elastic=True), GiveUp)
    assert isinstance(decide_retry(attempts_of((-9, 100, 9)), 3, is_elastic=True), Restart)


def test_backoff_grows() -> None:
    attempts = attempts_of(*[(-9, step, 9) for step in range(9)])
    pauses = [decision.after_s for n in range(1, 9) if isinstance(decision := decide_retry(attempts[:n], 99), Restart)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1]
