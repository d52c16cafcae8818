from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan


def plan(**changed: Any) -> SamplingPlan:
    made: dict[str, Any] = {"data": "pets", "sizes": np.array([4, 0, 3, 5], dtype=np.int64), "seed": 1}
    return SamplingPlan(**made | changed)


def test_a_cursor_is_read_as_it_is_written() -> None:
    assert Cursor.parse("3:512", "abc") == Cursor(3, 512, "abc")


@pytest.mark.parametrize(
    "text", ["", ":", "3", "3:", ":512", "3:-1", "-3:1", "3:1:2", "a:b", "3.0:5", "3 : 5", "1_0:0"]
)
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="EPOCH:CONSUMED"):
        Cursor.parse(text, "abc")


def test_a_cursor_survives_json_and_pickle() -> None:
    cursor = Cursor(3, 512, plan().digest)
    assert Cursor.from_state(json.loads(json.dumps(cursor.state()))) == cursor
    assert Cursor.from_state(pickle.loads(pickle.dumps(cursor.state()))) == cursor
    kept = pickle.loads(pickle.dumps(cursor))
    assert kept == cursor
    assert type(kept) is Cursor


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
def test_rubbish_in_a_checkpoint_is_refused(state: Any) -> None:
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
def test_another_plan_refuses_it(changed: dict[str, Any]) -> None:
    for one, other in ((plan(), plan(**changed)), (plan(**changed), plan())):
        with pytest.raises(InputError, match=f"plan {one.digest}.*plan {other.digest}"):
            other.check_cursor(one.start_cursor())


def test_another_length_of_an_epoch_refuses_it() -> None:
    with pytest.raises(InputError, match="epoch_samples"):
        plan(mode="resampled", epoch_samples=20).check_cursor(plan(mode="resampled", epoch_samples=21).start_cursor())


@pytest.mark.parametrize("changed", [{}, {"mode": "resampled"}, {"mode": "resampled", "epoch_samples": 30}], ids=str)
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(changed: dict[str, Any]) -> None:
    one = plan(**changed)
    samples = one.epoch_samples or 12
    assert one.check_cursor(Cursor(4, 0, one.digest)) == Cursor(4, 0, one.digest)
    assert one.check_cursor(Cursor(4, samples - 1, one.digest)) == Cursor(4, samples - 1, one.digest)
    assert one.check_cursor(Cursor(4, samples, one.digest)) == one.start_cursor(5)
    with pytest.raises(InputError, match=f"{samples + 1} of an epoch of {samples} samples"):
        one.check_cursor(Cursor(4, samples + 1, one.digest))


def test_a_join_epoch_is_entered_at_its_beginning_only() -> None:
    one = plan(mode="join")
    assert one.check_cursor(one.start_cursor(7)) == one.start_cursor(7)
    for consumed in (1, 11, 12, 13):
        with pytest.raises(InputError, match="beginning of an epoch"):
            one.check_cursor(Cursor(7, consumed, one.digest))
