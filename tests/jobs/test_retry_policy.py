"""Whether a failed gang is started again, as a table."""

from __future__ import annotations

import pytest

from stoker.jobs.retry_policy import GiveUp, Restart, decide
from stoker.jobs.status import Attempt


def tries(*told: tuple[int, int, float] | tuple[int, int, float, bool]) -> list[Attempt]:
    """Attempts by (code, steps, seconds[, hung])."""
    return [
        Attempt(number=number, began=0, ended=one[2], code=one[0], steps=one[1], hung=len(one) > 3)
        for number, one in enumerate(told)
    ]


@pytest.mark.parametrize(
    ("attempts", "retries", "why"),
    [
        (tries((-9, 5, 9)), 0, "the job allows no retries"),
        (tries((-9, 5, 9), (-9, 6, 9)), 1, "tried 2 times"),
        (tries((2, 5, 999)), 3, "the same input would fail again"),
        (tries((3, -1, 999)), 3, "the same input would fail again"),
        (tries((1, -1, 2)), 3, "it would fail again"),
        (tries((1, 0, 2)), 3, "it would fail again"),
        (tries((255, -1, 2)), 3, "it would fail again"),
        (tries((1, 100, 9), (1, 100, 9)), 3, "it got no further than before"),
    ],
)
def test_given_up(attempts: list[Attempt], retries: int, why: str) -> None:
    decision = decide(attempts, retries)
    assert isinstance(decision, GiveUp)
    assert why in decision.why


@pytest.mark.parametrize(
    "attempts",
    [
        tries((-9, -1, 0.1)),
        tries((137, -1, 0.1)),
        tries((1, 100, 2)),
        tries((1, 100, 9), (1, 101, 9)),
        tries((1, -1, 61)),
        tries((0, 5, 600, True)),
        tries((1, 7, 9), (-9, 7, 9)),
    ],
)
def test_started_again(attempts: list[Attempt]) -> None:
    assert isinstance(decide(attempts, 3), Restart)


def test_a_lost_host_is_no_fault_of_the_program() -> None:
    lost = [Attempt(number=number, began=0, ended=2, code=255, lost=True) for number in range(2)]
    assert isinstance(decide(lost, 3), Restart)
    assert isinstance(decide(lost, 3, elastic=True), Restart)
    assert isinstance(decide(lost, 1), GiveUp)


def test_an_elastic_world_is_restarted_by_torchrun_and_not_twice() -> None:
    assert isinstance(decide(tries((1, 100, 9)), 3, elastic=True), GiveUp)
    assert isinstance(decide(tries((-9, 100, 9)), 3, elastic=True), Restart)


def test_the_pauses_grow() -> None:
    many = tries(*[(-9, step, 9) for step in range(9)])
    pauses = [decision.after_s for n in range(1, 9) if isinstance(decision := decide(many[:n], 99), Restart)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1]
