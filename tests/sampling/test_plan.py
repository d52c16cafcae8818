from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.errors import SpecError
from stoker.sampling.cursor import Cursor
from stoker.sampling.plan import SamplingPlan, Step, data_digest
from stoker.sampling.rank import Rank

Spot = tuple[int, int]

SIZES = st.lists(st.just(0) | st.integers(1, 12), min_size=1, max_size=14).filter(any)
WORLDS = st.integers(1, 7)
BATCHES = st.integers(1, 40)


def plan(sizes: Sequence[int], **settings: Any) -> SamplingPlan:
    return SamplingPlan(data="pets", sizes=np.array(sizes, dtype=np.int64), **settings)


@st.composite
def shared_plans(draw: st.DrawFn, mode: str | None = None) -> SamplingPlan:
    """Plans whose ranks go through one order together."""
    mode = mode or draw(st.sampled_from(["exact", "resampled"]))
    return plan(
        draw(SIZES),
        mode=mode,
        seed=draw(st.integers(0, 2**32)),
        lanes=draw(st.integers(1, 9)),
        window=draw(st.integers(1, 4)),
        epoch_samples=draw(st.integers(0, 150)) if mode == "resampled" else 0,
    )


def places(one: SamplingPlan, seat: Rank, epoch: int, steps: Sequence[Step]) -> list[Spot]:
    positions = np.concatenate([step.positions for step in steps]) if steps else np.empty(0, dtype=np.int64)
    shards, samples = one.epoch(epoch, seat).locate(positions)
    return list(zip(shards.tolist(), samples.tolist(), strict=True))


def by_rank(one: SamplingPlan, cursor: Cursor, world: int, batch: int) -> list[list[Step]]:
    """Every rank's steps from a cursor to the end of its epoch."""
    return [list(one.epoch(cursor.epoch, Rank(rank, world)).steps(cursor.consumed, batch)) for rank in range(world)]


def whole(one: SamplingPlan, epoch: int) -> list[Spot]:
    """An epoch in the order of its positions."""
    samples = one.epoch(epoch, Rank()).order.samples
    return places(one, Rank(), epoch, [Step(0, np.arange(samples), one.start_cursor())])


def read(
    one: SamplingPlan, cursor: Cursor, world: int, batch: int, steps: int | None = None
) -> tuple[list[tuple[int, Spot]], Cursor]:
    """Let a world make so many steps: what it read, as position and place, and where it stands then."""
    cursor = one.check_cursor(cursor)
    epoch = cursor.epoch
    found: list[tuple[int, Spot]] = []
    ranks = by_rank(one, cursor, world, batch)
    assert len({len(mine) for mine in ranks}) == 1
    for rank, mine in enumerate(ranks):
        mine = mine[:steps]
        numbers = [position for step in mine for position in step.positions.tolist()]
        found += zip(numbers, places(one, Rank(rank, world), epoch, mine), strict=True)
    for together in itertools.islice(zip(*ranks, strict=True), steps):
        assert len({step.end for step in together}) == 1
        cursor = together[0].end
    return found, cursor


# Exact, and what resampled shares with it


@given(one=shared_plans("exact"), epoch=st.integers(0, 99), world=WORLDS, batch=BATCHES)
@settings(max_examples=150, deadline=None)
def test_an_epoch_is_every_sample_once(one: SamplingPlan, epoch: int, world: int, batch: int) -> None:
    found, end = read(one, one.start_cursor(epoch), world, batch)
    assert sorted(place for _, place in found) == [
        (shard, sample) for shard, size in enumerate(one.sizes.tolist()) for sample in range(size)
    ]
    assert end == one.start_cursor(epoch + 1)


@given(one=shared_plans(), epoch=st.integers(0, 99), world=WORLDS, batch=BATCHES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_all_ranks_make_the_same_steps_with_even_shares(
    one: SamplingPlan, epoch: int, world: int, batch: int, data: st.DataObject
) -> None:
    samples = len(whole(one, epoch))
    consumed = data.draw(st.integers(0, samples - 1))
    ranks = by_rank(one, Cursor(epoch, consumed, one.digest), world, batch)
    for rank, steps in enumerate(ranks):
        seen = one.epoch(epoch, Rank(rank, world))
        assert len(steps) == seen.count_steps(consumed, batch) == math.ceil((samples - consumed) / batch)
        assert sum(len(step.positions) for step in steps) == seen.count_samples(consumed)
        assert len(steps[-1].positions) == seen.last_batch_size(consumed, batch)
    for together in zip(*ranks, strict=True):
        shares = [len(step.positions) for step in together]
        assert max(shares) - min(shares) <= 1
        start, end = together[0].start, together[0].end
        assert sum(shares) == (end.consumed or samples) - start
        assert sum(shares) == batch or end == one.start_cursor(epoch + 1)


@given(one=shared_plans(), epoch=st.integers(0, 99), worlds=st.tuples(WORLDS, WORLDS), batch=BATCHES)
@settings(max_examples=100, deadline=None)
def test_a_global_batch_is_the_same_in_any_world(
    one: SamplingPlan, epoch: int, worlds: tuple[int, int], batch: int
) -> None:
    batches: list[list[list[Spot]]] = []
    for world in worlds:
        together: list[list[Spot]] = []
        for rank, steps in enumerate(by_rank(one, one.start_cursor(epoch), world, batch)):
            mine = iter(places(one, Rank(rank, world), epoch, steps))
            together = together or [[] for _ in steps]
            for step, found in zip(steps, together, strict=True):
                found += itertools.islice(mine, len(step.positions))
        batches.append([sorted(found) for found in together])
    assert batches[0] == batches[1]
    assert [len(each) for each in batches[0][:-1]] == [batch] * (len(batches[0]) - 1)


@given(
    one=shared_plans(),
    epoch=st.integers(0, 99),
    runs=st.lists(st.tuples(WORLDS, BATCHES, st.integers(0, 12)), min_size=1, max_size=4),
    last=st.tuples(WORLDS, BATCHES),
)
@settings(max_examples=200, deadline=None)
def test_killed_and_resumed_in_other_worlds_nothing_is_lost_or_read_twice(
    one: SamplingPlan, epoch: int, runs: list[tuple[int, int, int]], last: tuple[int, int]
) -> None:
    cursor, found = one.start_cursor(epoch), []
    for world, batch, steps in runs:
        if cursor.epoch == epoch:
            more, cursor = read(one, cursor, world, batch, steps)
            found += more
    if cursor.epoch == epoch:
        more, cursor = read(one, cursor, *last)
        found += more
    assert cursor == one.start_cursor(epoch + 1)
    assert sorted(found) == list(enumerate(whole(one, epoch)))


@given(sizes=SIZES, world=st.integers(1, 4), times=st.integers(1, 3), window=st.integers(1, 3), batch=BATCHES)
@settings(max_examples=50, deadline=None)
def test_a_world_that_divides_the_lanes_keeps_its_shards(
    sizes: list[int], world: int, times: int, window: int, batch: int
) -> None:
    one = plan(sizes, lanes=world * times, window=window)
    touched = 0
    for rank in range(world):
        seat = Rank(rank, world)
        lanes = set(one.epoch(0, seat).lanes.tolist())
        assert lanes == set(range(rank, one.lanes, world))
        shards = []
        for number in range(4):
            steps = list(one.epoch(number, seat).steps(0, batch))
            assert {position % one.lanes for step in steps for position in step.positions.tolist()} <= lanes
            shards.append({shard for shard, _ in places(one, seat, number, steps)})
        assert all(each == shards[0] for each in shards)
        touched += len(shards[0])
    # Two ranks share a shard only where a lane ends inside of it.
    assert touched <= sum(size > 0 for size in sizes) + one.lanes - 1


@given(one=shared_plans(), world=WORLDS)
@settings(max_examples=50, deadline=None)
def test_a_rank_reads_only_the_lanes_that_it_names(one: SamplingPlan, world: int) -> None:
    for rank in range(world):
        epoch = one.epoch(0, Rank(rank, world))
        read = {position % one.lanes for step in epoch.steps(0, 10) for position in step.positions.tolist()}
        assert read <= set(epoch.lanes.tolist())
        if epoch.order.samples >= math.lcm(one.lanes, world):
            assert read == set(epoch.lanes.tolist())


def test_the_order_asks_for_sizes_seed_and_epoch_only() -> None:
    sizes = [20] * 10
    here, there = plan(sizes, seed=3), SamplingPlan(data="elsewhere", sizes=np.array(sizes, dtype=np.int64), seed=3)
    later = whole(here, 5)
    assert whole(here, 4) == whole(there, 4)
    assert whole(there, 5) == later
    orders = {tuple(whole(plan(sizes, seed=seed), epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_dataset_is_named_by_its_shards() -> None:
    shards = [("a.tar", 3, "f00"), ("b.tar", 4, "ba4")]
    changed = [
        shards[::-1],
        shards[:1],
        [("a.tar", 4, "f00"), shards[1]],
        [("c.tar", 3, "f00"), shards[1]],
        [("a.tar", 3, "f01"), shards[1]],
        [],
    ]
    assert data_digest(shards) == data_digest(list(shards))
    assert len({data_digest(each) for each in [shards, *changed]}) == len(changed) + 1


# Resampled


@given(sizes=SIZES, samples=st.integers(1, 300), seed=st.integers(0, 2**32), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_a_resampled_epoch_is_whole_shards_drawn_until_it_is_full(
    sizes: list[int], samples: int, seed: int, epoch: int
) -> None:
    one = plan(sizes, mode="resampled", epoch_samples=samples, seed=seed, lanes=3)
    found = Counter(whole(one, epoch))
    assert found.total() == samples
    assert len(found) == one.epoch(epoch, Rank()).order.count_distinct(one.sizes)
    assert all(0 <= sample < sizes[shard] for shard, sample in found)
    cut = []
    for shard, size in enumerate(sizes):
        times = [found[shard, sample] for sample in range(size)]
        assert times == sorted(times, reverse=True)
        if times and times[0] != times[-1]:
            assert times[0] == times[-1] + 1
            cut.append(shard)
    assert len(cut) <= 1  # only of the last one drawn a part


def test_a_resampled_epoch_is_as_long_as_the_dataset_unless_told() -> None:
    assert len(whole(plan([5, 0, 7], mode="resampled"), 0)) == 12


def test_shards_are_drawn_with_replacement() -> None:
    one = plan([4] * 50, mode="resampled", seed=1)
    drawn = [Counter(shard for shard, _ in whole(one, epoch)) for epoch in range(20)]
    for shards in drawn:
        assert 25 < len(shards) < 40  # 50 draws of 50 find 32 on average
    assert set().union(*drawn) == set(range(50))
    assert len({tuple(sorted(shards.items())) for shards in drawn}) == 20
    assert whole(one, 7) == whole(plan([4] * 50, mode="resampled", seed=1), 7)
    assert whole(one, 7) != whole(plan([4] * 50, mode="resampled", seed=2), 7)


# Join


@st.composite
def dealt(draw: st.DrawFn) -> tuple[SamplingPlan, int, int]:
    """A `join` plan with a world and a batch that it finds no fault with."""
    sizes = draw(SIZES)
    world = draw(st.integers(1, sum(size > 0 for size in sizes)))
    batch = draw(st.integers(world, max(world, sum(sizes))))
    one = plan(sizes, mode="join", seed=draw(st.integers(0, 2**32)), window=draw(st.integers(1, 4)))
    assert list(one.check_world(Rank(0, world), batch)) == []
    return one, world, batch


@given(given=dealt(), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_join_deals_whole_shards(given: tuple[SamplingPlan, int, int], epoch: int) -> None:
    one, world, batch = given
    sizes = one.sizes.tolist()
    owners: dict[int, int] = {}
    found: list[Spot] = []
    for rank, steps in enumerate(by_rank(one, one.start_cursor(epoch), world, batch)):
        mine = places(one, Rank(rank, world), epoch, steps)
        for shard, _ in mine:
            assert owners.setdefault(shard, rank) == rank
        found += mine
    assert sorted(found) == [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]


@given(given=dealt(), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_a_rank_of_join_takes_its_share_until_nothing_is_left(given: tuple[SamplingPlan, int, int], epoch: int) -> None:
    one, world, batch = given
    shares = []
    for rank, steps in enumerate(by_rank(one, one.start_cursor(epoch), world, batch)):
        seen = one.epoch(epoch, Rank(rank, world))
        lengths = [len(step.positions) for step in steps]
        share = len(range(rank, batch, world))
        shares.append(share)
        assert lengths[:-1] == [share] * (len(lengths) - 1)
        assert all(0 < length <= share for length in lengths)
        assert len(steps) == seen.count_steps(0, batch)
        assert sum(lengths) == seen.count_samples(0)
        assert sum(lengths[-1:]) == seen.last_batch_size(0, batch)
        # Half an epoch of uneven ranks cannot be resumed, so that until its end there is only its beginning.
        assert [step.end for step in steps[:-1]] == [one.start_cursor(epoch)] * (len(steps) - 1)
        assert all(step.end == one.start_cursor(epoch + 1) for step in steps[-1:])
        assert all(one.check_cursor(step.end) == step.end for step in steps)
    assert sum(shares) == batch


@given(given=dealt(), epoch=st.integers(0, 99))
@example(given=(plan([5, 0, 5, 0], mode="join", seed=1), 2, 4), epoch=0)
@settings(max_examples=100, deadline=None)
def test_no_rank_of_join_is_left_without_samples(given: tuple[SamplingPlan, int, int], epoch: int) -> None:
    one, world, _ = given
    assert all(one.epoch(epoch, Rank(rank, world)).count_samples(0) > 0 for rank in range(world))


def test_join_deals_anew_every_epoch() -> None:
    one = plan([3] * 40, mode="join")
    hands = set()
    for epoch in range(10):
        steps = list(one.epoch(epoch, Rank(1, 4)).steps(0, 16))
        hands.add(frozenset(shard for shard, _ in places(one, Rank(1, 4), epoch, steps)))
    assert len(hands) == 10


# Faults


@pytest.mark.parametrize(
    ("sizes", "settings", "paths"),
    [
        ([3], {"mode": "sorted"}, ["sampling"]),
        ([3], {"seed": -1}, ["seed"]),
        ([3], {"lanes": 0}, ["lanes"]),
        ([3], {"window": 0}, ["lanes"]),
        ([3], {"mode": "resampled", "epoch_samples": -5}, ["epoch_samples"]),
        ([3], {"epoch_samples": 5}, ["epoch_samples"]),
        ([3], {"mode": "join", "epoch_samples": 5}, ["epoch_samples"]),
        ([], {}, ["data"]),
        ([0, 0], {}, ["data"]),
        (
            [0],
            {"mode": "sorted", "seed": -1, "lanes": -1, "epoch_samples": 7},
            ["sampling", "seed", "lanes", "epoch_samples", "data"],
        ),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_names_every_reason(sizes: list[int], settings: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        plan(sizes, **settings)
    assert [fault.path for fault in caught.value.faults] == paths


@pytest.mark.parametrize(
    ("one", "world", "batch", "expected"),
    [
        (plan([5, 5]), 2, 10, []),
        (plan([5, 5]), 10, 10, []),
        (plan([5, 5]), 2, 11, [("global_batch", "more than an epoch's 10 samples")]),
        (plan([5, 5]), 4, 3, [("global_batch", "cannot feed 4 ranks")]),
        (plan([5, 5]), 1, 0, [("global_batch", "0 is less than 1")]),
        (plan([5, 5]), 0, -1, [("world", "0 is less than 1"), ("global_batch", "-1 is less than 1")]),
        (plan([5, 5]), 12, 11, [("global_batch", "cannot feed 12 ranks"), ("global_batch", "more than an epoch's")]),
        (plan([5, 5], mode="resampled", epoch_samples=100), 2, 100, []),
        (plan([5, 5], mode="resampled", epoch_samples=4), 2, 5, [("global_batch", "more than an epoch's 4 samples")]),
        (plan([5, 5], mode="join"), 2, 4, []),
        (plan([5, 5], mode="join"), 3, 4, [("sampling", "2 are not enough for 3 ranks")]),
        (plan([5, 0, 5, 0], mode="join"), 3, 4, [("sampling", "2 are not enough for 3 ranks")]),
        (
            plan([5, 5], mode="join"),
            12,
            11,
            [("global_batch", "cannot feed"), ("global_batch", "more than"), ("sampling", "not enough for 12 ranks")],
        ),
    ],
)
def test_a_world_that_would_starve_hears_every_reason(
    one: SamplingPlan, world: int, batch: int, expected: list[tuple[str, str]]
) -> None:
    faults = list(one.check_world(Rank(0, world), batch))
    assert [fault.path for fault in faults] == [path for path, _ in expected]
    for fault, (_, part) in zip(faults, expected, strict=True):
        assert part in fault.what


@pytest.mark.parametrize("rank", [2, 5, -1])
def test_a_rank_outside_of_the_world_is_a_fault(rank: int) -> None:
    # It would read what another rank reads.
    assert list(plan([5, 5]).check_world(Rank(rank, 2), 4))
