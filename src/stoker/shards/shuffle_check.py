"""Whether a set's shards are mixed: a shuffle of a few shards at a time cannot mend shards sorted by class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stoker.shards.shard_set import ShardSet

SAMPLED_SHARDS = 8


class ShuffleQuality(NamedTuple):
    """How many classes the shards looked at have on average, and how many they would have if they were mixed."""

    classes_per_shard: float
    expected_classes: float

    @property
    def is_poor(self) -> bool:
        """Whether shards lack a quarter or more of the classes that chance would give them."""
        return self.classes_per_shard < 0.75 * self.expected_classes


def measure_shuffle(shard_set: ShardSet) -> ShuffleQuality:
    """Look at the labels of some shards, spread over the set."""
    names = [entry.name for entry in shard_set.shards if shard_set.manifest_shards[entry.name].samples]
    picked = sorted({round(place) for place in np.linspace(0, len(names) - 1, SAMPLED_SHARDS)})
    labels = [shard_set.read_index(names[place])["label"] for place in picked]
    _, counts = np.unique(np.concatenate(labels), return_counts=True)
    share = counts / counts.sum()
    # Drawn at random from all that was looked at, a class is missed with (1 - share) to the number of draws.
    expected = [float((1 - (1 - share) ** len(some)).sum()) for some in labels]
    seen = [len(np.unique(some)) for some in labels]
    return ShuffleQuality(float(np.mean(seen)), float(np.mean(expected)))
