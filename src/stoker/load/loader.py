"""The loader: iterate over a shard set in batches, decoded by threads, in the order of the sampling plan."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from stoker.core.threads import ThreadPool
from stoker.core.units import pluralize
from stoker.errors import InputError, SpecError, VerificationError
from stoker.load.buffers import Allocator, BufferPool
from stoker.load.collate import Collator, EncodedCollator, FillResult, PixelCollator, UserCollator, UserTransform
from stoker.load.native import select_decoder
from stoker.load.options import integer_faults, option_faults, parse_cache_size
from stoker.load.planning import find_shard_set, plan_sampling
from stoker.load.reader import Reader
from stoker.load.transforms import TRANSFORMS
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import Int64Array, SampleLocation
from stoker.sampling.plan import Epoch, Step
from stoker.sampling.rank import Rank
from stoker.shards.scan import ensure_manifest
from stoker.shards.shard_set import ShardSet
from stoker.storage import redacted
from stoker.storage.cache import CacheStats, DiskCache

ROWS_PER_TASK = 32
"""Rows that one task of the thread pool decodes: a task per image would cost more than it balances."""
STEPS_PER_LOOKUP = 16
"""Steps whose samples are located with one call, which costs little more than locating those of one step."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's share of a global batch, without its bad samples.

    `images` is an array of uint8 pixels, the stacked outputs of a user transform, or, without a transform, a list of
    encoded images; `count` is their number. `cursor` marks the end of this batch: resume from it after using the batch.
    `positions` are the positions of the rows in the epoch; `plan.epoch(number, rank).locate(positions)` returns their
    shards.
    """

    images: Any
    labels: Int64Array
    count: int
    cursor: Cursor
    positions: Int64Array

    def __repr__(self) -> str:
        return describe_batch("Batch", self.images, self.cursor)


def describe_batch(name: str, images: Any, cursor: Cursor) -> str:
    """Return a line about a batch; the arrays themselves would fill pages."""
    shape, kind = (len(images),), "encoded images"
    if not isinstance(images, list):
        shape, kind = images.shape, images.dtype
    return f"{name}({'×'.join(map(str, shape))} {kind}, epoch {cursor.epoch}, consumed {cursor.consumed})"


ITERATION_STOPPED = "iteration was stopped: another iteration started, a cursor was loaded or the loader was closed"
JOIN_RESUMES_AT_EPOCH_START = (
    "sampling `join` resumes at the start of an epoch: samples of this epoch will be read again"
)


class BadSample(NamedTuple):
    """A skipped sample: the URL of its shard and its byte offset there, its epoch and position, and the reason."""

    shard: str
    offset: int
    epoch: int
    position: int
    reason: str
    length: int = 0
    """Bytes of the image."""
    sha256: str = ""
    """The digest of the shard, if its manifest has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds spent per stage, summed over all threads; `wait` is the time that the consumer waited for batches."""

    fetch: float = 0.0
    read: float = 0.0
    decode: float = 0.0
    transform: float = 0.0
    wait: float = 0.0
    images: int = 0
    native_images: int = 0
    """Number of images decoded by the native decoder."""

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            fetch=self.fetch + other.fetch,
            read=self.read + other.read,
            decode=self.decode + other.decode,
            transform=self.transform + other.transform,
            wait=self.wait + other.wait,
            images=self.images + other.images,
            native_images=self.native_images + other.native_images,
        )


class Loader:
    """Iterable over a shard set: each `for` loop yields the rest of the current epoch.

    The order depends only on the dataset, the seed and the epoch. `state_dict()` returns a cursor that marks the
    batches consumed so far; it can be loaded with another world size, batch size or number of threads. `transform` is
    the name of a built-in transform ("imagenet-train", "imagenet-val", "small-train", "digits-train", "whole"), a
    function, or None for encoded images. A function gets upright RGB pixels (H×W×3, uint8) and a random generator; its
    results are stacked along a new first axis and not changed otherwise: `layout` is for built-in transforms.
    `decoder` "auto" selects "native" if stoker-native is installed and the CPU has AVX2, and "python" otherwise.
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
        rank: Rank | tuple[int, int] | None = None,
        cache: str | Path | None = None,
        cache_size: int | str | None = None,
        prefetch: int = 4,
        threads: int | None = None,
        max_bad: float = 0.001,
        allocate: Allocator | None = None,
        decoder: str = "auto",
    ) -> None:
        if faults := integer_faults(
            {"global_batch": global_batch, "size": size, "seed": seed, "prefetch": prefetch},
            {"epoch_samples": epoch_samples, "threads": threads},
            rank,
        ):
            raise SpecError(faults)
        cache_limit, faults = parse_cache_size(cache_size)
        faults += option_faults(transform, size, layout, prefetch, threads, max_bad, decoder)
        self.rank = Rank.from_environ(os.environ) if rank is None else Rank(*rank)
        cores = len(os.sched_getaffinity(0))
        self.shard_set = ensure_manifest(url if isinstance(url, ShardSet) else find_shard_set(str(url)), jobs=cores)
        try:
            self.plan = plan_sampling(self.shard_set, sampling=sampling, seed=seed, epoch_samples=epoch_samples)
            faults += self.plan.world_faults(self.rank, global_batch)
        except SpecError as error:
            faults += error.faults
        if faults:
            raise SpecError(faults, where=self.shard_set.url)
        self.global_batch = global_batch
        self.threads = threads or max(1, cores // self.rank.local_world_size)
        self.times = StageTimes()
        self.bad: list[BadSample] = []
        """Samples skipped so far, in all epochs."""
        self._prefetch, self._max_bad = prefetch, max_bad
        self._collator = _make_collator(transform, size, layout, antialias, seed, allocate, decoder)
        cache_dir = os.environ.get("STOKER_CACHE_DIR", "") if cache is None else cache
        disk_cache = DiskCache(Path(cache_dir).expanduser(), cache_limit) if cache_dir else None
        self._reader = Reader(self.shard_set, cache=disk_cache)
        self._cursor = self.plan.start_cursor()
        self._running: Generator[Batch] | None = None
        self._positions_lock = threading.Lock()
        self._positions_pool: ThreadPool | None = None
        self._positions_epoch: Epoch | None = None

    @property
    def cursor(self) -> Cursor:
        """The cursor after the last batch that the consumer took."""
        return self._cursor

    @property
    def cache_stats(self) -> CacheStats | None:
        """The counters of the disk cache in this process; None without one."""
        return self._reader.cache_stats

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor as plain values, for a checkpoint."""
        if self.plan.mode == "join" and self._running is not None:
            log.warning("%s: %s", self.shard_set.url, JOIN_RESUMES_AT_EPOCH_START)
        return self._cursor.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor, saved with any world size; stop the iteration that is running, if any."""
        self._stop()
        self._cursor = self.plan.check_cursor(Cursor.from_state(state))

    def __len__(self) -> int:
        """Return the number of batches from the cursor to the end of its epoch."""
        return self._epoch().count_steps(self._cursor.consumed, self.global_batch)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the current epoch; stop the iteration that is running, if any."""
        self._stop()
        self._running = batches = self.worker_batches(0, 1)
        try:
            for batch in batches:
                self._cursor = batch.cursor
                yield batch
            if self._running is not batches:  # stopping silently would look like the end of the epoch
                raise InputError(ITERATION_STOPPED, where=self.shard_set.url)
        finally:
            batches.close()

    def worker_batches(self, worker: int, num_workers: int) -> Generator[Batch]:
        """Yield every `num_workers`-th batch of the rest of the epoch, starting with number `worker`.

        For a worker process: the cursor of the loader does not move; every batch carries its own.
        """
        epoch = self._epoch()
        steps = itertools.islice(epoch.steps(self._cursor.consumed, self.global_batch), worker, None, num_workers)
        return self._batches(epoch, steps, num_workers)

    def load_positions(self, number: int, positions: Int64Array) -> Batch:
        """Return the samples at these positions of an epoch; safe to call from several threads.

        For programs that distribute positions themselves. The cursor of the loader does not move.
        """
        with self._positions_lock:
            if self._positions_pool is None:
                self._positions_pool = ThreadPool(self.threads, "stoker-decode")
            if self._positions_epoch is None or self._positions_epoch.number != number:
                self._positions_epoch = self.plan.epoch(number, self.rank)
            epoch, pool = self._positions_epoch, self._positions_pool
            location = epoch.locate(positions)
            oldest = int(positions.min()) if len(positions) else 0
            self._reader.keep_only([*epoch.upcoming_shards(oldest).tolist(), *np.unique(location.shards).tolist()])
        step = Step(oldest, positions, self._cursor)
        batch, bad, times = _PendingBatch(
            epoch, step, location, self._collator, self._reader, pool, self.threads
        ).finish()
        with self._positions_lock:
            self.times += times
            self.bad += bad
        if bad:  # a position that is loaded again counts once
            self._check_bad(list({sample.position: sample for sample in self.bad if sample.epoch == number}.values()))
        return batch

    def close(self) -> None:
        """Stop all threads and close all shards. A loader can be used again after that and reopens them."""
        self._stop()
        with self._positions_lock:
            pool, self._positions_pool = self._positions_pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()

    def __repr__(self) -> str:
        return (
            f"<stoker.Loader {redacted(self.shard_set.url)!r}: {pluralize(self.plan.samples, 'sample')}, "
            f"global batch {self.global_batch:,}, {self.plan.mode}, rank {self.rank.number} of {self.rank.world_size}, "
            f"epoch {self._cursor.epoch}, consumed {self._cursor.consumed}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _epoch(self) -> Epoch:
        return self.plan.epoch(self._cursor.epoch, self.rank)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _batches(self, epoch: Epoch, steps: Iterator[Step], num_workers: int) -> Generator[Batch]:
        """Yield batches in order, keeping `prefetch` of them in progress."""
        bad_in_epoch: list[BadSample] = []
        threads = max(1, self.threads // num_workers)
        pool = ThreadPool(threads, "stoker-decode")
        pending: deque[_PendingBatch] = deque()
        self._reader.start_iteration()
        located_steps = self._locate(epoch, steps, pending)
        try:
            while True:
                for step, location in itertools.islice(located_steps, self._prefetch - len(pending)):
                    pending.append(_PendingBatch(epoch, step, location, self._collator, self._reader, pool, threads))
                if not pending:
                    break
                batch, bad, times = pending.popleft().finish()
                self.times += times
                self.bad += bad
                bad_in_epoch += bad
                self._check_bad(bad_in_epoch)
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            if bad_in_epoch:
                log.warning("%s: epoch %d skipped %s", self.shard_set.url, epoch.number, _summarize(bad_in_epoch))

    def _check_bad(self, bad_in_epoch: list[BadSample]) -> None:
        """Raise VerificationError if too many samples of an epoch are bad."""
        if len(bad_in_epoch) > self._max_bad * self.plan.samples:
            raise VerificationError(
                f"{_summarize(bad_in_epoch)}: more than max_bad={self._max_bad:g} allows",
                where=self.shard_set.url,
                hint="list them all with `stoker data verify --deep` and fix the dataset, or raise max_bad",
            )

    def _locate(
        self, epoch: Epoch, steps: Iterator[Step], pending: deque[_PendingBatch]
    ) -> Iterator[tuple[Step, SampleLocation]]:
        """Yield each step with the location of its samples, and set which shards the reader keeps open."""
        while chunk := list(itertools.islice(steps, STEPS_PER_LOOKUP)):
            location = epoch.locate(np.concatenate([step.positions for step in chunk]))
            oldest = pending[0].step.start if pending else chunk[0].start
            self._reader.keep_only([*epoch.upcoming_shards(oldest).tolist(), *np.unique(location.shards).tolist()])
            ends = itertools.accumulate(len(step.positions) for step in chunk)
            for step, end in zip(chunk, ends, strict=True):
                part = slice(end - len(step.positions), end)
                yield step, SampleLocation(location.shards[part], location.samples[part])


class _PendingBatch:
    """A batch in progress: its rows are read and decoded in slices, each a task of the thread pool."""

    def __init__(
        self,
        epoch: Epoch,
        step: Step,
        location: SampleLocation,
        collator: Collator,
        reader: Reader,
        pool: ThreadPool,
        threads: int,
    ) -> None:
        self.step = step
        self._epoch, self._location, self._collator, self._reader = epoch, location, collator, reader
        count = len(step.positions)
        self._random_ids = epoch.random_ids(step.positions, location)
        self._rows = collator.allocate(count)
        self._labels = np.empty(count, dtype=np.int64)
        length = max(1, count if isinstance(collator, EncodedCollator) else min(ROWS_PER_TASK, -(-count // threads)))
        self._tasks: list[Future[tuple[FillResult, StageTimes]]] = [
            pool.submit(self._fill, slice(first, min(first + length, count))) for first in range(0, count, length)
        ]

    def finish(self) -> tuple[Batch, list[BadSample], StageTimes]:
        """Wait for the rows; return the batch without the bad samples, the bad samples and the times."""
        started = time.perf_counter()
        results = [task.result() for task in self._tasks]
        times = sum((times for _, times in results), StageTimes(wait=time.perf_counter() - started))
        bad = [row_and_reason for result, _ in results for row_and_reason in result.bad]
        end, positions = self.step.end, self.step.positions
        if not bad:
            batch = Batch(self._collator.collect(self._rows, None), self._labels, len(self._labels), end, positions)
            return batch, [], times
        bad_rows = {row for row, _ in bad}
        good = [row for row in range(len(self._labels)) if row not in bad_rows]
        images, labels = self._collator.collect(self._rows, good), self._labels[good]
        batch = Batch(images, labels, len(good), end, positions[np.array(good, dtype=np.int64)])
        return batch, [self._bad_sample(row, reason) for row, reason in bad], times

    def _fill(self, part: slice) -> tuple[FillResult, StageTimes]:
        started = time.perf_counter()
        samples = self._reader.read(SampleLocation(self._location.shards[part], self._location.samples[part]))
        read_s = time.perf_counter() - started - samples.fetch_s
        self._labels[part] = samples.labels
        result = self._collator.fill(self._rows, part.start, samples.images, self._epoch.number, self._random_ids[part])
        return result, StageTimes(
            fetch=samples.fetch_s,
            read=read_s,
            decode=result.decode_s,
            transform=result.transform_s,
            images=len(samples.images),
            native_images=result.native_count,
        )

    def _bad_sample(self, row: int, reason: str) -> BadSample:
        at = self._reader.locate(int(self._location.shards[row]), int(self._location.samples[row]))
        position = int(self.step.positions[row])
        return BadSample(at.shard, at.offset, self._epoch.number, position, reason, at.length, at.sha256)


def _make_collator(
    transform: str | UserTransform | None,
    size: int,
    layout: str,
    antialias: bool,
    seed: int,
    allocate: Allocator | None,
    decoder: str,
) -> Collator:
    if transform is None:
        return EncodedCollator()
    if not isinstance(transform, str):
        return UserCollator(transform, seed=seed)
    return PixelCollator(
        TRANSFORMS[transform](size),
        size=size,
        channels_first=layout == "NCHW",
        antialias=antialias,
        seed=seed,
        buffers=BufferPool(allocate),
        native=select_decoder(decoder) == "native",
    )


def _summarize(bad: list[BadSample]) -> str:
    first = bad[0]
    noun = "sample" if len(bad) == 1 else "samples"
    return f"{len(bad):,} bad {noun} (the first: {first.shard} at byte {first.offset:,}: {first.reason})"
