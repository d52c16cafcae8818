"""Forecast of an epoch for a world size: steps, samples and bytes of each rank, and the shards a node holds at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.core.units import pluralize
from stoker.errors import Fault, SpecError
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import Int64Array
from stoker.sampling.plan import SAMPLING_MODES, Epoch, SamplingPlan
from stoker.sampling.rank import Rank


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """What one rank reads until the end of the epoch; `tail` is the size of its last batch.

    `bytes` estimates the bytes of its own samples; `shard_bytes` counts the whole shards that hold them, which is what
    the rank downloads from remote storage.
    """

    rank: int
    node: int
    shards: int
    batches: int
    samples: int
    bytes: int
    shard_bytes: int
    tail: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What all ranks read from a cursor to the end of its epoch."""

    sampling: str
    meaning: str
    plan: str
    epoch: int
    consumed: int
    samples: int
    """Samples left in the epoch, over all ranks."""
    batches: int
    """Steps of the rank that has the most."""
    tail: int
    """Samples in the last global batch."""
    duplicates: int
    """Reads of samples that the epoch has already read."""
    unread: int
    """Samples of the dataset that the epoch does not read."""
    lanes: int
    window: int
    held_shards: int
    held_bytes: int
    """Bytes of the shards that one node reads from at once; prefetching needs the same amount again."""
    remarks: tuple[str, ...]
    ranks: tuple[RankForecast, ...]


def forecast(
    plan: SamplingPlan,
    *,
    shard_bytes: npt.NDArray[np.int64],
    world: int,
    nodes: int,
    workers: int,
    global_batch: int,
    cursor: Cursor,
) -> Forecast:
    """Compute what `world` ranks would read; raise SpecError with every reason why they could not train."""
    faults = [*plan.world_faults(Rank(0, world), global_batch), *_layout_faults(world, nodes, workers)]
    if faults:
        raise SpecError(faults)
    cursor = plan.check_cursor(cursor)
    weights = shard_bytes / np.maximum(plan.sizes, 1)
    lane_cache: dict[int, tuple[Int64Array, float]] = {}
    epoch = plan.epoch(cursor.epoch, Rank(0, world))
    ranks = [Rank(number, world) for number in range(world)]
    views = (plan.epoch(cursor.epoch, rank) if plan.mode == "join" else epoch.for_rank(rank) for rank in ranks)
    forecasts = [
        _forecast_rank(view, cursor.consumed, global_batch, shard_bytes, weights, nodes, lane_cache) for view in views
    ]
    batches = max(each.batches for each in forecasts)
    held = _lanes_per_node(plan, world, nodes) * plan.window
    duplicates, unread = _count_repeats(plan, epoch)
    return Forecast(
        sampling=plan.mode,
        meaning=SAMPLING_MODES[plan.mode],
        plan=plan.digest,
        epoch=cursor.epoch,
        consumed=cursor.consumed,
        samples=sum(each.samples for each in forecasts),
        batches=batches,
        tail=sum(each.tail for each in forecasts if each.batches == batches),
        duplicates=duplicates,
        unread=unread,
        lanes=plan.lanes if plan.mode != "join" else world,
        window=plan.window,
        held_shards=min(held, len(plan.sizes)),
        held_bytes=int(min(held * float(shard_bytes.mean()), float(shard_bytes.sum()))),
        remarks=tuple(_list_remarks(plan, forecasts, world, nodes, workers)),
        ranks=tuple(forecasts),
    )


def _forecast_rank(
    epoch: Epoch,
    consumed: int,
    global_batch: int,
    shard_bytes: Int64Array,
    weights: npt.NDArray[np.float64],
    nodes: int,
    lane_cache: dict[int, tuple[Int64Array, float]],
) -> RankForecast:
    number, world, _ = epoch.rank
    lanes = epoch.lanes
    # Ranks that read the same lanes share them evenly, so each group of lanes is computed once.
    group = number if epoch.plan.mode == "join" else int(lanes[0])
    if group not in lane_cache:
        lane_cache[group] = epoch.order.remaining_shards(consumed, lanes, weights)
    shards, weight = lane_cache[group]
    ranks_per_lane = 1 if epoch.plan.mode == "join" else world * len(lanes) // epoch.order.lanes
    return RankForecast(
        rank=number,
        node=number * nodes // world,
        shards=len(shards),
        batches=epoch.count_steps(consumed, global_batch),
        samples=epoch.count_samples(consumed),
        bytes=round(weight / ranks_per_lane),
        shard_bytes=int(shard_bytes[shards].sum()),
        tail=epoch.last_batch_size(consumed, global_batch),
    )


def _layout_faults(world: int, nodes: int, workers: int) -> Iterator[Fault]:
    if nodes < 1 or (world >= 1 and world % nodes):
        yield Fault("nodes", f"must divide the number of ranks ({world}) evenly, got {nodes}")
    if workers < 0:
        yield Fault("workers", f"must be >= 0, got {workers}")


def _lanes_per_node(plan: SamplingPlan, world: int, nodes: int) -> int:
    """Count the lanes that the ranks of one node read."""
    if plan.mode == "join":
        return world // nodes
    common = math.gcd(plan.lanes, world)
    return min(common, world // nodes) * plan.lanes // common


def _count_repeats(plan: SamplingPlan, epoch: Epoch) -> tuple[int, int]:
    """Count the repeated reads of an epoch, and the samples of the dataset that it does not read."""
    if plan.mode != "resampled":
        return 0, 0
    distinct = epoch.order.count_distinct(plan.sizes)
    return epoch.order.samples - distinct, int(plan.sizes.sum()) - distinct


def _list_remarks(
    plan: SamplingPlan, forecasts: list[RankForecast], world: int, nodes: int, workers: int
) -> Iterator[str]:
    if plan.mode != "join" and _lanes_per_node(plan, world, nodes) * nodes > plan.lanes:
        yield (
            f"the sample list is divided into {pluralize(plan.lanes, 'lane')}, which cannot be distributed evenly over "
            f"{world} ranks on {nodes} nodes. Sampling is still correct, but nodes read overlapping shards and "
            "download more than their share. To get more lanes, convert the dataset to more, smaller shards"
        )
    fewest, most = (select(each.batches for each in forecasts) for select in (min, max))
    if plan.mode == "join" and fewest != most:
        yield (
            f"ranks finish after {fewest:,} to {most:,} batches: train inside "
            "torch.distributed.algorithms.Join, with no other collective in the loop"
        )
    if workers > fewest:
        yield f"{workers} DataLoader workers share {fewest:,} batches: some workers get none"
