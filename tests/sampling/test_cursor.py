from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan


def make_plan(**changed: Any) -> SamplingPlan:
    defaults: dict[str, Any] = {"data": "pets", "sizes": np.array([4, 0, 3, 5], dtype=np.int64), "seed": 1}
    return SamplingPlan(**defaults | changed)


def test_parse_reads_epoch_and_consumed() -> None:
    assert Cursor.parse("3:512", "abc") == Cursor(3, 512, "abc")


@pytest.mark.parametrize(
    "text", ["", ":", "3", "3:", ":512", "3:-1", "-3:1", "3:1:2", "a:b", "3.0:5", "3 : 5", "1_0:0"]
)
def test_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match="EPOCH:CONSUMED"):
        Cursor.parse(text, "abc")


def test_cursor_survives_json_and_pickle() -> None:
    cursor = Cursor(3, 512, make_plan().digest)
    assert Cursor.from_state(json.loads(json.dumps(cursor.state()))) == cursor
    assert Cursor.from_state(pickle.loads(pickle.dumps(cursor.state()))) == cursor
    restored = pickle.loads(pickle.dumps(cursor))
    assert restored == cursor
    assert type(restored) is Cursor


@pytest.mark.parametrize(
    "state",
    [
        None,
        5,
        "0:0",
        [],
        [0, 0, "abc"],
        {},
        {"epoch": 0, "consumed": 0},
        {"epoch": 0, "plan": "abc"},
        {"epoch": -1, "consumed": 0, "plan": "abc"},
        {"epoch": 0, "consumed": -1, "plan": "abc"},
        {"epoch": "0", "consumed": 0, "plan": "abc"},
        {"epoch": 0, "consumed": 1.5, "plan": "abc"},
        {"epoch": None, "consumed": None, "plan": None},
    ],
)
def test_invalid_state_is_rejected(state: Any) -> None:
    with pytest.raises(InputError, match="cursor"):
        Cursor.from_state(state)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": "cars"},
        {"seed": 2},
        {"lanes": 2},
        {"window": 3},
        {"mode": "join"},
        {"mode": "resampled"},
        {"mode": "resampled", "epoch_samples": 12},
    ],
    ids=str,
)
def test_cursor_of_another_plan_is_rejected(changed: dict[str, Any]) -> None:
    for plan, other in ((make_plan(), make_plan(**changed)), (make_plan(**changed), make_plan())):
        with pytest.raises(InputError, match=f"{plan.digest}.*{other.digest}"):
            other.check_cursor(plan.start_cursor())


def test_cursor_of_another_epoch_length_is_rejected() -> None:
    with pytest.raises(InputError, match="epoch_samples"):
        make_plan(mode="resampled", epoch_samples=20).check_cursor(
            make_plan(mode="resampled", epoch_samples=21).start_cursor()
        )


@pytest.mark.parametrize("changed", [{}, {"mode": "resampled"}, {"mode": "resampled", "epoch_samples": 30}], ids=str)
def test_end_of_an_epoch_is_the_start_of_the_next(changed: dict[str, Any]) -> None:
    plan = make_plan(**changed)
    samples = plan.epoch_samples or 12
    assert plan.check_cursor(Cursor(4, 0, plan.digest)) == Cursor(4, 0, plan.digest)
    assert plan.check_cursor(Cursor(4, samples - 1, plan.digest)) == Cursor(4, samples - 1, plan.digest)
    assert plan.check_cursor(Cursor(4, samples, plan.digest)) == plan.start_cursor(5)
    with pytest.raises(InputError, match=rf"\b{samples + 1}\b.*\b{samples} samples"):
        plan.check_cursor(Cursor(4, samples + 1, plan.digest))


def test_join_resumes_only_at_the_start_of_an_epoch() -> None:
    plan = make_plan(mode="join")
    assert plan.check_cursor(plan.start_cursor(7)) == plan.start_cursor(7)
    for consumed in (1, 11, 12, 13):
        with pytest.raises(InputError, match=rf"`join`.*\b{consumed} samples"):
            plan.check_cursor(Cursor(7, consumed, plan.digest))
