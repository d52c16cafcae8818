"""Encoded images from local shards: our Loader, shuffled and in batches, beside a bare walk over the mapped files."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench_read import several, views
from measure import STOKER, Contestant, Lab, Result, Versus, command, take_turns

LOADER = "stoker.Loader, transform=None"
WALK = "bare walk over the mapped tars"

BATCH = 64


def run(lab: Lab) -> Result:
    samples = lab.samples // BATCH * BATCH
    out = lab.work / "shards"
    shutil.rmtree(out, ignore_errors=True)
    command(STOKER, "data", "convert", "--shard-size", "64MiB", "--limit", str(samples), lab.images, out)
    shards = sorted((out / "train").glob("*.tar"))

    def load() -> None:
        check(loaded(out / "train"))

    def walk() -> None:
        check(views(shards))

    def check(count: int) -> None:
        if count != samples:
            raise RuntimeError(f"read {count} samples of {samples}")

    contestants = [
        Contestant(name=LOADER, act=lambda: several(load), ours=True),
        Contestant(name=WALK, act=lambda: several(walk)),
    ]
    speeds, _ = take_turns(contestants, lab.rounds, samples)
    shutil.rmtree(out)
    return Result(
        name="raw",
        title="Batches of encoded images from local tar shards, nothing decoded",
        unit="samples/s",
        contestants=contestants,
        speeds=speeds,
        versus=[Versus(ours=LOADER, peer=WALK, target=0.4)],
        notes=[
            f"{samples:,} samples in {len(shards)} shards, one process; opening them counts, every time.",
            f"stoker: shuffled batches of {BATCH}, each a list of memoryviews, and their labels. The walk: one thread, "
            "in the order of the files, every header parsed, a memoryview of every image.",
        ],
    )


def loaded(folder: Path) -> int:
    from stoker import Loader

    loader = Loader(str(folder), global_batch=BATCH, transform=None)
    try:
        return sum(len(batch.images) for batch in loader)
    finally:
        loader.close()
