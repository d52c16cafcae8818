"""The order of an epoch: drawn from numbers alone, and computed where it is asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.core.permutations import Words, key, mix, permute

Numbers = npt.NDArray[np.int64]


class SampleLocation(NamedTuple):
    """Where samples lie: shard numbers, and the number of each sample within its shard."""

    shards: Numbers
    samples: Numbers


class EpochOrder:
    """One epoch's order of all samples, in memory that grows with the number of shards only.

    The shards that were given, so many samples of each, are laid end to end and cut into `lanes` spans of equal
    length, longer ones first. A lane's pieces of shards are laid anew within its span, in an order drawn for the epoch;
    then samples are shuffled among `window` neighbouring pieces. Position `p` is offset `p // lanes` of lane
    `p % lanes`.
    """

    def __init__(self, shards: Numbers, lengths: Numbers, *, lanes: int, window: int, draw: tuple[int, ...]) -> None:
        self.lanes = lanes
        self.window = window
        self.samples = int(lengths.sum())
        pieces = _split_into_lanes(shards, lengths, lanes)
        words = mix(np.arange(len(pieces.shards), dtype=np.uint64) + np.uint64(key("pieces", *draw)))
        placed = np.argsort(words)  # all words differ, so that every sort gives the same
        by_lane = pieces.lanes[placed].astype(np.min_scalar_type(lanes))
        placed = placed[np.argsort(by_lane, kind="stable")]
        self._shards, self._first = pieces.shards[placed], pieces.first[placed]
        self._starts = np.concatenate(([0], np.cumsum(pieces.lengths[placed])))
        self._lane_starts = np.append(_lane_starts(self.samples, lanes), self.samples)
        self._heads = np.append(_first_pieces(pieces.lanes[placed], window), len(placed))
        self._window_starts = self._starts[self._heads]
        self._window_key = np.uint64(key("window", *draw))

    def locate(self, positions: Numbers) -> SampleLocation:
        """Tell where the samples at these positions of the epoch lie."""
        flat = self._lane_starts[positions % self.lanes] + positions // self.lanes
        windows = np.searchsorted(self._window_starts, flat, side="right") - 1
        start = self._window_starts[windows]
        keys: Words = mix(windows.astype(np.uint64) + self._window_key)
        lengths = (self._window_starts[windows + 1] - start).astype(np.uint64)
        flat = start + permute((flat - start).astype(np.uint64), lengths, keys).astype(np.int64)
        pieces = np.searchsorted(self._starts, flat, side="right") - 1
        return SampleLocation(self._shards[pieces], self._first[pieces] + flat - self._starts[pieces])

    def upcoming_shards(self, consumed: int, lanes: Numbers, windows: int) -> Numbers:
        """Tell which shards these lanes read in this window and the next ones, those needed first in front."""
        at = self._lane_positions(consumed, lanes)
        alive = at < self._lane_starts[lanes + 1]
        first = np.searchsorted(self._window_starts, at[alive], side="right") - 1
        last = np.searchsorted(self._window_starts, self._lane_starts[lanes[alive] + 1], side="left")
        found = []
        for step in range(windows):
            window = first[first + step < last] + step
            for piece in range(self.window):
                heads = self._heads[window] + piece
                found.append(self._shards[heads[heads < self._heads[window + 1]]])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def remaining_shards(
        self, consumed: int, lanes: Numbers, weights: npt.NDArray[np.float64]
    ) -> tuple[Numbers, float]:
        """Name the shards that these lanes still touch, and weigh the samples left, each by its shard's weight."""
        shards, weight = [np.empty(0, dtype=np.int64)], 0.0
        for at, end in zip(self._lane_positions(consumed, lanes), self._lane_starts[lanes + 1], strict=True):
            if at >= end:
                continue
            window = int(np.searchsorted(self._window_starts, at, side="right")) - 1
            pieces = slice(self._heads[window], np.searchsorted(self._starts, end, side="left"))
            lengths = np.diff(self._starts[pieces.start : pieces.stop + 1])
            shards.append(self._shards[pieces])
            weighed = lengths * weights[self._shards[pieces]]
            # Of the window that is under way the part that is left, as if all its samples weighed the same.
            current = int(self._heads[window + 1]) - int(pieces.start)
            length = int(self._window_starts[window + 1] - self._window_starts[window])
            left = int(self._window_starts[window + 1] - at)
            weight += float(weighed[:current].sum()) * left / length + float(weighed[current:].sum())
        return np.unique(np.concatenate(shards)), weight

    def count_distinct(self, sizes: Numbers) -> int:
        """Count the samples that come at least once; a shard may have been given many times."""
        lengths = np.diff(self._starts)
        reach = np.zeros(len(sizes), dtype=np.int64)
        np.maximum.at(reach, self._shards, self._first + lengths)  # only the last one given is not read to its end
        return int(reach.sum())

    def _lane_positions(self, consumed: int, lanes: Numbers) -> Numbers:
        """Give where each lane stands after so many positions."""
        taken = np.maximum(0, (consumed - lanes + self.lanes - 1) // self.lanes)
        return self._lane_starts[lanes] + taken


class _Pieces(NamedTuple):
    """Parts of shards that lie in one lane each, in the order of the lanes."""

    shards: Numbers
    first: Numbers
    lengths: Numbers
    lanes: Numbers


def _lane_starts(samples: int, lanes: int) -> Numbers:
    """Give where each lane starts: lengths differ by one at most, longer lanes first."""
    numbers = np.arange(lanes, dtype=np.int64)
    return numbers * (samples // lanes) + np.minimum(numbers, samples % lanes)


def _split_into_lanes(shards: Numbers, lengths: Numbers, lanes: int) -> _Pieces:
    """Lay the shards end to end and cut them where lanes begin."""
    shards, lengths = shards[lengths > 0], lengths[lengths > 0]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    samples = int(starts[-1])
    bounds = _lane_starts(samples, lanes)
    cuts = bounds[bounds < samples]
    places = np.searchsorted(starts, cuts)
    inside = starts[places] != cuts
    edges = np.insert(starts, places[inside], cuts[inside])
    begins = edges[:-1]
    within = np.searchsorted(starts, begins, side="right") - 1
    return _Pieces(
        shards=shards[within],
        first=begins - starts[within],
        lengths=np.diff(edges),
        lanes=np.searchsorted(bounds, begins, side="right") - 1,
    )


def _first_pieces(lanes: Numbers, window: int) -> Numbers:
    """Number the pieces that begin a window: every `window`-th of its lane."""
    numbers = np.arange(len(lanes), dtype=np.int64)
    first_of_lane = np.searchsorted(lanes, lanes, side="left")
    heads: Numbers = np.flatnonzero((numbers - first_of_lane) % window == 0)
    return heads
