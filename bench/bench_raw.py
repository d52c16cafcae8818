"""Benchmark shuffled batches of encoded images from the Loader against a plain scan of the memory-mapped shards."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench_read import scan_views, time_ten_passes
from measure import STOKER, BenchContext, BenchResult, Comparison, Implementation, run_rounds, time_command

LOADER = "stoker.Loader, transform=None"
SCAN = "plain scan of memory-mapped tars"

BATCH = 64


def run(context: BenchContext) -> BenchResult:
    samples = context.samples // BATCH * BATCH
    out = context.work / "shards"
    shutil.rmtree(out, ignore_errors=True)
    time_command(STOKER, "data", "convert", "--shard-size", "64MiB", "--limit", str(samples), context.images, out)
    shards = sorted((out / "train").glob("*.tar"))

    def load() -> None:
        check(load_all(out / "train"))

    def scan() -> None:
        check(scan_views(shards))

    def check(count: int) -> None:
        if count != samples:
            raise RuntimeError(f"read {count} samples, expected {samples}")

    implementations = [
        Implementation(name=LOADER, run=lambda: time_ten_passes(load), ours=True),
        Implementation(name=SCAN, run=lambda: time_ten_passes(scan)),
    ]
    speeds, _ = run_rounds(implementations, context.rounds, samples)
    shutil.rmtree(out)
    return BenchResult(
        name="raw",
        title="Batches of encoded images from local tar shards, without decoding",
        unit="samples/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[Comparison(ours=LOADER, peer=SCAN, target=0.4)],
        notes=[
            f"{samples:,} samples in {len(shards)} shards, one process; every pass includes opening the shards.",
            f"stoker: shuffled batches of {BATCH}, each a list of memoryviews, and their labels. Plain scan: one "
            "thread, in file order, every header parsed, a memoryview of every image.",
        ],
    )


def load_all(folder: Path) -> int:
    from stoker import Loader

    loader = Loader(str(folder), global_batch=BATCH, transform=None)
    try:
        return sum(len(batch.images) for batch in loader)
    finally:
        loader.close()
