"""A cache filled before a run needs it: its shards, in the order in which they will be read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from stoker.errors import Fault, InputError, SpecError
from stoker.jobs.spec import load_job
from stoker.sampling.plan import Plan
from stoker.sampling.rank import Seat
from stoker.shards.shard_set import ShardSet
from stoker.storage import Entry, read_chunks

FILL = 0.9
"""The part of a cache that is filled: manifests, indexes and nginx's own ways need some."""


class Order(NamedTuple):
    """What an order is drawn from, beside the set itself."""

    sampling: str
    seed: int


def order_of_job(path: Path) -> Order:
    """Read how a job will sample: `data.sampling`, and `--seed N` among the arguments of its program."""
    job = load_job(path)
    seed = _seed(job.program.args)
    if not seed.isdecimal():
        raise SpecError([Fault("program.args", f"--seed is {seed!r}, and must be a whole number")], where=path)
    return Order(job.data.sampling, int(seed))


def _seed(args: Sequence[str]) -> str:
    """Find the last `--seed N` or `--seed=N`, as argparse does."""
    seed = "0"
    for word, after in itertools.pairwise([*args, ""]):
        name, equals, value = word.partition("=")
        if name == "--seed":
            seed = value if equals else after
    return seed


def plan_order(plan: Plan, shards: Sequence[Entry], epoch: int = 0) -> list[Entry]:
    """Put shards in the order in which an epoch first needs each of them."""
    drawn, windows = plan.epoch(epoch, Seat(0, 1)), len(shards)
    while len(ahead := drawn.ahead(0, windows)) < len(drawn.ahead(0, 2 * windows)):  # resampled, and some come often
        windows *= 2
    return [shards[number] for number in dict.fromkeys(ahead.tolist())]


def parse_slice(text: str, count: int) -> slice:
    """Read `A..B`: the shards from number A up to and with B."""
    low, dots, high = text.partition("..")
    if not dots or not all(part == "" or part.isdecimal() for part in (low, high)):
        raise InputError(f"--shards is {text!r}, and must be A..B, for example 0..99")
    first, last = int(low or 0), int(high or count - 1)
    if first > last or first >= count:
        raise InputError(f"--shards is {text!r}, and there are the shards 0 to {count - 1}")
    return slice(first, last + 1)


def fitting(shards: Sequence[Entry], budget: int) -> list[Entry]:
    """Take the first shards that a cache of this size holds together: more would push out those needed first."""
    ends = itertools.accumulate(entry.size for entry in shards)
    return [entry for entry, end in zip(shards, ends, strict=True) if end <= budget * FILL]


def warm(one: ShardSet, shards: Sequence[Entry], *, jobs: int, progress: Callable[[int], None] = lambda _: None) -> int:
    """Read shards through a cache and throw them away; give how many bytes came."""

    def read(entry: Entry) -> int:
        for piece in read_chunks(one.store, one.folder + entry.name, entry.size):
            progress(len(piece))
        return entry.size

    with ThreadPoolExecutor(jobs, "stoker-warm") as pool:
        return sum(pool.map(read, shards))
