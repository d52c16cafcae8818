"""Whether a set's shards are mixed: a shuffle of a few shards at a time cannot mend shards sorted by class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stoker.shards.shard_set import ShardSet

LOOKED_AT = 8


class Mixing(NamedTuple):
    """How many classes the shards looked at have on average, and how many they would have if they were mixed."""

    seen: float
    expected: float

    @property
    def poor(self) -> bool:
        """Whether shards lack a quarter or more of the classes that chance would give them."""
        return self.seen < 0.75 * self.expected


def mixing(one: ShardSet) -> Mixing:
    """Look at the labels of some shards, spread over the set."""
    names = [entry.name for entry in one.shards if one.known[entry.name].samples]
    picked = sorted({round(place) for place in np.linspace(0, len(names) - 1, LOOKED_AT)})
    labels = [one.index(names[place])["label"] for place in picked]
    _, counts = np.unique(np.concatenate(labels), return_counts=True)
    share = counts / counts.sum()
    # Drawn at random from all that was looked at, a class is missed with (1 - share) to the number of draws.
    expected = [float((1 - (1 - share) ** len(some)).sum()) for some in labels]
    seen = [len(np.unique(some)) for some in labels]
    return Mixing(float(np.mean(seen)), float(np.mean(expected)))
