"""What a plan means for a world: how much each rank reads, how it ends, and what a node must hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import Fault, SpecError
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import Numbers
from stoker.sampling.plan import MEANINGS, Epoch, SamplingPlan
from stoker.sampling.rank import Rank


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """What one rank reads to the end of the epoch; `tail` is how many samples its last batch has.

    `bytes` are about its own samples, `shard_bytes` all of the shards they lie in: what it fetches if they are remote.
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
    """What a world reads from a cursor to the end of its epoch."""

    sampling: str
    meaning: str
    plan: str
    epoch: int
    consumed: int
    samples: int
    """Of the rest of the epoch, over all ranks."""
    batches: int
    """Steps of the rank that makes the most."""
    tail: int
    """Samples of the last global batch."""
    duplicates: int
    """Samples of the epoch that are read again after they were read once."""
    unread: int
    """Samples of the dataset that the epoch does not read."""
    lanes: int
    window: int
    held_shards: int
    held_bytes: int
    """Of the shards that the fullest node reads from at once; as much again comes in advance."""
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
    """Tell what a world would read; refuse one that would hang or starve, with every reason at once."""
    faults = [*plan.check_world(Rank(0, world), global_batch), *_check_layout(world, nodes, workers)]
    if faults:
        raise SpecError(faults)
    cursor = plan.check_cursor(cursor)
    weights = shard_bytes / np.maximum(plan.sizes, 1)
    known: dict[int, tuple[Numbers, float]] = {}
    epoch = plan.epoch(cursor.epoch, Rank(0, world))
    seats = [Rank(rank, world) for rank in range(world)]
    epochs = (plan.epoch(cursor.epoch, seat) if plan.mode == "join" else epoch.for_rank(seat) for seat in seats)
    ranks = [_forecast_rank(one, cursor.consumed, global_batch, shard_bytes, weights, nodes, known) for one in epochs]
    batches = max(one.batches for one in ranks)
    held = _lanes_per_node(plan, world, nodes) * plan.window
    duplicates, unread = _count_repeats(plan, epoch)
    return Forecast(
        sampling=plan.mode,
        meaning=MEANINGS[plan.mode],
        plan=plan.digest,
        epoch=cursor.epoch,
        consumed=cursor.consumed,
        samples=sum(one.samples for one in ranks),
        batches=batches,
        tail=sum(one.tail for one in ranks if one.batches == batches),
        duplicates=duplicates,
        unread=unread,
        lanes=plan.lanes if plan.mode != "join" else world,
        window=plan.window,
        held_shards=min(held, len(plan.sizes)),
        held_bytes=int(min(held * float(shard_bytes.mean()), float(shard_bytes.sum()))),
        remarks=tuple(_list_remarks(plan, ranks, world, workers)),
        ranks=tuple(ranks),
    )


def _forecast_rank(
    epoch: Epoch,
    consumed: int,
    global_batch: int,
    shard_bytes: Numbers,
    weights: npt.NDArray[np.float64],
    nodes: int,
    known: dict[int, tuple[Numbers, float]],
) -> RankForecast:
    rank, world, _ = epoch.rank
    lanes = epoch.lanes
    # Ranks that read the same lanes share them evenly, and are weighed once.
    group = rank if epoch.plan.mode == "join" else int(lanes[0])
    if group not in known:
        known[group] = epoch.order.remaining_shards(consumed, lanes, weights)
    shards, weight = known[group]
    sharers = 1 if epoch.plan.mode == "join" else world * len(lanes) // epoch.order.lanes
    return RankForecast(
        rank=rank,
        node=rank * nodes // world,
        shards=len(shards),
        batches=epoch.count_steps(consumed, global_batch),
        samples=epoch.count_samples(consumed),
        bytes=round(weight / sharers),
        shard_bytes=int(shard_bytes[shards].sum()),
        tail=epoch.last_batch_size(consumed, global_batch),
    )


def _check_layout(world: int, nodes: int, workers: int) -> Iterator[Fault]:
    if nodes < 1 or (world >= 1 and world % nodes):
        yield Fault("nodes", f"{world} ranks cannot be spread evenly over {nodes} nodes")
    if workers < 0:
        yield Fault("workers", f"{workers} is negative")


def _lanes_per_node(plan: SamplingPlan, world: int, nodes: int) -> int:
    """Count the lanes that the ranks of one node read."""
    if plan.mode == "join":
        return world // nodes
    common = math.gcd(plan.lanes, world)
    return min(common, world // nodes) * plan.lanes // common


def _count_repeats(plan: SamplingPlan, epoch: Epoch) -> tuple[int, int]:
    """Count what an epoch reads again, and what of the dataset it does not read."""
    if plan.mode != "resampled":
        return 0, 0
    distinct = epoch.order.count_distinct(plan.sizes)
    return epoch.order.samples - distinct, int(plan.sizes.sum()) - distinct


def _list_remarks(plan: SamplingPlan, ranks: list[RankForecast], world: int, workers: int) -> Iterator[str]:
    if plan.mode != "join" and world > 1 and plan.lanes % world:
        yield (
            f"the number of ranks, {world}, does not divide the number of lanes, {plan.lanes}: coverage stays as "
            "planned, but ranks read from the same shards, so that a node fetches more than its part; "
            "more and smaller shards give more lanes"
        )
    fewest, most = (pick(one.batches for one in ranks) for pick in (min, max))
    if plan.mode == "join" and fewest != most:
        yield (
            f"ranks end unevenly, after {fewest:,} to {most:,} batches: train inside "
            "torch.distributed.algorithms.Join, and with no other collective in the loop"
        )
    if workers > fewest:
        yield f"{workers} workers share {fewest:,} batches: some get none"
