"""Learning rate schedules."""

from __future__ import annotations

import pytest

from stoker.trainers.schedule import LearningRateSchedule


def test_multistep_decreases_at_its_milestones() -> None:
    schedule = LearningRateSchedule(kind="multistep", total=400, milestones=(100, 200), gamma=0.1)
    assert [schedule.factor(seen) for seen in (0, 99, 100, 199, 200, 399)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )


def test_cosine_decreases_from_one_to_zero() -> None:
    schedule = LearningRateSchedule(kind="cosine", total=1100, warmup=100)
    assert [schedule.factor(seen) for seen in (0, 50, 100, 600, 1100, 2000)] == pytest.approx([0, 0.5, 1, 0.5, 0, 0])


def test_poly_and_constant() -> None:
    assert LearningRateSchedule(kind="poly", total=100).factor(50) == pytest.approx(0.25)
    assert LearningRateSchedule(kind="constant", total=100, warmup=10).factor(99) == 1
    assert LearningRateSchedule(kind="constant", total=100, warmup=10).factor(5) == pytest.approx(0.5)


def test_a_warmup_as_long_as_the_training() -> None:
    schedule = LearningRateSchedule(kind="cosine", total=100, warmup=100)
    assert schedule.factor(99) == pytest.approx(0.99)
    assert 0 <= schedule.factor(100) <= 1
