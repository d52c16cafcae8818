"""Check whether a shard set is shuffled: shuffling a few shards at a time cannot fix shards sorted by class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stoker.shards.shard_set import ShardSet

SAMPLED_SHARDS = 8


class ShuffleQuality(NamedTuple):
    """The mean number of classes in the sampled shards, and the number expected if they were well shuffled."""

    classes_per_shard: float
    expected_classes: float

    @property
    def is_poor(self) -> bool:
        """Whether shards miss more than a quarter of the expected classes."""
        return self.classes_per_shard < 0.75 * self.expected_classes


def measure_shuffle(shard_set: ShardSet) -> ShuffleQuality:
    """Measure from the labels of a few shards, spread over the shard set."""
    names = [entry.name for entry in shard_set.shards if shard_set.manifest_shards[entry.name].samples]
    picked = sorted({round(number) for number in np.linspace(0, len(names) - 1, SAMPLED_SHARDS)})
    labels = [shard_set.read_index(names[number])["label"] for number in picked]
    _, counts = np.unique(np.concatenate(labels), return_counts=True)
    share = counts / counts.sum()
    # A class with this share of the samples is absent from n random draws with probability (1 - share) ** n.
    expected = [float((1 - (1 - share) ** len(shard_labels)).sum()) for shard_labels in labels]
    seen = [len(np.unique(shard_labels)) for shard_labels in labels]
    return ShuffleQuality(float(np.mean(seen)), float(np.mean(expected)))
