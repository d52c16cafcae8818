"""Who reads what: the three ways to sample, each a plan of steps for every seat.

exact      every sample once; a step takes the next positions of one order, which is blind to the world
resampled  shards drawn with replacement, `epoch_samples` of their samples; otherwise as exact
join       shards dealt whole, so that ranks are uneven and end one after the other
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

from stoker.core.permutations import key, mix
from stoker.errors import Fault, InputError, SpecError
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import EpochOrder, Numbers, SampleLocation
from stoker.sampling.rank import Rank

MEANINGS = {
    "exact": "every sample once; all ranks make the same steps, the last with what is left; resumes anywhere",
    "join": "every sample once; ranks get whole shards and end unevenly; resumes at the start of an epoch",
    "resampled": "shards drawn with replacement, so that samples come again or not at all; resumes anywhere",
}
ALGORITHM = 1
"""Raised whenever a change gives another order for the same numbers: cursors of the old one are then refused."""


class Step(NamedTuple):
    """One rank's share of a global batch: where it starts, its positions, and the cursor once they are taken."""

    start: int
    positions: Numbers
    end: Cursor


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingPlan:
    """How a dataset is sampled; the world and the batch come in only when steps are asked for."""

    data: str
    """A digest of the dataset: the names, sizes and contents of its shards, wherever they lie."""
    sizes: Numbers = field(repr=False)
    mode: str = "exact"
    seed: int = 0
    lanes: int = 1
    window: int = 2
    epoch_samples: int = 0

    def __post_init__(self) -> None:
        faults = [
            *_fault_unless(self.mode in MEANINGS, "sampling", f"{self.mode!r} is none of {', '.join(MEANINGS)}"),
            *_fault_unless(self.seed >= 0, "seed", f"{self.seed} is negative"),
            *_fault_unless(self.lanes >= 1 and self.window >= 1, "lanes", "lanes and window must be 1 or more"),
            *_fault_unless(self.epoch_samples >= 0, "epoch_samples", f"{self.epoch_samples} is negative"),
            *_fault_unless(
                self.mode == "resampled" or not self.epoch_samples,
                "epoch_samples",
                f"an epoch of {self.mode!r} is the dataset; only `resampled` can have another length",
            ),
            *_fault_unless(self.sizes.sum() > 0, "data", "the dataset holds no samples"),
        ]
        if faults:
            raise SpecError(faults)

    @cached_property
    def digest(self) -> str:
        """Name all that the order depends on; a cursor holds it."""
        numbers = (self.seed, self.lanes, self.window, self.epoch_samples)
        parts = (ALGORITHM, self.data, self.mode, *map(int, numbers))  # one may be of numpy, and prints otherwise
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()

    @cached_property
    def shard_starts(self) -> Numbers:
        """How many samples lie before each shard."""
        starts: Numbers = np.cumsum(self.sizes) - self.sizes
        return starts

    @property
    def samples(self) -> int:
        """How many samples an epoch has, over all ranks."""
        return self.epoch_samples or int(self.sizes.sum())

    def start_cursor(self, epoch: int = 0) -> Cursor:
        """Give the cursor at an epoch's beginning."""
        return Cursor(epoch, 0, self.digest)

    def epoch(self, number: int, rank: Rank) -> Epoch:
        """Draw one epoch as a seat sees it."""
        draw = (self.seed, number)
        if self.mode == "join":
            full = np.flatnonzero(self.sizes)
            mine = full[_shuffle(len(full), key("deal", *draw))][rank.number :: rank.world_size]
            order = EpochOrder(mine, self.sizes[mine], lanes=1, window=self.window, draw=(*draw, rank.number))
            return _ShardsPerRank(self, number, rank, order)
        if self.mode == "resampled":
            shards, lengths = _draw_with_replacement(self.sizes, self.samples, key("drawn", *draw))
        else:
            shards = _shuffle(len(self.sizes), key("shards", self.seed))
            lengths = self.sizes[shards]
        return _SharedOrder(
            self, number, rank, EpochOrder(shards, lengths, lanes=self.lanes, window=self.window, draw=draw)
        )

    def check_cursor(self, cursor: Cursor) -> Cursor:
        """Give a cursor in its normal form; refuse one that another plan made, or that stands nowhere in this one."""
        if cursor.plan != self.digest:
            raise InputError(
                f"the cursor is of plan {cursor.plan}, and this is plan {self.digest}",
                hint="dataset, seed, sampling, lanes, window and epoch_samples must be those it was made with",
            )
        if self.mode == "join" and cursor.consumed:
            raise InputError(
                f"a `join` epoch cannot be entered at {cursor.consumed:,} consumed",
                hint="what a rank reads depends on the world: it resumes at the beginning of an epoch",
            )
        if cursor.consumed > self.samples:
            raise InputError(f"the cursor stands at {cursor.consumed:,} of an epoch of {self.samples:,} samples")
        return self.start_cursor(cursor.epoch + 1) if cursor.consumed == self.samples else cursor

    def check_world(self, rank: Rank, global_batch: int) -> Iterator[Fault]:
        """Tell what would hang or starve a world, every reason at once."""
        world, samples = rank.world_size, self.samples
        yield from _fault_unless(world >= 1, "world", f"{world} is less than 1")
        yield from _fault_unless(global_batch >= 1, "global_batch", f"{global_batch} is less than 1")
        yield from _fault_unless(
            world < 1 or 0 <= rank.number < world, "rank", f"there is no rank {rank.number} in a world of {world}"
        )
        if world < 1 or global_batch < 1:
            return
        yield from _fault_unless(
            global_batch >= world,
            "global_batch",
            f"{global_batch} samples a step cannot feed {world} ranks: some would never get one",
        )
        yield from _fault_unless(
            global_batch <= samples,
            "global_batch",
            f"{global_batch:,} is more than an epoch's {samples:,} samples: give at most those",
        )
        shards = int((self.sizes > 0).sum())
        yield from _fault_unless(
            self.mode != "join" or shards >= world,
            "sampling",
            f"`join` deals whole shards, and {shards} are not enough for {world} ranks: use `exact`, or more shards",
        )


class Epoch(ABC):
    """One epoch as a seat sees it."""

    def __init__(self, plan: SamplingPlan, number: int, rank: Rank, order: EpochOrder) -> None:
        self.plan, self.number, self.rank, self.order = plan, number, rank, order

    def for_rank(self, rank: Rank) -> Self:
        """Give the same epoch as another seat sees it, where all go through one order."""
        return type(self)(self.plan, self.number, rank, self.order)

    def locate(self, positions: Numbers) -> SampleLocation:
        """Tell where the samples at these positions lie."""
        return self.order.locate(positions)

    def random_ids(self, positions: Numbers, place: SampleLocation) -> Numbers:  # noqa: ARG002
        """Number samples of the epoch so that no two of all seats have the same: what randomness is drawn by."""
        return positions

    @property
    @abstractmethod
    def lanes(self) -> Numbers:
        """The lanes that this seat reads."""

    def upcoming_shards(self, consumed: int, windows: int = 2) -> Numbers:
        """Tell which shards this seat needs now and soon, those needed first in front."""
        return self.order.upcoming_shards(consumed, self.lanes, windows)

    @abstractmethod
    def steps(self, consumed: int, global_batch: int) -> Iterator[Step]:
        """Give this seat's share of every step from there to the epoch's end."""

    @abstractmethod
    def count_steps(self, consumed: int, global_batch: int) -> int:
        """Count the steps from there to the epoch's end."""

    @abstractmethod
    def count_samples(self, consumed: int) -> int:
        """Count the samples that this seat reads from there to the epoch's end."""

    @abstractmethod
    def last_batch_size(self, consumed: int, global_batch: int) -> int:
        """Count the samples of this seat's last batch."""


class _SharedOrder(Epoch):
    """All seats go through one order together: seat `r` of `W` takes the positions ≡ r mod W."""

    @property
    def lanes(self) -> Numbers:
        common = math.gcd(self.order.lanes, self.rank.world_size)
        return np.arange(self.rank.number % common, self.order.lanes, common, dtype=np.int64)

    def steps(self, consumed: int, global_batch: int) -> Iterator[Step]:
        samples, (rank, world, _) = self.order.samples, self.rank
        for start in range(consumed, samples, global_batch):
            end = min(start + global_batch, samples)
            positions = np.arange(start + (rank - start) % world, end, world, dtype=np.int64)
            cursor = Cursor(self.number, end, self.plan.digest)
            yield Step(start, positions, cursor if end < samples else self.plan.start_cursor(self.number + 1))

    def count_steps(self, consumed: int, global_batch: int) -> int:
        return -(-(self.order.samples - consumed) // global_batch)

    def count_samples(self, consumed: int) -> int:
        rank, world, _ = self.rank
        first = consumed + (rank - consumed) % world
        return max(0, -(-(self.order.samples - first) // world))

    def last_batch_size(self, consumed: int, global_batch: int) -> int:
        return self.count_samples(consumed + max(0, self.count_steps(consumed, global_batch) - 1) * global_batch)


class _ShardsPerRank(Epoch):
    """Each seat has shards, and so an order, of its own; its last batch is what is left."""

    def random_ids(self, positions: Numbers, place: SampleLocation) -> Numbers:  # noqa: ARG002
        return self.plan.shard_starts[place.shards] + place.samples

    @property
    def lanes(self) -> Numbers:
        return np.zeros(1, dtype=np.int64)

    def steps(self, consumed: int, global_batch: int) -> Iterator[Step]:
        samples, batch = self.order.samples, self._rank_batch_size(global_batch)
        for start in range(consumed, samples, batch):
            end = min(start + batch, samples)
            # Until the end the only way back is the epoch's beginning.
            cursor = self.plan.start_cursor(self.number + (end == samples))
            yield Step(start, np.arange(start, end, dtype=np.int64), cursor)

    def count_steps(self, consumed: int, global_batch: int) -> int:
        return -(-(self.order.samples - consumed) // self._rank_batch_size(global_batch))

    def count_samples(self, consumed: int) -> int:
        return self.order.samples - consumed

    def last_batch_size(self, consumed: int, global_batch: int) -> int:
        return self.count_samples(
            consumed + max(0, self.count_steps(consumed, global_batch) - 1) * self._rank_batch_size(global_batch)
        )

    def _rank_batch_size(self, global_batch: int) -> int:
        rank, world, _ = self.rank
        return global_batch // world + (rank < global_batch % world)


def data_digest(shards: Sequence[tuple[str, int, str]]) -> str:
    """Name a dataset by its shards: name, samples, and the digest or size of each."""
    digest = hashlib.blake2b(digest_size=12)
    for shard in shards:
        digest.update(repr(shard).encode())
    return digest.hexdigest()


def _shuffle(number: int, seed: int) -> Numbers:
    return np.argsort(mix(np.arange(number, dtype=np.uint64) + np.uint64(seed)))


def _draw_with_replacement(sizes: Numbers, samples: int, seed: int) -> tuple[Numbers, Numbers]:
    """Draw shards with replacement until there are enough samples; of the last one only what is needed."""
    full = np.flatnonzero(sizes)
    shards = np.empty(0, dtype=np.int64)
    while (have := int(sizes[shards].sum())) < samples:
        more = 1 + (samples - have) // int(sizes[full].mean())
        numbers = np.arange(len(shards), len(shards) + more, dtype=np.uint64) + np.uint64(seed)
        shards = np.append(shards, full[(mix(numbers) % np.uint64(len(full))).astype(np.int64)])
    ends = np.cumsum(sizes[shards])
    shards = shards[: int(np.searchsorted(ends, samples)) + 1]
    lengths = sizes[shards].copy()
    lengths[-1] -= int(lengths.sum()) - samples
    return shards, lengths


def _fault_unless(condition: bool, path: str, what: str) -> Iterator[Fault]:
    if not condition:
        yield Fault(path, what)
