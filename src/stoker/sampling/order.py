"""The shuffled sample order of one epoch, computed position by position instead of stored."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.core.permutations import Uint64Array, permute, seed_key, splitmix64

Int64Array = npt.NDArray[np.int64]


class SampleLocation(NamedTuple):
    """The locations of samples: shard numbers, and the number of each sample within its shard."""

    shards: Int64Array
    samples: Int64Array


class EpochOrder:
    """The order of all samples in one epoch; memory grows with the number of shards only.

    The given shards, with `lengths` samples each, are concatenated and split into `lanes` spans of equal length, longer
    ones first. The shard pieces of a lane are permuted for the epoch; then samples are shuffled within windows of
    `window` consecutive pieces. Position `p` is offset `p // lanes` of lane `p % lanes`.
    """

    def __init__(
        self, shards: Int64Array, lengths: Int64Array, *, lanes: int, window: int, draw: tuple[int, ...]
    ) -> None:
        self.lanes = lanes
        self.window = window
        self.samples = int(lengths.sum())
        pieces = _split_into_lanes(shards, lengths, lanes)
        words = splitmix64(np.arange(len(pieces.shards), dtype=np.uint64) + np.uint64(seed_key("pieces", *draw)))
        permutation = np.argsort(words)  # no two words are equal, so every sort algorithm gives the same result
        lane_numbers = pieces.lanes[permutation].astype(np.min_scalar_type(lanes))
        permutation = permutation[np.argsort(lane_numbers, kind="stable")]
        self._shards, self._first = pieces.shards[permutation], pieces.first[permutation]
        self._starts = np.concatenate(([0], np.cumsum(pieces.lengths[permutation])))
        self._lane_starts = np.append(_lane_starts(self.samples, lanes), self.samples)
        self._window_pieces = np.append(_first_pieces(pieces.lanes[permutation], window), len(permutation))
        self._window_starts = self._starts[self._window_pieces]
        self._longest_window = int(np.diff(self._window_pieces).max(initial=0))
        self._window_key = np.uint64(seed_key("window", *draw))

    def locate(self, positions: Int64Array) -> SampleLocation:
        """Return the locations of the samples at these positions of the epoch."""
        flat = self._lane_starts[positions % self.lanes] + positions // self.lanes
        windows = np.searchsorted(self._window_starts, flat, side="right") - 1
        start = self._window_starts[windows]
        keys: Uint64Array = splitmix64(windows.astype(np.uint64) + self._window_key)
        lengths = (self._window_starts[windows + 1] - start).astype(np.uint64)
        flat = start + permute((flat - start).astype(np.uint64), lengths, keys).astype(np.int64)
        pieces = np.searchsorted(self._starts, flat, side="right") - 1
        return SampleLocation(self._shards[pieces], self._first[pieces] + flat - self._starts[pieces])

    def upcoming_shards(self, consumed: int, lanes: Int64Array, windows: int) -> Int64Array:
        """Return the shards that these lanes read in the current and the next windows, in the order of need."""
        positions = self._lane_positions(consumed, lanes)
        unfinished = positions < self._lane_starts[lanes + 1]
        first = np.searchsorted(self._window_starts, positions[unfinished], side="right") - 1
        last = np.searchsorted(self._window_starts, self._lane_starts[lanes[unfinished] + 1], side="left")
        shards = []
        for step in range(windows):
            window = first[first + step < last] + step
            for number in range(self._longest_window):
                pieces = self._window_pieces[window] + number
                shards.append(self._shards[pieces[pieces < self._window_pieces[window + 1]]])
        return np.concatenate(shards) if shards else np.empty(0, dtype=np.int64)

    def remaining_shards(
        self, consumed: int, lanes: Int64Array, weights: npt.NDArray[np.float64]
    ) -> tuple[Int64Array, float]:
        """Return the shards that these lanes still read, and the total weight of the samples left in them.

        `weights` holds the weight of one sample of each shard.
        """
        shards, total = [np.empty(0, dtype=np.int64)], 0.0
        for position, end in zip(self._lane_positions(consumed, lanes), self._lane_starts[lanes + 1], strict=True):
            if position >= end:
                continue
            window = int(np.searchsorted(self._window_starts, position, side="right")) - 1
            pieces = slice(self._window_pieces[window], np.searchsorted(self._starts, end, side="left"))
            lengths = np.diff(self._starts[pieces.start : pieces.stop + 1])
            shards.append(self._shards[pieces])
            piece_weights = lengths * weights[self._shards[pieces]]
            # The samples left in the current window count with that window's average weight.
            current = int(self._window_pieces[window + 1]) - int(pieces.start)
            length = int(self._window_starts[window + 1] - self._window_starts[window])
            remaining = int(self._window_starts[window + 1] - position)
            total += float(piece_weights[:current].sum()) * remaining / length + float(piece_weights[current:].sum())
        return np.unique(np.concatenate(shards)), total

    def count_distinct(self, sizes: Int64Array) -> int:
        """Count the samples that occur at least once; a shard may occur several times."""
        lengths = np.diff(self._starts)
        read = np.zeros(len(sizes), dtype=np.int64)
        np.maximum.at(read, self._shards, self._first + lengths)  # only the last shard may be read in part
        return int(read.sum())

    def _lane_positions(self, consumed: int, lanes: Int64Array) -> Int64Array:
        """Return the offset that each lane has reached after `consumed` positions."""
        lane_consumed = np.maximum(0, (consumed - lanes + self.lanes - 1) // self.lanes)
        return self._lane_starts[lanes] + lane_consumed


class _Pieces(NamedTuple):
    """Parts of shards, each within one lane, sorted by lane."""

    shards: Int64Array
    first: Int64Array
    lengths: Int64Array
    lanes: Int64Array


def _lane_starts(samples: int, lanes: int) -> Int64Array:
    """Return the start of each lane; lengths differ by at most one, longer lanes first."""
    numbers = np.arange(lanes, dtype=np.int64)
    return numbers * (samples // lanes) + np.minimum(numbers, samples % lanes)


def _split_into_lanes(shards: Int64Array, lengths: Int64Array, lanes: int) -> _Pieces:
    """Concatenate the shards and split them where lanes start."""
    shards, lengths = shards[lengths > 0], lengths[lengths > 0]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    samples = int(starts[-1])
    bounds = _lane_starts(samples, lanes)
    cuts = bounds[bounds < samples]
    insert_at = np.searchsorted(starts, cuts)
    inside_shard = starts[insert_at] != cuts
    edges = np.insert(starts, insert_at[inside_shard], cuts[inside_shard])
    piece_starts = edges[:-1]
    rows = np.searchsorted(starts, piece_starts, side="right") - 1
    return _Pieces(
        shards=shards[rows],
        first=piece_starts - starts[rows],
        lengths=np.diff(edges),
        lanes=np.searchsorted(bounds, piece_starts, side="right") - 1,
    )


def _first_pieces(lanes: Int64Array, window: int) -> Int64Array:
    """Return the first piece of each window: every `window`-th piece of its lane."""
    numbers = np.arange(len(lanes), dtype=np.int64)
    first_of_lane = np.searchsorted(lanes, lanes, side="left")
    pieces: Int64Array = np.flatnonzero((numbers - first_of_lane) % window == 0)
    return pieces
