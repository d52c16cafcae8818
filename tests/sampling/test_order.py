from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.sampling.order import EpochOrder, SampleLocation
from stoker.sampling.plan import ALGORITHM, SamplingPlan
from stoker.sampling.rank import Rank
from stoker.shards.manifest import default_lanes

Spot = tuple[int, int]

SIZES = st.lists(st.just(0) | st.integers(1, 12), min_size=1, max_size=14).filter(any)


def numbers(values: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def spots(place: SampleLocation) -> list[Spot]:
    return list(zip(place.shards.tolist(), place.samples.tolist(), strict=True))


def make(sizes: list[int], lanes: int = 1, window: int = 2, draw: tuple[int, int] = (0, 0)) -> EpochOrder:
    return EpochOrder(numbers(range(len(sizes))), numbers(sizes), lanes=lanes, window=window, draw=draw)


def everything(order: EpochOrder) -> list[Spot]:
    return spots(order.locate(np.arange(order.samples)))


@given(sizes=SIZES, lanes=st.integers(1, 9), window=st.integers(1, 4), seed=st.integers(0, 2**64), epoch=st.integers(0))
@settings(max_examples=150, deadline=None)
def test_every_sample_has_one_position(sizes: list[int], lanes: int, window: int, seed: int, epoch: int) -> None:
    found = everything(make(sizes, lanes, window, (seed, epoch)))
    assert sorted(found) == [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]


@given(sizes=SIZES, lanes=st.integers(1, 9), window=st.integers(1, 4), data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_position_gives_the_same_whatever_is_asked_with_it(
    sizes: list[int], lanes: int, window: int, data: st.DataObject
) -> None:
    order = make(sizes, lanes, window)
    whole = everything(order)
    some = data.draw(st.lists(st.integers(0, order.samples - 1)))
    assert spots(order.locate(numbers(some))) == [whole[position] for position in some]


def test_nothing_is_asked_for_nothing() -> None:
    assert everything(make([0, 0])) == []
    assert spots(make([3, 2]).locate(numbers([]))) == []


def test_every_epoch_and_seed_has_its_own_order() -> None:
    orders = [everything(make([20] * 10, 2, 2, draw)) for draw in ((s, e) for s in range(6) for e in range(6))]
    assert len({tuple(order) for order in orders}) == 36
    assert everything(make([20] * 10, 2, 2, (3, 4))) == orders[3 * 6 + 4]


class Lane(NamedTuple):
    """What a lane reads, told from its samples alone: its shards in turn, and for each window where it ends."""

    shards: list[int]
    ends: list[int]
    windows: list[set[int]]

    def window_of(self, offset: int) -> int:
        return next(number for number, end in enumerate(self.ends) if offset < end)


def lane_of(order: EpochOrder, lane: int) -> Lane:
    """Tell a lane's windows from outside: the first `window` shards that it shows are one, all of their samples."""
    shards = [shard for shard, _ in everything(order)[lane :: order.lanes]]
    sizes = Counter(shards)
    ends: list[int] = []
    windows: list[set[int]] = []
    at = 0
    while at < len(shards):
        window = set(list(dict.fromkeys(shards[at:]))[: order.window])
        at += sum(sizes[shard] for shard in window)
        ends.append(at)
        windows.append(window)
    return Lane(shards, ends, windows)


def taken(order: EpochOrder, lane: int, consumed: int) -> int:
    return len(range(lane, consumed, order.lanes))


@given(sizes=SIZES, lanes=st.integers(1, 5), window=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_lane_reads_so_many_shards_at_a_time(sizes: list[int], lanes: int, window: int, seed: int) -> None:
    order = make(sizes, lanes, window, (seed, 0))
    lengths = []
    for number in range(lanes):
        lane = lane_of(order, number)
        lengths.append(len(lane.shards))
        starts = [0, *lane.ends]
        assert [set(lane.shards[a:b]) for a, b in zip(starts, lane.ends, strict=False)] == lane.windows
        assert all(len(found) == window for found in lane.windows[:-1])
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(
    sizes=SIZES,
    lanes=st.integers(1, 5),
    window=st.integers(1, 4),
    seed=st.integers(0, 99),
    windows=st.integers(1, 4),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_ahead_is_the_window_under_way_and_the_next_ones_of_each_lane(
    sizes: list[int], lanes: int, window: int, seed: int, windows: int, data: st.DataObject
) -> None:
    order = make(sizes, lanes, window, (seed, 0))
    consumed = data.draw(st.integers(0, order.samples))
    chosen = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))

    expected: list[set[int]] = [set() for _ in range(windows)]
    for number in chosen:
        lane, offset = lane_of(order, number), taken(order, number, consumed)
        if offset < len(lane.shards):
            first = lane.window_of(offset)
            for step, shards in enumerate(lane.windows[first : first + windows]):
                expected[step] |= shards

    # Whatever is needed in this window stands before all of the next one.
    found = [order.upcoming_shards(consumed, numbers(chosen), step).tolist() for step in range(windows + 1)]
    assert found[0] == []
    for step, shards in enumerate(expected):
        assert found[step + 1][: len(found[step])] == found[step]
        assert set(found[step + 1][len(found[step]) :]) == shards


@given(
    sizes=SIZES,
    lanes=st.integers(1, 5),
    window=st.integers(1, 4),
    seed=st.integers(0, 99),
    world=st.integers(1, 5),
    batch=st.integers(1, 30),
)
@settings(max_examples=100, deadline=None)
def test_a_step_reads_ahead_only_as_far_as_it_spans_windows(
    sizes: list[int], lanes: int, window: int, seed: int, world: int, batch: int
) -> None:
    # So two windows hold a step's shards unless in some lane it begins before the next window and ends after it.
    plan = SamplingPlan(data="", sizes=numbers(sizes), lanes=lanes, window=window, seed=seed)
    for rank in range(world):
        epoch = plan.epoch(0, Rank(rank, world))
        order = epoch.order
        all_lanes = [lane_of(order, number) for number in range(lanes)]
        for step in epoch.steps(0, batch):
            spans = [1]
            for position in step.positions.tolist():
                number, offset = position % lanes, position // lanes
                lane = all_lanes[number]
                spans.append(lane.window_of(offset) - lane.window_of(taken(order, number, step.start)) + 1)
            shards = set(epoch.locate(step.positions).shards.tolist())
            assert shards <= set(epoch.upcoming_shards(step.start, windows=max(spans)).tolist())
            if max(spans) <= 2:
                assert shards <= set(epoch.upcoming_shards(step.start).tolist())


def test_a_step_over_three_windows_is_not_all_ahead() -> None:
    epoch = SamplingPlan(data="", sizes=numbers([4] * 6), window=1).epoch(0, Rank())
    (step, *_) = epoch.steps(0, 12)
    assert len(set(epoch.locate(step.positions).shards.tolist())) == 3
    assert len(epoch.upcoming_shards(step.start)) == 2


@given(
    sizes=SIZES,
    lanes=st.integers(1, 5),
    window=st.integers(1, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_the_rest_is_counted_as_if_read(
    sizes: list[int], lanes: int, window: int, seed: int, data: st.DataObject
) -> None:
    order = make(sizes, lanes, window, (seed, 0))
    consumed = data.draw(st.integers(0, order.samples))
    chosen = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))

    # A shard counts until the window that it is part of is read to its end.
    shards: set[int] = set()
    left = 0
    for number in chosen:
        lane, offset = lane_of(order, number), taken(order, number, consumed)
        left += len(lane.shards) - offset
        if offset < len(lane.shards):
            shards = shards.union(*lane.windows[lane.window_of(offset) :])
    touched, weight = order.remaining_shards(consumed, numbers(chosen), np.ones(len(sizes)))
    count = len(touched)
    assert count == len(shards)
    assert weight == pytest.approx(left)


@given(sizes=SIZES, lanes=st.integers(1, 5), window=st.integers(1, 4), data=st.data())
@settings(max_examples=50, deadline=None)
def test_at_the_beginning_the_rest_weighs_what_its_shards_do(
    sizes: list[int], lanes: int, window: int, data: st.DataObject
) -> None:
    order = make(sizes, lanes, window)
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=len(sizes), max_size=len(sizes)))
    chosen = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    expected = sum(weights[shard] for number in chosen for shard in lane_of(order, number).shards)
    assert order.remaining_shards(0, numbers(chosen), np.array(weights, dtype=np.float64))[1] == pytest.approx(expected)


# By mode and rank: the steps of a small epoch, each sample as shard.number.
PINNED = {
    ("exact", 0): ["2.0 2.4 2.3", "0.0 0.2 2.1", "0.1 2.2"],
    ("exact", 1): ["4.3 4.1 4.2", "3.1 3.0 4.0", "5.0"],
    ("resampled", 0): ["4.3 2.3 2.2", "4.0 4.2 2.0", "4.1 2.1"],
    ("resampled", 1): ["4.2 4.0 4.1", "2.4 4.3 5.0", "2.0"],
    ("join", 0): ["4.0 4.1 5.0", "4.3 4.2 2.4", "2.3 2.0 2.2", "2.1"],
    ("join", 1): ["3.0 0.2 0.0", "3.1 0.1"],
}


def test_the_order_is_pinned() -> None:
    # A checkpoint holds nothing but a number: if one of these must change, raise ALGORITHM.
    found = {}
    for mode in ("exact", "resampled", "join"):
        plan = SamplingPlan(data="pets", sizes=numbers([3, 0, 5, 2, 4, 1]), mode=mode, seed=7, lanes=2, window=2)
        for rank in range(2):
            epoch = plan.epoch(1, Rank(rank, 2))
            found[mode, rank] = [
                " ".join(f"{shard}.{sample}" for shard, sample in spots(epoch.locate(step.positions)))
                for step in epoch.steps(0, 6)
            ]
    assert ALGORITHM == 1
    assert found == PINNED
    assert SamplingPlan(data="pets", sizes=numbers([1]), seed=7, lanes=2).digest == "16769b99cd37db797167fb84"


@pytest.mark.parametrize(("mode", "limit_mb"), [("exact", 200), ("join", 200), ("resampled", 220)])
def test_a_thousand_million_samples_take_little_memory(mode: str, limit_mb: int) -> None:
    shards = 1_000_000
    program = """
import sys
import numpy as np
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank

mode, shards, lanes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plan = SamplingPlan(data="", sizes=np.full(shards, 1000, dtype=np.int64), mode=mode, lanes=lanes)
epoch = plan.epoch(0, Rank(0, 1))
step = next(epoch.steps(0, 256))
print(epoch.order.samples, len(set(zip(*map(np.ndarray.tolist, epoch.at(step.positions))))))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
    command = [sys.executable, "-c", program, mode, str(shards), str(default_lanes(shards))]
    samples, batch, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert (int(samples), int(batch)) == (shards * 1000, 256)
    assert int(peak_kb) * 1024 < limit_mb * 10**6
