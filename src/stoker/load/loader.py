"""The loader: a shard set's epochs as batches, decoded by threads, in an order that only the plan decides."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex

import numpy as np

from stoker.core.threads import Threads
from stoker.core.units import parse_bytes
from stoker.errors import DataFaultError, Fault, InputError, SpecError
from stoker.load.buffers import Allocate, Buffers
from stoker.load.collate import EncodedRows, Filled, PixelRows, Rows, UserRows, UserTransform
from stoker.load.native import DECODERS, chosen
from stoker.load.reader import Reader
from stoker.load.transforms import MAX_SIZE, TRANSFORMS
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import Numbers, Place
from stoker.sampling.plan import Epoch, Plan, Step, data_digest
from stoker.sampling.rank import Seat
from stoker.shards.scan import described
from stoker.shards.shard_set import ShardSet, find_sets
from stoker.storage.cache import Cache

SLICE = 32
"""Rows that a thread makes at a time: handing over single images costs more than it spreads."""
PLACED = 16
"""Steps whose places are found at once."""
LAYOUTS = ("NHWC", "NCHW")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch, without its bad samples.

    `images` are uint8 pixels, or what the user's transform made, or without a transform a list of encoded images;
    `count` is how many there are. `cursor` is where the epoch stands once this batch is taken. `positions` are those of
    the rows in the epoch: `plan.epoch(number, seat).at(positions)` tells their shards.
    """

    images: Any
    labels: Numbers
    count: int
    cursor: Cursor
    positions: Numbers


class Bad(NamedTuple):
    """A sample that was left out: the URL of its shard, at which byte it lies there, when it was due, and why."""

    shard: str
    offset: int
    epoch: int
    position: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds by stage, summed over the threads; `wait` is how long the consumer waited for batches."""

    fetch: float = 0.0
    read: float = 0.0
    decode: float = 0.0
    transform: float = 0.0
    wait: float = 0.0
    images: int = 0
    natively: int = 0
    """How many of the images the native decoder made."""

    def __add__(self, other: Times) -> Times:
        return Times(
            fetch=self.fetch + other.fetch,
            read=self.read + other.read,
            decode=self.decode + other.decode,
            transform=self.transform + other.transform,
            wait=self.wait + other.wait,
            images=self.images + other.images,
            natively=self.natively + other.natively,
        )


class Loader:
    """Iterates a shard set, one epoch for each `for`; the next goes on where the last was left.

    The order depends on the dataset, seed and epoch alone. `state_dict()` is a cursor of what the consumer has taken;
    it goes on in any world, with any batch size and any number of threads. `transform` is the name of
    one ("imagenet-train", "imagenet-val", "small-train", "digits-train", "whole"), None for the encoded bytes, or a
    function of upright RGB pixels and a random generator. `decoder` is "native" where stoker-native is installed
    and the processor has AVX2, "python" elsewhere, unless it is named.
    """

    def __init__(
        self,
        url: str | Path | ShardSet,
        *,
        global_batch: int,
        transform: str | UserTransform | None = "imagenet-train",
        size: int = 224,
        antialias: bool = True,
        layout: str = "NHWC",
        sampling: str = "exact",
        epoch_samples: int | None = None,
        seed: int = 0,
        seat: Seat | tuple[int, int] | None = None,
        cache: str | Path | None = None,
        cache_size: int | str | None = None,
        prefetch: int = 4,
        threads: int | None = None,
        max_bad: float = 0.001,
        allocate: Allocate | None = None,
        decoder: str = "auto",
    ) -> None:
        if odd := _odd_numbers(
            {"global_batch": global_batch, "size": size, "seed": seed, "prefetch": prefetch},
            {"epoch_samples": epoch_samples, "threads": threads},
            seat,
        ):
            raise SpecError(odd)
        budget, faults = _budget(cache_size)
        faults += _setting_faults(transform, size, layout, prefetch, threads, max_bad, decoder)
        self.seat = Seat.from_environ(os.environ) if seat is None else Seat(*seat)
        cores = len(os.sched_getaffinity(0))
        self.set = described(url if isinstance(url, ShardSet) else find_one(str(url)), jobs=cores)
        try:
            self.plan = plan_of(self.set, sampling=sampling, seed=seed, epoch_samples=epoch_samples)
            faults += self.plan.faults(self.seat, global_batch)
        except SpecError as error:
            faults += error.faults
        if faults:
            raise SpecError(faults, where=self.set.url)
        self.global_batch = global_batch
        self.threads = threads or max(1, cores // self.seat.local_world)
        self.times = Times()
        self.bad: list[Bad] = []
        """What was left out so far, of all epochs."""
        self._prefetch, self._max_bad = prefetch, max_bad
        self._rows = _rows(transform, size, layout, antialias, seed, allocate, decoder)
        folder = os.environ.get("STOKER_CACHE_DIR", "") if cache is None else cache
        self._reader = Reader(self.set, cache=Cache(Path(folder).expanduser(), budget) if folder else None)
        self._cursor = self.plan.start()
        self._running: Generator[Batch] | None = None

    @property
    def cursor(self) -> Cursor:
        """Where the consumer stands: after the last batch that it took."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor as plain values, for a checkpoint."""
        if self.plan.mode == "join" and self._running is not None:
            log.warning("%s: `join` resumes at an epoch's start: what was read of this one comes again", self.set.url)
        return self._cursor.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor, whatever world it was made in: the next `for` starts there, one that runs is ended."""
        self._stop()
        self._cursor = self.plan.check_cursor(Cursor.from_state(state))

    def __len__(self) -> int:
        """Count the batches from the cursor to the end of its epoch."""
        return self._epoch().count(self._cursor.consumed, self.global_batch)

    def __iter__(self) -> Iterator[Batch]:
        """Give the rest of the epoch in which the cursor stands; an iteration that still runs is ended."""
        self._stop()
        self._running = batches = self.share(0, 1)
        try:
            for batch in batches:
                self._cursor = batch.cursor
                yield batch
            if self._running is not batches:  # to end quietly would look like the end of the epoch
                raise InputError(
                    "this iteration was ended: another one began, a cursor was loaded, or the loader was closed",
                    where=self.set.url,
                )
        finally:
            batches.close()

    def share(self, worker: int, workers: int) -> Generator[Batch]:
        """Give every `workers`-th batch of the rest of the epoch, for a process that makes only those.

        The cursor is left where it is; every batch carries its own.
        """
        epoch = self._epoch()
        steps = itertools.islice(epoch.steps(self._cursor.consumed, self.global_batch), worker, None, workers)
        return self._batches(epoch, steps, workers)

    def close(self) -> None:
        """End all threads and let go of all shards. A loader that is used again opens them again."""
        self._stop()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _epoch(self) -> Epoch:
        return self.plan.epoch(self._cursor.epoch, self.seat)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _batches(self, epoch: Epoch, steps: Iterator[Step], workers: int) -> Generator[Batch]:
        """Keep `prefetch` batches in the making, and give them in order."""
        allowed = self._max_bad * self.plan.samples
        found: list[Bad] = []
        threads = max(1, self.threads // workers)
        pool = Threads(threads, "stoker-decode")
        making: deque[_Making] = deque()
        self._reader.begin()
        placed = self._placed(epoch, steps, making)
        try:
            while True:
                for step, place in itertools.islice(placed, self._prefetch - len(making)):
                    making.append(_Making(epoch, step, place, self._rows, self._reader, pool, threads))
                if not making:
                    break
                batch, bad, times = making.popleft().finish()
                self.times += times
                self.bad += bad
                found += bad
                if len(found) > allowed:
                    raise DataFaultError(
                        f"{_counted(found)}: more than max_bad={self._max_bad:g} allows",
                        where=self.set.url,
                        hint="mend the dataset (stoker data verify --deep lists them all), or raise max_bad",
                    )
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            if found:
                log.warning("%s: epoch %d left out %s", self.set.url, epoch.number, _counted(found))

    def _placed(self, epoch: Epoch, steps: Iterator[Step], making: deque[_Making]) -> Iterator[tuple[Step, Place]]:
        """Find the places of some steps at once, which costs little more than those of one, and their shards."""
        while some := list(itertools.islice(steps, PLACED)):
            places = epoch.at(np.concatenate([step.positions for step in some]))
            oldest = making[0].step.start if making else some[0].start
            self._reader.keep([*epoch.ahead(oldest).tolist(), *np.unique(places.shards).tolist()])
            ends = itertools.accumulate(len(step.positions) for step in some)
            for step, end in zip(some, ends, strict=True):
                part = slice(end - len(step.positions), end)
                yield step, Place(places.shards[part], places.samples[part])


class _Making:
    """A batch in the making: its rows are filled in slices, each a task of the pool."""

    def __init__(
        self, epoch: Epoch, step: Step, place: Place, rows: Rows, reader: Reader, pool: Threads, threads: int
    ) -> None:
        self.step = step
        self._epoch, self._rows, self._reader = epoch, rows, reader
        count = len(step.positions)
        self._place = place
        self._numbers = epoch.numbers(step.positions, place)
        self._room = rows.room(count)
        self._labels = np.empty(count, dtype=np.int64)
        length = max(1, count if isinstance(rows, EncodedRows) else min(SLICE, -(-count // threads)))
        self._slices: list[Future[tuple[Filled, Times]]] = [
            pool.submit(self._fill, slice(first, min(first + length, count))) for first in range(0, count, length)
        ]

    def finish(self) -> tuple[Batch, list[Bad], Times]:
        """Wait for the rows, and give the batch without the bad ones."""
        started = time.perf_counter()
        done = [one.result() for one in self._slices]
        times = sum((times for _, times in done), Times(wait=time.perf_counter() - started))
        bad = [one for filled, _ in done for one in filled.bad]
        end, positions = self.step.end, self.step.positions
        if not bad:
            batch = Batch(self._rows.pick(self._room, None), self._labels, len(self._labels), end, positions)
            return batch, [], times
        left_out = {row for row, _ in bad}
        good = [row for row in range(len(self._labels)) if row not in left_out]
        images, labels = self._rows.pick(self._room, good), self._labels[good]
        batch = Batch(images, labels, len(good), end, positions[np.array(good, dtype=np.int64)])
        return batch, [self._describe(row, reason) for row, reason in bad], times

    def _fill(self, part: slice) -> tuple[Filled, Times]:
        started = time.perf_counter()
        samples = self._reader.read(Place(self._place.shards[part], self._place.samples[part]))
        read_s = time.perf_counter() - started - samples.fetch_s
        self._labels[part] = samples.labels
        filled = self._rows.fill(self._room, part.start, samples.images, self._epoch.number, self._numbers[part])
        return filled, Times(
            fetch=samples.fetch_s,
            read=read_s,
            decode=filled.decode_s,
            transform=filled.transform_s,
            images=len(samples.images),
            natively=filled.natively,
        )

    def _describe(self, row: int, reason: str) -> Bad:
        url, offset = self._reader.where(int(self._place.shards[row]), int(self._place.samples[row]))
        return Bad(url, offset, self._epoch.number, int(self.step.positions[row]), reason)


def find_one(url: str) -> ShardSet:
    """Find the one shard set that a URL names."""
    sets = find_sets(url)
    if len(sets) > 1:
        names = ", ".join(one.url for one in sets)
        raise InputError(f"there are {len(sets)} shard sets here: {names}", where=url, hint="name one of them")
    return sets[0]


def plan_of(one: ShardSet, *, sampling: str = "exact", seed: int = 0, epoch_samples: int | None = None) -> Plan:
    """Plan the sampling of a set that has a manifest."""
    assert one.manifest is not None
    if epoch_samples is not None and epoch_samples < 1:
        raise SpecError([Fault("epoch_samples", f"{epoch_samples} is less than 1")])
    shards = [one.known[entry.name] for entry in one.shards]
    return Plan(
        data=data_digest([(shard.name, shard.samples, shard.sha256 or shard.index_sha256) for shard in shards]),
        sizes=np.array([shard.samples for shard in shards], dtype=np.int64),
        mode=sampling,
        seed=seed,
        lanes=one.manifest.lanes,
        window=one.manifest.window,
        epoch_samples=epoch_samples or 0,
    )


def _odd_numbers(needed: Mapping[str, object], optional: Mapping[str, object], seat: object) -> list[Fault]:
    """Find what should be whole numbers and is not: text from the environment, or a ratio that was not rounded."""
    given = {**needed, **{name: value for name, value in optional.items() if value is not None}}
    faults = [Fault(name, f"{value!r} is not a whole number") for name, value in given.items() if not _is_whole(value)]
    if seat is not None and not (isinstance(seat, tuple) and len(seat) in (2, 3) and all(map(_is_whole, seat))):
        faults.append(Fault("seat", f"{seat!r} is not (rank, world) in whole numbers"))
    return faults


def _is_whole(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def _setting_faults(
    transform: object, size: int, layout: str, prefetch: int, threads: int | None, max_bad: float, decoder: str
) -> list[Fault]:
    checks = {
        "transform": (
            transform is None or callable(transform) or transform in TRANSFORMS,
            f"{transform!r} is none of {', '.join(TRANSFORMS)}; give one of them, a function, or None",
        ),
        "size": (1 <= size <= MAX_SIZE, f"{size} is not from 1 to {MAX_SIZE}"),
        "layout": (layout in LAYOUTS, f"{layout!r} is none of {', '.join(LAYOUTS)}"),
        "decoder": (
            decoder in DECODERS and not (decoder == "native" and not isinstance(transform, str)),
            f"{decoder!r} is none of {', '.join(DECODERS)}"
            if decoder not in DECODERS
            else "the native decoder serves only the transforms that are named, not a function and not None",
        ),
        "prefetch": (prefetch >= 1, f"{prefetch} is less than 1"),
        "threads": (threads is None or threads >= 1, f"{threads} is less than 1"),
        "max_bad": (isinstance(max_bad, int | float) and 0 <= max_bad <= 1, f"{max_bad} is no share from 0 to 1"),
    }
    return [Fault(path, what) for path, (fine, what) in checks.items() if not fine]


def _budget(size: int | str | None) -> tuple[int | None, list[Fault]]:
    """Read how large the cache may grow: as given, or else as the environment tells, or else without a limit."""
    name = "cache_size" if size is not None else "STOKER_CACHE_SIZE"
    size = size if size is not None else os.environ.get(name) or None
    try:
        return None if size is None else parse_bytes(size), []
    except InputError as error:
        return None, [Fault(name, error.what)]


def _rows(
    transform: str | UserTransform | None,
    size: int,
    layout: str,
    antialias: bool,
    seed: int,
    allocate: Allocate | None,
    decoder: str,
) -> Rows:
    if transform is None:
        return EncodedRows()
    if not isinstance(transform, str):
        return UserRows(transform, seed=seed)
    return PixelRows(
        TRANSFORMS[transform](size),
        size=size,
        planes=layout == "NCHW",
        antialias=antialias,
        seed=seed,
        buffers=Buffers(allocate),
        native=chosen(decoder) == "native",
    )


def _counted(bad: list[Bad]) -> str:
    first = bad[0]
    noun = "sample" if len(bad) == 1 else "samples"
    return f"{len(bad):,} bad {noun} (the first: {first.shard} at byte {first.offset:,}: {first.reason})"
