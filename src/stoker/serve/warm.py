"""A cache filled before a run needs it: its shards, in the order in which they will be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from stoker.errors import InputError
from stoker.sampling.plan import Plan
from stoker.sampling.seat import Seat
from stoker.shards.locate import ShardSet
from stoker.storage import Entry, read_chunks


def plan_order(plan: Plan, shards: Sequence[Entry], epoch: int = 0) -> list[Entry]:
    """Put shards in the order in which an epoch first needs each of them."""
    ahead = plan.epoch(epoch, Seat(0, 1)).ahead(0, windows=len(shards))
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


def warm(one: ShardSet, shards: Sequence[Entry], *, jobs: int, progress: Callable[[int], None] = lambda _: None) -> int:
    """Read shards through a cache and throw them away; give how many bytes came."""

    def read(entry: Entry) -> int:
        for piece in read_chunks(one.store, one.folder + entry.name, entry.size):
            progress(len(piece))
        return entry.size

    with ThreadPoolExecutor(jobs, "stoker-warm") as pool:
        return sum(pool.map(read, shards))
