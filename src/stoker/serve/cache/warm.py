"""Warm a cache before a run: read its shards in the order in which the run will need them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from stoker.errors import Fault, InputError, SpecError
from stoker.jobs.spec import load_job
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from stoker.shards.shard_set import ShardSet
from stoker.storage import Entry, read_chunks

MAX_FILL_RATIO = 0.9
"""The share of a cache to fill; manifests, indexes and nginx's eviction need the rest."""


class WarmPlan(NamedTuple):
    """The sampling settings that determine the order of shards."""

    sampling: str
    seed: int


def read_job_plan(path: Path) -> WarmPlan:
    """Read a job's `data.sampling`, and `--seed N` from the arguments of its program."""
    job = load_job(path)
    seed = _parse_seed(job.program.args)
    if not seed.isdecimal():
        raise SpecError([Fault("program.args", f"--seed must be an integer, got {seed!r}")], where=path)
    return WarmPlan(job.data.sampling, int(seed))


def _parse_seed(args: Sequence[str]) -> str:
    """Return the last `--seed N` or `--seed=N`, like argparse."""
    seed = "0"
    for argument, after in itertools.pairwise([*args, ""]):
        name, equals, value = argument.partition("=")
        if name == "--seed":
            seed = value if equals else after
    return seed


def order_shards(plan: SamplingPlan, shards: Sequence[Entry], epoch: int = 0) -> list[Entry]:
    """Return shards in the order in which an epoch first reads each of them."""
    order, windows = plan.epoch(epoch, Rank(0, 1)), len(shards)
    while len(ahead := order.upcoming_shards(0, windows)) < len(
        order.upcoming_shards(0, 2 * windows)
    ):  # resampling repeats some shards
        windows *= 2
    return [shards[number] for number in dict.fromkeys(ahead.tolist())]


def parse_shard_range(text: str, count: int) -> slice:
    """Parse `A..B`, the shards from A to B inclusive."""
    low, dots, high = text.partition("..")
    if not dots or not all(part == "" or part.isdecimal() for part in (low, high)):
        raise InputError(f"--shards must be A..B, for example 0..99, got {text!r}")
    first, last = int(low or 0), int(high or count - 1)
    if first > last or first >= count:
        raise InputError(f"--shards {text} is out of range: the shards are 0 to {count - 1}")
    return slice(first, last + 1)


def select_fitting(shards: Sequence[Entry], budget: int) -> list[Entry]:
    """Return the first shards that fit together; more would evict those needed first."""
    ends = itertools.accumulate(entry.size for entry in shards)
    return [entry for entry, end in zip(shards, ends, strict=True) if end <= budget * MAX_FILL_RATIO]


def warm_cache(
    shard_set: ShardSet, shards: Sequence[Entry], *, jobs: int, progress: Callable[[int], None] = lambda _: None
) -> int:
    """Read shards through a cache, discard the data, and return the number of bytes."""

    def read(entry: Entry) -> int:
        for chunk in read_chunks(shard_set.store, shard_set.folder + entry.name, entry.size):
            progress(len(chunk))
        return entry.size

    with ThreadPoolExecutor(jobs, "stoker-warm") as pool:
        return sum(pool.map(read, shards))
