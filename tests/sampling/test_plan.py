from __future__ import annotations

import itertools
import math
import re
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

Location = tuple[int, int]

SIZES = st.lists(st.just(0) | st.integers(1, 12), min_size=1, max_size=14).filter(any)
WORLDS = st.integers(1, 7)
BATCHES = st.integers(1, 40)


def make_plan(sizes: Sequence[int], **settings: Any) -> SamplingPlan:
    return SamplingPlan(data="pets", sizes=np.array(sizes, dtype=np.int64), **settings)


@st.composite
def shared_plans(draw: st.DrawFn, mode: str | None = None) -> SamplingPlan:
    """Build plans whose ranks share a single order."""
    mode = mode or draw(st.sampled_from(["exact", "resampled"]))
    return make_plan(
        draw(SIZES),
        mode=mode,
        seed=draw(st.integers(0, 2**32)),
        lanes=draw(st.integers(1, 9)),
        window=draw(st.integers(1, 4)),
        epoch_samples=draw(st.integers(0, 150)) if mode == "resampled" else 0,
    )


def locate_steps(plan: SamplingPlan, rank: Rank, epoch: int, steps: Sequence[Step]) -> list[Location]:
    positions = np.concatenate([step.positions for step in steps]) if steps else np.empty(0, dtype=np.int64)
    shards, samples = plan.epoch(epoch, rank).locate(positions)
    return list(zip(shards.tolist(), samples.tolist(), strict=True))


def steps_by_rank(plan: SamplingPlan, cursor: Cursor, world: int, batch: int) -> list[list[Step]]:
    """List every rank's steps from a cursor to the end of its epoch."""
    return [list(plan.epoch(cursor.epoch, Rank(rank, world)).steps(cursor.consumed, batch)) for rank in range(world)]


def list_epoch(plan: SamplingPlan, epoch: int) -> list[Location]:
    """List the samples of an epoch in the order of its positions."""
    samples = plan.epoch(epoch, Rank()).order.samples
    return locate_steps(plan, Rank(), epoch, [Step(0, np.arange(samples), plan.start_cursor())])


def run_steps(
    plan: SamplingPlan, cursor: Cursor, world: int, batch: int, steps: int | None = None
) -> tuple[list[tuple[int, Location]], Cursor]:
    """Run `steps` steps with `world` ranks; return the positions and samples read, and the cursor after them."""
    cursor = plan.check_cursor(cursor)
    epoch = cursor.epoch
    reads: list[tuple[int, Location]] = []
    ranks = steps_by_rank(plan, cursor, world, batch)
    assert len({len(rank_steps) for rank_steps in ranks}) == 1
    for rank, rank_steps in enumerate(ranks):
        rank_steps = rank_steps[:steps]
        numbers = [position for step in rank_steps for position in step.positions.tolist()]
        reads += zip(numbers, locate_steps(plan, Rank(rank, world), epoch, rank_steps), strict=True)
    for together in itertools.islice(zip(*ranks, strict=True), steps):
        assert len({step.end for step in together}) == 1
        cursor = together[0].end
    return reads, cursor


# Exact, and what resampled has in common with it


@given(plan=shared_plans("exact"), epoch=st.integers(0, 99), world=WORLDS, batch=BATCHES)
@settings(max_examples=150, deadline=None)
def test_epoch_reads_every_sample_once(plan: SamplingPlan, epoch: int, world: int, batch: int) -> None:
    reads, end = run_steps(plan, plan.start_cursor(epoch), world, batch)
    assert sorted(location for _, location in reads) == [
        (shard, sample) for shard, size in enumerate(plan.sizes.tolist()) for sample in range(size)
    ]
    assert end == plan.start_cursor(epoch + 1)


@given(plan=shared_plans(), epoch=st.integers(0, 99), world=WORLDS, batch=BATCHES, data=st.data())
@settings(max_examples=100, deadline=None)
def test_all_ranks_run_the_same_steps_with_equal_shares(
    plan: SamplingPlan, epoch: int, world: int, batch: int, data: st.DataObject
) -> None:
    samples = len(list_epoch(plan, epoch))
    consumed = data.draw(st.integers(0, samples - 1))
    ranks = steps_by_rank(plan, Cursor(epoch, consumed, plan.digest), world, batch)
    for rank, steps in enumerate(ranks):
        view = plan.epoch(epoch, Rank(rank, world))
        assert len(steps) == view.count_steps(consumed, batch) == math.ceil((samples - consumed) / batch)
        assert sum(len(step.positions) for step in steps) == view.count_samples(consumed)
        assert len(steps[-1].positions) == view.last_batch_size(consumed, batch)
    for together in zip(*ranks, strict=True):
        shares = [len(step.positions) for step in together]
        assert max(shares) - min(shares) <= 1
        start, end = together[0].start, together[0].end
        assert sum(shares) == (end.consumed or samples) - start
        assert sum(shares) == batch or end == plan.start_cursor(epoch + 1)


@given(plan=shared_plans(), epoch=st.integers(0, 99), worlds=st.tuples(WORLDS, WORLDS), batch=BATCHES)
@settings(max_examples=100, deadline=None)
def test_global_batch_does_not_depend_on_world_size(
    plan: SamplingPlan, epoch: int, worlds: tuple[int, int], batch: int
) -> None:
    batches: list[list[list[Location]]] = []
    for world in worlds:
        global_batches: list[list[Location]] = []
        for rank, steps in enumerate(steps_by_rank(plan, plan.start_cursor(epoch), world, batch)):
            rank_locations = iter(locate_steps(plan, Rank(rank, world), epoch, steps))
            global_batches = global_batches or [[] for _ in steps]
            for step, global_batch in zip(steps, global_batches, strict=True):
                global_batch += itertools.islice(rank_locations, len(step.positions))
        batches.append([sorted(global_batch) for global_batch in global_batches])
    assert batches[0] == batches[1]
    assert [len(locations) for locations in batches[0][:-1]] == [batch] * (len(batches[0]) - 1)


@given(
    plan=shared_plans(),
    epoch=st.integers(0, 99),
    runs=st.lists(st.tuples(WORLDS, BATCHES, st.integers(0, 12)), min_size=1, max_size=4),
    last=st.tuples(WORLDS, BATCHES),
)
@settings(max_examples=200, deadline=None)
def test_resume_with_another_world_size_reads_every_sample_once(
    plan: SamplingPlan, epoch: int, runs: list[tuple[int, int, int]], last: tuple[int, int]
) -> None:
    cursor, reads = plan.start_cursor(epoch), []
    for world, batch, steps in runs:
        if cursor.epoch == epoch:
            more, cursor = run_steps(plan, cursor, world, batch, steps)
            reads += more
    if cursor.epoch == epoch:
        more, cursor = run_steps(plan, cursor, *last)
        reads += more
    assert cursor == plan.start_cursor(epoch + 1)
    assert sorted(reads) == list(enumerate(list_epoch(plan, epoch)))


@given(sizes=SIZES, world=st.integers(1, 4), times=st.integers(1, 3), window=st.integers(1, 3), batch=BATCHES)
@settings(max_examples=50, deadline=None)
def test_ranks_keep_their_shards_when_world_size_divides_lanes(
    sizes: list[int], world: int, times: int, window: int, batch: int
) -> None:
    plan = make_plan(sizes, lanes=world * times, window=window)
    shard_count = 0
    for number in range(world):
        rank = Rank(number, world)
        lanes = set(plan.epoch(0, rank).lanes.tolist())
        assert lanes == set(range(number, plan.lanes, world))
        shards = []
        for epoch in range(4):
            steps = list(plan.epoch(epoch, rank).steps(0, batch))
            assert {position % plan.lanes for step in steps for position in step.positions.tolist()} <= lanes
            shards.append({shard for shard, _ in locate_steps(plan, rank, epoch, steps)})
        assert all(epoch_shards == shards[0] for epoch_shards in shards)
        shard_count += len(shards[0])
    # Two ranks share a shard only where a lane ends inside of it.
    assert shard_count <= sum(size > 0 for size in sizes) + plan.lanes - 1


@given(plan=shared_plans(), world=WORLDS)
@settings(max_examples=50, deadline=None)
def test_rank_reads_only_its_own_lanes(plan: SamplingPlan, world: int) -> None:
    for rank in range(world):
        epoch = plan.epoch(0, Rank(rank, world))
        read = {position % plan.lanes for step in epoch.steps(0, 10) for position in step.positions.tolist()}
        assert read <= set(epoch.lanes.tolist())
        if epoch.order.samples >= math.lcm(plan.lanes, world):
            assert read == set(epoch.lanes.tolist())


def test_order_depends_only_on_sizes_seed_and_epoch() -> None:
    sizes = [20] * 10
    here, there = make_plan(sizes, seed=3), SamplingPlan(data="other", sizes=np.array(sizes, dtype=np.int64), seed=3)
    later = list_epoch(here, 5)
    assert list_epoch(here, 4) == list_epoch(there, 4)
    assert list_epoch(there, 5) == later
    orders = {tuple(list_epoch(make_plan(sizes, seed=seed), epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_data_digest_covers_names_counts_and_digests() -> None:
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
    assert len({data_digest(other) for other in [shards, *changed]}) == len(changed) + 1


# Resampled


@given(sizes=SIZES, samples=st.integers(1, 300), seed=st.integers(0, 2**32), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_resampled_epoch_consists_of_whole_shards_but_the_last(
    sizes: list[int], samples: int, seed: int, epoch: int
) -> None:
    plan = make_plan(sizes, mode="resampled", epoch_samples=samples, seed=seed, lanes=3)
    counts = Counter(list_epoch(plan, epoch))
    assert counts.total() == samples
    assert len(counts) == plan.epoch(epoch, Rank()).order.count_distinct(plan.sizes)
    assert all(0 <= sample < sizes[shard] for shard, sample in counts)
    partial = []
    for shard, size in enumerate(sizes):
        times = [counts[shard, sample] for sample in range(size)]
        assert times == sorted(times, reverse=True)
        if times and times[0] != times[-1]:
            assert times[0] == times[-1] + 1
            partial.append(shard)
    assert len(partial) <= 1  # only the last shard drawn


def test_resampled_epoch_defaults_to_the_size_of_the_dataset() -> None:
    assert len(list_epoch(make_plan([5, 0, 7], mode="resampled"), 0)) == 12


def test_shards_are_drawn_with_replacement() -> None:
    plan = make_plan([4] * 50, mode="resampled", seed=1)
    drawn = [Counter(shard for shard, _ in list_epoch(plan, epoch)) for epoch in range(20)]
    for shards in drawn:
        assert 25 < len(shards) < 40  # 50 draws out of 50 hit 32 on average
    assert set().union(*drawn) == set(range(50))
    assert len({tuple(sorted(shards.items())) for shards in drawn}) == 20
    assert list_epoch(plan, 7) == list_epoch(make_plan([4] * 50, mode="resampled", seed=1), 7)
    assert list_epoch(plan, 7) != list_epoch(make_plan([4] * 50, mode="resampled", seed=2), 7)


# Join


@st.composite
def join_plans(draw: st.DrawFn) -> tuple[SamplingPlan, int, int]:
    """Build a `join` plan with a valid world size and batch size."""
    sizes = draw(SIZES)
    world = draw(st.integers(1, sum(size > 0 for size in sizes)))
    batch = draw(st.integers(world, max(world, sum(sizes))))
    plan = make_plan(sizes, mode="join", seed=draw(st.integers(0, 2**32)), window=draw(st.integers(1, 4)))
    assert list(plan.world_faults(Rank(0, world), batch)) == []
    return plan, world, batch


@given(case=join_plans(), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_join_assigns_whole_shards_to_ranks(case: tuple[SamplingPlan, int, int], epoch: int) -> None:
    plan, world, batch = case
    sizes = plan.sizes.tolist()
    owners: dict[int, int] = {}
    locations: list[Location] = []
    for rank, steps in enumerate(steps_by_rank(plan, plan.start_cursor(epoch), world, batch)):
        rank_locations = locate_steps(plan, Rank(rank, world), epoch, steps)
        for shard, _ in rank_locations:
            assert owners.setdefault(shard, rank) == rank
        locations += rank_locations
    assert sorted(locations) == [(shard, sample) for shard, size in enumerate(sizes) for sample in range(size)]


@given(case=join_plans(), epoch=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_join_rank_reads_full_batches_until_its_shards_end(case: tuple[SamplingPlan, int, int], epoch: int) -> None:
    plan, world, batch = case
    shares = []
    for rank, steps in enumerate(steps_by_rank(plan, plan.start_cursor(epoch), world, batch)):
        view = plan.epoch(epoch, Rank(rank, world))
        lengths = [len(step.positions) for step in steps]
        share = len(range(rank, batch, world))
        shares.append(share)
        assert lengths[:-1] == [share] * (len(lengths) - 1)
        assert all(0 < length <= share for length in lengths)
        assert len(steps) == view.count_steps(0, batch)
        assert sum(lengths) == view.count_samples(0)
        assert sum(lengths[-1:]) == view.last_batch_size(0, batch)
        # A `join` epoch can only be resumed from its start.
        assert [step.end for step in steps[:-1]] == [plan.start_cursor(epoch)] * (len(steps) - 1)
        assert all(step.end == plan.start_cursor(epoch + 1) for step in steps[-1:])
        assert all(plan.check_cursor(step.end) == step.end for step in steps)
    assert sum(shares) == batch


@given(case=join_plans(), epoch=st.integers(0, 99))
@example(case=(make_plan([5, 0, 5, 0], mode="join", seed=1), 2, 4), epoch=0)
@settings(max_examples=100, deadline=None)
def test_join_gives_every_rank_samples(case: tuple[SamplingPlan, int, int], epoch: int) -> None:
    plan, world, _ = case
    assert all(plan.epoch(epoch, Rank(rank, world)).count_samples(0) > 0 for rank in range(world))


def test_join_assigns_other_shards_every_epoch() -> None:
    plan = make_plan([3] * 40, mode="join")
    assignments = set()
    for epoch in range(10):
        steps = list(plan.epoch(epoch, Rank(1, 4)).steps(0, 16))
        assignments.add(frozenset(shard for shard, _ in locate_steps(plan, Rank(1, 4), epoch, steps)))
    assert len(assignments) == 10


# Invalid settings


@pytest.mark.parametrize(
    ("sizes", "settings", "paths"),
    [
        ([3], {"mode": "sorted"}, ["sampling"]),
        ([3], {"seed": -1}, ["seed"]),
        ([3], {"lanes": 0}, ["lanes"]),
        ([3], {"window": 0}, ["window"]),
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
def test_invalid_plan_reports_every_fault(sizes: list[int], settings: dict[str, Any], paths: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(sizes, **settings)
    assert [fault.path for fault in caught.value.faults] == paths


@pytest.mark.parametrize(
    ("plan", "world", "batch", "expected"),
    [
        (make_plan([5, 5]), 2, 10, []),
        (make_plan([5, 5]), 10, 10, []),
        (make_plan([5, 5]), 2, 11, [("global_batch", ["11", "10"])]),
        (make_plan([5, 5]), 4, 3, [("global_batch", ["3", "4"])]),
        (make_plan([5, 5]), 1, 0, [("global_batch", ["0"])]),
        (make_plan([5, 5]), 0, -1, [("world", ["0"]), ("global_batch", ["-1"])]),
        (make_plan([5, 5]), 12, 11, [("global_batch", ["11", "12"]), ("global_batch", ["11", "10"])]),
        (make_plan([5, 5], mode="resampled", epoch_samples=100), 2, 100, []),
        (make_plan([5, 5], mode="resampled", epoch_samples=4), 2, 5, [("global_batch", ["5", "4"])]),
        (make_plan([5, 5], mode="join"), 2, 4, []),
        (make_plan([5, 5], mode="join"), 3, 4, [("sampling", ["join", "2", "3", "exact"])]),
        (make_plan([5, 0, 5, 0], mode="join"), 3, 4, [("sampling", ["join", "2", "3", "exact"])]),
        (
            make_plan([5, 5], mode="join"),
            12,
            11,
            [
                ("global_batch", ["11", "12"]),
                ("global_batch", ["11", "10"]),
                ("sampling", ["join", "2", "12", "exact"]),
            ],
        ),
    ],
)
def test_world_faults_lists_every_fault_with_its_numbers(
    plan: SamplingPlan, world: int, batch: int, expected: list[tuple[str, list[str]]]
) -> None:
    faults = list(plan.world_faults(Rank(0, world), batch))
    assert [fault.path for fault in faults] == [path for path, _ in expected]
    for fault, (_, values) in zip(faults, expected, strict=True):
        words = re.findall(r"-?\w+", fault.what)
        assert set(values) <= set(words)


@pytest.mark.parametrize("rank", [2, 5, -1])
def test_rank_outside_of_the_world_is_a_fault(rank: int) -> None:
    # It would read the same samples as another rank.
    (fault,) = make_plan([5, 5]).world_faults(Rank(rank, 2), 4)
    assert fault.path == "rank"
    assert fault.what.endswith(f"got {rank}")
