"""Benchmark sequential reading of shards in one thread, without decoding, against webdataset and tarfile."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from measure import (
    STOKER,
    BenchContext,
    BenchResult,
    Comparison,
    Implementation,
    Timing,
    run_rounds,
    time_call,
    time_command,
)
from stoker.shards.formats import FORMATS
from stoker.shards.shard_set import MappedFile, find_shard_sets, read_images

VIEWS = "stoker, views, tar scan"
INDEXED = "stoker, views, index"
COPIES = "stoker, copies, tar scan"
WEBDATASET = "webdataset.WebDataset"
TARFILE = "Python tarfile"


def run(context: BenchContext) -> BenchResult:
    out = context.work / "shards"
    shutil.rmtree(out, ignore_errors=True)
    time_command(STOKER, "data", "convert", "--shard-size", "64MiB", context.images, out)
    shards = sorted((out / "train").glob("*.tar"))

    def with_count_check(read: Callable[[list[Path]], int]) -> Callable[[], None]:
        def work() -> None:
            if (samples := read(shards)) != context.samples:
                raise RuntimeError(f"{read.__name__} read {samples} samples, expected {context.samples}")

        return work

    implementations = [
        Implementation(name=VIEWS, run=lambda: time_ten_passes(with_count_check(scan_views)), ours=True),
        Implementation(name=INDEXED, run=lambda: time_ten_passes(with_count_check(read_indexed)), ours=True),
        Implementation(
            name=COPIES, run=lambda: time_ten_passes(with_count_check(scan_copies)), ours=True, informational=True
        ),
        Implementation(name=WEBDATASET, run=lambda: time_call(with_count_check(read_webdataset))),
        Implementation(name=TARFILE, run=lambda: time_call(with_count_check(read_tarfile))),
    ]
    speeds, _ = run_rounds(implementations, context.rounds, context.samples)
    shutil.rmtree(out)
    return BenchResult(
        name="read",
        title="Read tar shards sequentially, one thread, without decoding",
        unit="samples/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[
            Comparison(ours=INDEXED, peer=WEBDATASET, target=10.0),
            Comparison(ours=VIEWS, peer=WEBDATASET, target=10.0),
            Comparison(ours=COPIES, peer=WEBDATASET, note="both copy every image"),
            Comparison(ours=VIEWS, peer=TARFILE),
            Comparison(ours=COPIES, peer=TARFILE, note="both copy every image"),
        ],
        notes=[
            f"All in one process, on the {len(shards)} shards written by `stoker data convert`, including opening "
            "them.",
            "Views, tar scan: key, label and a memoryview of the mapped file, as passed to a decoder; image bytes "
            "are not read. Views, index: the same without the key and without parsing headers. Copies: tar scan, "
            "plus `bytes` of every image, as in the peers.",
            "webdataset: `WebDataset(urls, shardshuffle=False)`, no decoding. tarfile: every member read.",
        ],
    )


def time_ten_passes(work: Callable[[], None]) -> Timing:
    """Return the mean of ten passes, because a single pass of a tenth of a second is too noisy."""
    return Timing(time_call(lambda: [work() for _ in range(10)]).seconds / 10)


def scan_views(shards: list[Path]) -> int:
    iter_samples = FORMATS.get("tar").iter_samples
    return sum(1 for shard in shards for _ in iter_samples(MappedFile(shard).view, shard.name))


def read_indexed(shards: list[Path]) -> int:
    (shard_set,) = find_shard_sets(str(shards[0].parent))
    return sum(1 for shard in shards for _ in read_images(shard_set, shard.name))


def scan_copies(shards: list[Path]) -> int:
    iter_samples = FORMATS.get("tar").iter_samples
    count = 0
    for shard in shards:
        for entry in iter_samples(MappedFile(shard).view, shard.name):
            bytes(entry.sample.image)
            count += 1
    return count


def read_webdataset(shards: list[Path]) -> int:
    import webdataset

    return sum(1 for _ in webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False))


def read_tarfile(shards: list[Path]) -> int:
    count = 0
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                if (file := archive.extractfile(member)) is not None:
                    file.read()
                    count += member.name.endswith(".cls")
    return count
