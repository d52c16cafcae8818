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

Location = tuple[int, int]

SIZES = st.lists(st.just(0) | st.integers(1, 12), min_size=1, max_size=14).filter(any)


def int64_array(values: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def to_pairs(location: SampleLocation) -> list[Location]:
    return list(zip(location.shards.tolist(), location.samples.tolist(), strict=True))


def make_order(sizes: list[int], lanes: int = 1, window: int = 2, draw: tuple[int, int] = (0, 0)) -> EpochOrder:
    return EpochOrder(int64_array(range(len(sizes))), int64_array(sizes), lanes=lanes, window=window, draw=draw)


def list_epoch(order: EpochOrder) -> list[Location]:
    return to_pairs(order.locate(np.arange(order.samples)))


@given(sizes=SIZES, lanes=st.integers(1, 9), window=st.integers(1, 4), seed=st.integers(0, 2**64), epoch=st.integers(0))
@settings(max_examples=150, deadline=None)
def test_every_sample_has_exactly_one_position(
    sizes: list[int], lanes: int, window: int, seed: int, epoch: int
) -> None:
    locations = list_epoch(make_order(sizes, lanes, window, (seed, epoch)))
    assert sorted(locations) == [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]


@given(sizes=SIZES, lanes=st.integers(1, 9), window=st.integers(1, 4), data=st.data())
@settings(max_examples=50, deadline=None)
def test_location_does_not_depend_on_the_other_positions_requested(
    sizes: list[int], lanes: int, window: int, data: st.DataObject
) -> None:
    order = make_order(sizes, lanes, window)
    whole = list_epoch(order)
    positions = data.draw(st.lists(st.integers(0, order.samples - 1)))
    assert to_pairs(order.locate(int64_array(positions))) == [whole[position] for position in positions]


def test_empty_order_and_empty_request() -> None:
    assert list_epoch(make_order([0, 0])) == []
    assert to_pairs(make_order([3, 2]).locate(int64_array([]))) == []


def test_every_epoch_and_seed_has_another_order() -> None:
    orders = [list_epoch(make_order([20] * 10, 2, 2, draw)) for draw in ((s, e) for s in range(6) for e in range(6))]
    assert len({tuple(order) for order in orders}) == 36
    assert list_epoch(make_order([20] * 10, 2, 2, (3, 4))) == orders[3 * 6 + 4]


class Lane(NamedTuple):
    """The shards that a lane reads in turn, and the end and the shards of each window, derived from its samples."""

    shards: list[int]
    ends: list[int]
    windows: list[set[int]]

    def find_window(self, offset: int) -> int:
        return next(number for number, end in enumerate(self.ends) if offset < end)


def derive_lane(order: EpochOrder, lane: int) -> Lane:
    """Derive a lane's windows from its samples: the next `window` distinct shards, with all of their samples."""
    shards = [shard for shard, _ in list_epoch(order)[lane :: order.lanes]]
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


def lane_offset(order: EpochOrder, lane: int, consumed: int) -> int:
    return len(range(lane, consumed, order.lanes))


@given(sizes=SIZES, lanes=st.integers(1, 5), window=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_lane_reads_window_shards_at_a_time(sizes: list[int], lanes: int, window: int, seed: int) -> None:
    order = make_order(sizes, lanes, window, (seed, 0))
    lengths = []
    for number in range(lanes):
        lane = derive_lane(order, number)
        lengths.append(len(lane.shards))
        starts = [0, *lane.ends]
        assert [set(lane.shards[a:b]) for a, b in zip(starts, lane.ends, strict=False)] == lane.windows
        assert all(len(shards) == window for shards in lane.windows[:-1])
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
def test_upcoming_shards_are_those_of_the_current_and_next_windows(
    sizes: list[int], lanes: int, window: int, seed: int, windows: int, data: st.DataObject
) -> None:
    order = make_order(sizes, lanes, window, (seed, 0))
    consumed = data.draw(st.integers(0, order.samples))
    chosen = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))

    expected: list[set[int]] = [set() for _ in range(windows)]
    for number in chosen:
        lane, offset = derive_lane(order, number), lane_offset(order, number, consumed)
        if offset < len(lane.shards):
            first = lane.find_window(offset)
            for step, shards in enumerate(lane.windows[first : first + windows]):
                expected[step] |= shards

    # The shards of a window come before those of the next one.
    upcoming = [order.upcoming_shards(consumed, int64_array(chosen), step).tolist() for step in range(windows + 1)]
    assert upcoming[0] == []
    for step, shards in enumerate(expected):
        assert upcoming[step + 1][: len(upcoming[step])] == upcoming[step]
        assert set(upcoming[step + 1][len(upcoming[step]) :]) == shards


@given(
    sizes=SIZES,
    lanes=st.integers(1, 5),
    window=st.integers(1, 4),
    seed=st.integers(0, 99),
    world=st.integers(1, 5),
    batch=st.integers(1, 30),
)
@settings(max_examples=100, deadline=None)
def test_upcoming_shards_cover_the_windows_that_a_step_spans(
    sizes: list[int], lanes: int, window: int, seed: int, world: int, batch: int
) -> None:
    # Two windows are enough unless a step starts before the next window of a lane and ends after it.
    plan = SamplingPlan(data="", sizes=int64_array(sizes), lanes=lanes, window=window, seed=seed)
    for rank in range(world):
        epoch = plan.epoch(0, Rank(rank, world))
        order = epoch.order
        all_lanes = [derive_lane(order, number) for number in range(lanes)]
        for step in epoch.steps(0, batch):
            spans = [1]
            for position in step.positions.tolist():
                number, offset = position % lanes, position // lanes
                lane = all_lanes[number]
                spans.append(lane.find_window(offset) - lane.find_window(lane_offset(order, number, step.start)) + 1)
            shards = set(epoch.locate(step.positions).shards.tolist())
            assert shards <= set(epoch.upcoming_shards(step.start, windows=max(spans)).tolist())
            if max(spans) <= 2:
                assert shards <= set(epoch.upcoming_shards(step.start).tolist())


def test_step_over_three_windows_exceeds_the_default_lookahead() -> None:
    epoch = SamplingPlan(data="", sizes=int64_array([4] * 6), window=1).epoch(0, Rank())
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
def test_remaining_shards_match_the_samples_left(
    sizes: list[int], lanes: int, window: int, seed: int, data: st.DataObject
) -> None:
    order = make_order(sizes, lanes, window, (seed, 0))
    consumed = data.draw(st.integers(0, order.samples))
    chosen = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))

    # A shard counts until the end of its window is reached.
    shards: set[int] = set()
    left = 0
    for number in chosen:
        lane, offset = derive_lane(order, number), lane_offset(order, number, consumed)
        left += len(lane.shards) - offset
        if offset < len(lane.shards):
            shards = shards.union(*lane.windows[lane.find_window(offset) :])
    remaining, weight = order.remaining_shards(consumed, int64_array(chosen), np.ones(len(sizes)))
    assert len(remaining) == len(shards)
    assert weight == pytest.approx(left)


@given(sizes=SIZES, lanes=st.integers(1, 5), window=st.integers(1, 4), data=st.data())
@settings(max_examples=50, deadline=None)
def test_remaining_weight_at_the_start_is_that_of_all_samples(
    sizes: list[int], lanes: int, window: int, data: st.DataObject
) -> None:
    order = make_order(sizes, lanes, window)
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=len(sizes), max_size=len(sizes)))
    chosen = sorted(data.draw(st.sets(st.integers(0, lanes - 1))))
    expected = sum(weights[shard] for number in chosen for shard in derive_lane(order, number).shards)
    assert order.remaining_shards(0, int64_array(chosen), np.array(weights, dtype=np.float64))[1] == pytest.approx(
        expected
    )


# By mode and rank: the steps of a small epoch, each sample as shard.sample.
PINNED = {
    ("exact", 0): ["2.0 2.4 2.3", "0.0 0.2 2.1", "0.1 2.2"],
    ("exact", 1): ["4.3 4.1 4.2", "3.1 3.0 4.0", "5.0"],
    ("resampled", 0): ["4.3 2.3 2.2", "4.0 4.2 2.0", "4.1 2.1"],
    ("resampled", 1): ["4.2 4.0 4.1", "2.4 4.3 5.0", "2.0"],
    ("join", 0): ["4.0 4.1 5.0", "4.3 4.2 2.4", "2.3 2.0 2.2", "2.1"],
    ("join", 1): ["3.0 0.2 0.0", "3.1 0.1"],
}


def test_order_matches_recorded_values() -> None:
    # A checkpoint stores only a position: if one of these must change, increment ALGORITHM.
    steps = {}
    for mode in ("exact", "resampled", "join"):
        plan = SamplingPlan(data="pets", sizes=int64_array([3, 0, 5, 2, 4, 1]), mode=mode, seed=7, lanes=2, window=2)
        for rank in range(2):
            epoch = plan.epoch(1, Rank(rank, 2))
            steps[mode, rank] = [
                " ".join(f"{shard}.{sample}" for shard, sample in to_pairs(epoch.locate(step.positions)))
                for step in epoch.steps(0, 6)
            ]
    assert ALGORITHM == 1
    assert steps == PINNED
    assert SamplingPlan(data="pets", sizes=int64_array([1]), seed=7, lanes=2).digest == "16769b99cd37db797167fb84"


@pytest.mark.parametrize(("mode", "limit_mb"), [("exact", 200), ("join", 200), ("resampled", 220)])
def test_memory_stays_small_with_a_billion_samples(mode: str, limit_mb: int) -> None:
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
print(epoch.order.samples, len(set(zip(*map(np.ndarray.tolist, epoch.locate(step.positions))))))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
    command = [sys.executable, "-c", program, mode, str(shards), str(default_lanes(shards))]
    samples, batch, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert (int(samples), int(batch)) == (shards * 1000, 256)
    assert int(peak_kb) * 1024 < limit_mb * 10**6
