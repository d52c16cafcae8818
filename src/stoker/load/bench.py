"""How fast a set loads here, beside the limit that the decoder itself sets, measured in the same breath."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stoker.load.buffers import Buffers
from stoker.load.collate import PixelRows
from stoker.load.loader import SLICE, Batch, Loader, Times
from stoker.load.native import chosen
from stoker.load.transforms import TRANSFORMS
from stoker.shards.sample import Buffer
from stoker.shards.shard_set import ShardSet

ROUNDS = 3
IN_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over the rounds; stages are shares of the time that the loader's threads had."""

    images_per_s: float
    bytes_per_s: float
    limit_images_per_s: float
    share_of_limit: float
    decoder: str
    natively: float
    """Share of the images that the native decoder made; it leaves the odd ones to the general decoder."""
    threads: int
    cpu: float
    """Cores at work while the loader ran."""
    stages: dict[str, float]
    bad: int

    @property
    def verdict(self) -> str:
        """Say in a sentence what holds the loader back."""
        stage, share = max(self.stages.items(), key=lambda item: item[1])
        return f"{self.share_of_limit:.0%} of what the decoder alone gives; {share:.0%} of the threads' time is {stage}"


def measure(
    one: ShardSet,
    *,
    global_batch: int,
    transform: str,
    size: int,
    antialias: bool,
    decoder: str,
    threads: int | None,
    cache: str | None,
    seconds: float,
    progress: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Let the loader and the bare decoder take turns, for about so many seconds in all."""
    decoder = chosen(decoder)

    def opened(transform: str | None) -> Loader:
        return Loader(
            one,
            global_batch=global_batch,
            transform=transform,
            size=size,
            antialias=antialias,
            decoder="auto" if transform is None else decoder,
            threads=threads,
            cache=cache,
            seat=(0, 1),
            max_bad=1.0,
        )

    with opened(None) as loader:
        kept = _in_memory(loader)
    limits, turns = [], []
    with opened(transform) as loader:
        _turn(loader, 0.0, progress)  # opens what has to be opened
        loader.times = Times()
        for _ in range(ROUNDS):
            limits.append(_limit(kept, transform, size, antialias, decoder, loader.threads, seconds / (2 * ROUNDS)))
            turns.append(_turn(loader, seconds / (2 * ROUNDS), progress))
        times, bad = loader.times, len({(one.shard, one.offset) for one in loader.bad})
    speed = statistics.median(turn.speed for turn in turns)
    seconds_by = {name: getattr(times, name) for name in ("fetch", "read", "decode", "transform")}
    # What was made before the clock started may have taken longer than what was made then.
    had = max(times.images / speed * loader.threads, sum(seconds_by.values()))
    stages = {name: took / had for name, took in seconds_by.items()}
    return Measured(
        images_per_s=speed,
        bytes_per_s=speed * sum(map(len, kept)) / len(kept),
        limit_images_per_s=statistics.median(limits),
        share_of_limit=statistics.median(turn.speed / limit for turn, limit in zip(turns, limits, strict=True)),
        decoder=decoder,
        natively=times.natively / times.images,
        threads=loader.threads,
        cpu=statistics.median(turn.cpu for turn in turns),
        stages=stages | {"idle": max(0.0, 1 - sum(stages.values()))},
        bad=bad,
    )


class _Turn(NamedTuple):
    """Images per second, and cores at work."""

    speed: float
    cpu: float


def _turn(loader: Loader, seconds: float, progress: Callable[[int], None]) -> _Turn:
    """Iterate for a while, epoch after epoch; the clock starts with the first batch, and nothing is left running."""
    batches = _endless(loader)
    next(batches)
    images, cpu, started = 0, time.process_time(), time.perf_counter()
    while (took := time.perf_counter() - started) < seconds or not images:
        count = next(batches).count
        images += count
        progress(count)
    cpu = (time.process_time() - cpu) / took
    batches.close()
    return _Turn(images / took, cpu)


def _in_memory(loader: Loader) -> list[bytes]:
    """Copy encoded images of the first batches into memory."""
    kept: list[bytes] = []
    size = 0
    for batch in loader:
        for image in batch.images:
            kept.append(bytes(image))
            size += len(image)
        if size >= IN_MEMORY_BYTES:
            break
    return kept


def _endless(loader: Loader) -> Generator[Batch]:
    while True:
        yield from loader


def _limit(
    kept: list[bytes], transform: str, size: int, antialias: bool, decoder: str, threads: int, seconds: float
) -> float:
    """Decode what lies in memory in bare threads, and count images per second."""
    rows = PixelRows(
        TRANSFORMS[transform](size),
        size=size,
        planes=False,
        antialias=antialias,
        seed=0,
        buffers=Buffers(),
        native=decoder == "native",
    )
    done = [0] * threads
    start = threading.Barrier(threads + 1)
    end = float("inf")

    def work(number: int) -> None:
        room = rows.room(SLICE)
        first = number * SLICE
        start.wait()
        while time.perf_counter() < end:
            images: list[Buffer] = [kept[(first + row) % len(kept)] for row in range(SLICE)]
            rows.fill(room, 0, images, 0, np.arange(first, first + SLICE, dtype=np.int64))
            first += threads * SLICE
            done[number] += SLICE

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    began = time.perf_counter()
    end = began + seconds
    start.wait()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - began)
