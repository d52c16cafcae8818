"""Find the shard set at a URL and build its sampling plan."""

from __future__ import annotations

import numpy as np

from stoker.errors import Fault, InputError, SpecError
from stoker.sampling.plan import SamplingPlan, data_digest
from stoker.shards.shard_set import ShardSet, find_shard_sets


def find_shard_set(url: str) -> ShardSet:
    """Return the shard set at a URL; raise InputError if there is more than one."""
    shard_sets = find_shard_sets(url)
    if len(shard_sets) > 1:
        urls = ", ".join(shard_set.url for shard_set in shard_sets)
        raise InputError(f"found {len(shard_sets)} shard sets: {urls}", where=url, hint="pass the URL of one of them")
    return shard_sets[0]


def plan_sampling(
    shard_set: ShardSet, *, sampling: str = "exact", seed: int = 0, epoch_samples: int | None = None
) -> SamplingPlan:
    """Build the sampling plan of a shard set that has a manifest."""
    assert shard_set.manifest is not None
    if epoch_samples is not None and epoch_samples < 1:
        raise SpecError([Fault("epoch_samples", f"must be >= 1, got {epoch_samples}")])
    shards = [shard_set.manifest_shards[entry.name] for entry in shard_set.shards]
    if not any(shard.samples for shard in shards):
        raise InputError("the shard set has no samples", where=shard_set.url)
    return SamplingPlan(
        data=data_digest([(shard.name, shard.samples, shard.sha256 or shard.index_sha256) for shard in shards]),
        sizes=np.array([shard.samples for shard in shards], dtype=np.int64),
        mode=sampling,
        seed=seed,
        lanes=shard_set.manifest.lanes,
        window=shard_set.manifest.window,
        epoch_samples=epoch_samples or 0,
    )
