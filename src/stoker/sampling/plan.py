"""The sampling plan: which positions of an epoch each rank reads at each step, in one of three modes.

exact      every sample once; each step takes the next positions of one order that does not depend on the world size
resampled  shards drawn with replacement, `epoch_samples` samples in total; otherwise like exact
join       whole shards assigned to ranks, so ranks have different numbers of steps
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from stoker.core.permutations import seed_key, splitmix64
from stoker.errors import Fault, InputError, SpecError
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import EpochOrder, Int64Array, SampleLocation
from stoker.sampling.rank import Rank

SAMPLING_MODES = {
    "exact": "every sample once; all ranks run the same number of steps, the last batch may be smaller; "
    "can resume at any step",
    "join": "every sample once; ranks read whole shards and run different numbers of steps; "
    "can resume only at the start of an epoch",
    "resampled": "shards drawn with replacement, so samples may repeat or be left out; can resume at any step",
}
ALGORITHM = 1
"""Increment when a change produces another order for the same inputs: cursors of older versions are then rejected."""


class Step(NamedTuple):
    """One rank's share of a global batch: the batch's first position, the rank's positions, the cursor after it."""

    start: int
    positions: Int64Array
    end: Cursor


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingPlan:
    """How a dataset is sampled; independent of world size and batch size, which are passed to its methods."""

    data: str
    """A digest of the dataset: the names, sizes and contents of its shards, not their location."""
    sizes: Int64Array = field(repr=False)
    mode: str = "exact"
    seed: int = 0
    lanes: int = 1
    window: int = 2
    epoch_samples: int = 0

    def __post_init__(self) -> None:
        faults = [
            *_fault_unless(
                self.mode in SAMPLING_MODES,
                "sampling",
                f"must be one of {', '.join(SAMPLING_MODES)}, got {self.mode!r}",
            ),
            *_fault_unless(self.seed >= 0, "seed", f"must be >= 0, got {self.seed}"),
            *_fault_unless(self.lanes >= 1, "lanes", f"must be >= 1, got {self.lanes}"),
            *_fault_unless(self.window >= 1, "window", f"must be >= 1, got {self.window}"),
            *_fault_unless(self.epoch_samples >= 0, "epoch_samples", f"must be >= 0, got {self.epoch_samples}"),
            *_fault_unless(
                self.mode == "resampled" or not self.epoch_samples,
                "epoch_samples",
                f"requires sampling 'resampled'; with {self.mode!r}, an epoch is the whole dataset",
            ),
            *_fault_unless(self.sizes.sum() > 0, "data", "the dataset has no samples"),
        ]
        if faults:
            raise SpecError(faults)

    @cached_property
    def digest(self) -> str:
        """A digest of everything that the order depends on; cursors carry it."""
        numbers = (self.seed, self.lanes, self.window, self.epoch_samples)
        parts = (ALGORITHM, self.data, self.mode, *map(int, numbers))  # NumPy integers have another repr
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    @cached_property
    def shard_starts(self) -> Int64Array:
        """The number of samples before each shard."""
        starts: Int64Array = np.cumsum(self.sizes) - self.sizes
        return starts

    @property
    def samples(self) -> int:
        """The number of samples in an epoch, over all ranks."""
        return self.epoch_samples or int(self.sizes.sum())

    def start_cursor(self, epoch: int = 0) -> Cursor:
        """Return the cursor at the start of an epoch."""
        return Cursor(epoch, 0, self.digest)

    def epoch(self, number: int, rank: Rank) -> Epoch:
        """Return one epoch as seen by one rank."""
        draw = (self.seed, number)
        if self.mode == "join":
            nonempty = np.flatnonzero(self.sizes)
            shards = nonempty[_shuffle(len(nonempty), seed_key("deal", *draw))][rank.number :: rank.world_size]
            order = EpochOrder(shards, self.sizes[shards], lanes=1, window=self.window, draw=(*draw, rank.number))
            return _ShardsPerRank(self, number, rank, order)
        if self.mode == "resampled":
            shards, lengths = _draw_with_replacement(self.sizes, self.samples, seed_key("drawn", *draw))
        else:
            shards = _shuffle(len(self.sizes), seed_key("shards", self.seed))
            lengths = self.sizes[shards]
        order = EpochOrder(shards, lengths, lanes=self.lanes, window=self.window, draw=draw)
        return _SharedOrder(self, number, rank, order)

    def check_cursor(self, cursor: Cursor) -> Cursor:
        """Return a cursor in normalized form: the end of an epoch becomes the start of the next.

        Raise InputError for a cursor of another plan, or one that this plan cannot resume from.
        """
        if cursor.plan != self.digest:
            raise InputError(
                f"the cursor belongs to sampling plan {cursor.plan}, the current plan is {self.digest}",
                hint="resume with the same dataset, seed, sampling, lanes, window and epoch_samples",
            )
        if self.mode == "join" and cursor.consumed:
            raise InputError(
                f"`join` cannot resume in the middle of an epoch, after {cursor.consumed:,} samples",
                hint="the samples of a rank depend on the world size: resume at the start of an epoch",
            )
        if cursor.consumed > self.samples:
            raise InputError(f"the cursor is at sample {cursor.consumed:,}, but an epoch has {self.samples:,} samples")
        return self.start_cursor(cursor.epoch + 1) if cursor.consumed == self.samples else cursor

    def world_faults(self, rank: Rank, global_batch: int) -> Iterator[Fault]:
        """Yield every reason why this rank, world size and batch size cannot be used together."""
        world, samples = rank.world_size, self.samples
        yield from _fault_unless(world >= 1, "world", f"must be >= 1, got {world}")
        yield from _fault_unless(global_batch >= 1, "global_batch", f"must be >= 1, got {global_batch}")
        yield from _fault_unless(
            world < 1 or 0 <= rank.number < world,
            "rank",
            f"must be between 0 and {world - 1} with world size {world}, got {rank.number}",
        )
        if world < 1 or global_batch < 1:
            return
        yield from _fault_unless(
            global_batch >= world,
            "global_batch",
            f"must be at least the world size ({world}), got {global_batch}",
        )
        yield from _fault_unless(
            global_batch <= samples,
            "global_batch",
            f"must be at most the number of samples per epoch ({samples:,}), got {global_batch:,}",
        )
        shards = int((self.sizes > 0).sum())
        yield from _fault_unless(
            self.mode != "join" or shards >= world,
            "sampling",
            f"must not be `join` with fewer shards than ranks ({shards} shards, {world} ranks): "
            "use `exact` or more shards",
        )


class Epoch(ABC):
    """One epoch as seen by one rank."""

    def __init__(self, plan: SamplingPlan, number: int, rank: Rank, order: EpochOrder) -> None:
        self.plan, self.number, self.rank, self.order = plan, number, rank, order

    def for_rank(self, rank: Rank) -> Self:
        """Return the same epoch as seen by another rank; only valid where all ranks share one order."""
        return type(self)(self.plan, self.number, rank, self.order)

    def locate(self, positions: Int64Array) -> SampleLocation:
        """Return the locations of the samples at these positions."""
        return self.order.locate(positions)

    def random_ids(self, positions: Int64Array, location: SampleLocation) -> Int64Array:  # noqa: ARG002
        """Return a number for each sample, unique over all ranks of the epoch, which seeds its augmentation."""
        return positions

    @property
    @abstractmethod
    def lanes(self) -> Int64Array:
        """The lanes that this rank reads."""

    def upcoming_shards(self, consumed: int, windows: int = 2) -> Int64Array:
        """Return the shards that this rank needs in the current and the next windows, in the order of need."""
        return self.order.upcoming_shards(consumed, self.lanes, windows)

    @abstractmethod
    def steps(self, consumed: int, global_batch: int) -> Iterator[Step]:
        """Yield this rank's share of every step from `consumed` to the end of the epoch."""

    @abstractmethod
    def count_steps(self, consumed: int, global_batch: int) -> int:
        """Count the steps from `consumed` to the end of the epoch."""

    @abstractmethod
    def count_samples(self, consumed: int) -> int:
        """Count the samples that this rank reads from `consumed` to the end of the epoch."""

    @abstractmethod
    def last_batch_size(self, consumed: int, global_batch: int) -> int:
        """Return the number of samples in this rank's last batch."""


class _SharedOrder(Epoch):
    """All ranks share one order: rank `r` of `W` reads the positions `p` with `p % W == r`."""

    @property
    def lanes(self) -> Int64Array:
        common = math.gcd(self.order.lanes, self.rank.world_size)
        return np.arange(self.rank.number % common, self.order.lanes, common, dtype=np.int64)

    def steps(self, consumed: int, global_batch: int) -> Iterator[Step]:
        samples, (number, world, _) = self.order.samples, self.rank
        for start in range(consumed, samples, global_batch):
            end = min(start + global_batch, samples)
            positions = np.arange(start + (number - start) % world, end, world, dtype=np.int64)
            cursor = Cursor(self.number, end, self.plan.digest)
            yield Step(start, positions, cursor if end < samples else self.plan.start_cursor(self.number + 1))

    def count_steps(self, consumed: int, global_batch: int) -> int:
        return -(-(self.order.samples - consumed) // global_batch)

    def count_samples(self, consumed: int) -> int:
        number, world, _ = self.rank
        first = consumed + (number - consumed) % world
        return max(0, -(-(self.order.samples - first) // world))

    def last_batch_size(self, consumed: int, global_batch: int) -> int:
        return self.count_samples(consumed + max(0, self.count_steps(consumed, global_batch) - 1) * global_batch)


class _ShardsPerRank(Epoch):
    """Each rank has its own shards and its own order; its last batch may be smaller."""

    def random_ids(self, positions: Int64Array, location: SampleLocation) -> Int64Array:  # noqa: ARG002
        return self.plan.shard_starts[location.shards] + location.samples

    @property
    def lanes(self) -> Int64Array:
        return np.zeros(1, dtype=np.int64)

    def steps(self, consumed: int, global_batch: int) -> Iterator[Step]:
        samples, batch = self.order.samples, self._rank_batch_size(global_batch)
        for start in range(consumed, samples, batch):
            end = min(start + batch, samples)
            # A `join` epoch can only be resumed from its start.
            cursor = self.plan.start_cursor(self.number + (end == samples))
            yield Step(start, np.arange(start, end, dtype=np.int64), cursor)

    def count_steps(self, consumed: int, global_batch: int) -> int:
        return -(-(self.order.samples - consumed) // self._rank_batch_size(global_batch))

    def count_samples(self, consumed: int) -> int:
        return self.order.samples - consumed

    def last_batch_size(self, consumed: int, global_batch: int) -> int:
        full_batches = max(0, self.count_steps(consumed, global_batch) - 1)
        return self.count_samples(consumed + full_batches * self._rank_batch_size(global_batch))

    def _rank_batch_size(self, global_batch: int) -> int:
        number, world, _ = self.rank
        return global_batch // world + (number < global_batch % world)


def data_digest(shards: Sequence[tuple[str, int, str]]) -> str:
    """Return a digest of a dataset, given the name, the sample count and the digest or size of each shard."""
    digest = hashlib.blake2b(digest_size=12)
    for shard in shards:
        digest.update(repr(shard).encode())
    return digest.hexdigest()


def _shuffle(count: int, seed: int) -> Int64Array:
    return np.argsort(splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(seed)))


def _draw_with_replacement(sizes: Int64Array, samples: int, seed: int) -> tuple[Int64Array, Int64Array]:
    """Draw shards with replacement until there are enough samples; the last shard may be used in part."""
    nonempty = np.flatnonzero(sizes)
    shards = np.empty(0, dtype=np.int64)
    while (drawn := int(sizes[shards].sum())) < samples:
        more = 1 + (samples - drawn) // int(sizes[nonempty].mean())
        numbers = np.arange(len(shards), len(shards) + more, dtype=np.uint64) + np.uint64(seed)
        shards = np.append(shards, nonempty[(splitmix64(numbers) % np.uint64(len(nonempty))).astype(np.int64)])
    ends = np.cumsum(sizes[shards])
    shards = shards[: int(np.searchsorted(ends, samples)) + 1]
    lengths = sizes[shards].copy()
    lengths[-1] -= int(lengths.sum()) - samples
    return shards, lengths


def _fault_unless(condition: bool, path: str, what: str) -> Iterator[Fault]:
    if not condition:
        yield Fault(path, what)
