"""Benchmark the loader on a shard set, interleaved with the decoder alone, which sets its upper limit."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stoker.load.buffers import BufferPool
from stoker.load.collate import PixelCollator
from stoker.load.loader import ROWS_PER_TASK, Batch, Loader, StageTimes
from stoker.load.native import select_decoder
from stoker.load.transforms import TRANSFORMS
from stoker.shards.sample import Buffer
from stoker.shards.shard_set import ShardSet

ROUNDS = 3
IN_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class LoaderBenchmark:
    """Medians over all rounds; `stages` are fractions of the time of the loader's threads."""

    images_per_s: float
    bytes_per_s: float
    limit_images_per_s: float
    """Throughput of the decoder alone."""
    decoder: str
    native_share: float
    """Fraction of the images decoded by the native decoder; the general decoder handles unsupported ones."""
    threads: int
    cpu: float
    """CPU cores used by the loader."""
    stages: dict[str, float]
    bad: int

    @property
    def share_of_limit(self) -> float:
        """The throughput of the loader as a fraction of that of the decoder alone."""
        return self.images_per_s / self.limit_images_per_s

    @property
    def summary(self) -> str:
        """One sentence on what limits the loader."""
        stage, share = max(self.stages.items(), key=lambda item: item[1])
        return (
            f"{self.share_of_limit:.0%} of the throughput of the decoder alone; {share:.0%} of thread time is {stage}"
        )


def run_benchmark(
    shard_set: ShardSet,
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
) -> LoaderBenchmark:
    """Run the loader and the decoder alone in alternating rounds, for about `seconds` in total."""
    decoder = select_decoder(decoder)

    def open_loader(transform: str | None) -> Loader:
        return Loader(
            shard_set,
            global_batch=global_batch,
            transform=transform,
            size=size,
            antialias=antialias,
            decoder="auto" if transform is None else decoder,
            threads=threads,
            cache=cache,
            rank=(0, 1),
            max_bad=1.0,
        )

    with open_loader(None) as loader:
        images = _read_encoded(loader)
    limits, rounds, round_s = [], [], seconds / (2 * ROUNDS)
    with open_loader(transform) as loader:
        _run_round(loader, 0.0, progress)  # warm up: open the shards
        loader.times = StageTimes()
        for _ in range(ROUNDS):
            limits.append(_decode_throughput(images, transform, size, antialias, decoder, loader.threads, round_s))
            rounds.append(_run_round(loader, round_s, progress))
        times, bad = loader.times, len({(sample.shard, sample.offset) for sample in loader.bad})
    speed = statistics.median(one_round.speed for one_round in rounds)
    stage_s = {name: getattr(times, name) for name in ("fetch", "read", "decode", "transform")}
    # Batches prefetched before the clock started may have taken longer than those measured.
    thread_s = max(times.images / speed * loader.threads, sum(stage_s.values()))
    stages = {name: spent / thread_s for name, spent in stage_s.items()}
    return LoaderBenchmark(
        images_per_s=speed,
        bytes_per_s=speed * sum(map(len, images)) / len(images),
        limit_images_per_s=statistics.median(limits),
        decoder=decoder,
        native_share=times.native_images / times.images,
        threads=loader.threads,
        cpu=statistics.median(one_round.cpu for one_round in rounds),
        stages=stages | {"idle": max(0.0, 1 - sum(stages.values()))},
        bad=bad,
    )


class _Round(NamedTuple):
    """Images per second and CPU cores used in one round."""

    speed: float
    cpu: float


def _run_round(loader: Loader, seconds: float, progress: Callable[[int], None]) -> _Round:
    """Iterate over epochs for `seconds`, from the first batch on; stop the loader's threads afterwards."""
    batches = _repeat(loader)
    next(batches)
    images, cpu, started = 0, time.process_time(), time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not images:
        count = next(batches).count
        images += count
        progress(count)
    cpu = (time.process_time() - cpu) / elapsed
    batches.close()
    return _Round(images / elapsed, cpu)


def _read_encoded(loader: Loader) -> list[bytes]:
    """Return encoded images of the first batches, in memory."""
    images: list[bytes] = []
    size = 0
    for batch in loader:
        for image in batch.images:
            images.append(bytes(image))
            size += len(image)
        if size >= IN_MEMORY_BYTES:
            break
    return images


def _repeat(loader: Loader) -> Generator[Batch]:
    while True:
        yield from loader


def _decode_throughput(
    encoded: list[bytes], transform: str, size: int, antialias: bool, decoder: str, threads: int, seconds: float
) -> float:
    """Decode images from memory in plain threads; return images per second."""
    collator = PixelCollator(
        TRANSFORMS[transform](size),
        size=size,
        channels_first=False,
        antialias=antialias,
        seed=0,
        buffers=BufferPool(),
        native=decoder == "native",
    )
    done = [0] * threads
    start = threading.Barrier(threads + 1)
    end = float("inf")

    def work(number: int) -> None:
        rows = collator.allocate(ROWS_PER_TASK)
        first = number * ROWS_PER_TASK
        start.wait()
        while time.perf_counter() < end or not done[number]:
            images: list[Buffer] = [encoded[(first + row) % len(encoded)] for row in range(ROWS_PER_TASK)]
            collator.fill(rows, 0, images, 0, np.arange(first, first + ROWS_PER_TASK, dtype=np.int64))
            first += threads * ROWS_PER_TASK
            done[number] += ROWS_PER_TASK

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    started = time.perf_counter()
    end = started + seconds
    start.wait()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - started)
