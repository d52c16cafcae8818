"""Shards read in order by one thread, no image decoded: our walk beside webdataset and tarfile."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from measure import STOKER, Contestant, Lab, Ran, Result, Versus, command, in_process, take_turns
from stoker.shards.formats import FORMATS
from stoker.shards.shard_set import MappedFile, find_sets, read_images

VIEWS = "stoker, views by walking the tar"
INDEXED = "stoker, views by the index"
COPIES = "stoker, images copied to bytes"
WEBDATASET = "webdataset.WebDataset"
TARFILE = "Python tarfile"


def run(lab: Lab) -> Result:
    out = lab.work / "shards"
    shutil.rmtree(out, ignore_errors=True)
    command(STOKER, "data", "convert", "--shard-size", "64MiB", lab.images, out)
    shards = sorted((out / "train").glob("*.tar"))

    def counted(read: Callable[[list[Path]], int]) -> Callable[[], None]:
        def work() -> None:
            if (samples := read(shards)) != lab.samples:
                raise RuntimeError(f"{read.__name__} read {samples} samples of {lab.samples}")

        return work

    contestants = [
        Contestant(name=VIEWS, act=lambda: several(counted(views)), ours=True),
        Contestant(name=INDEXED, act=lambda: several(counted(indexed)), ours=True),
        Contestant(name=COPIES, act=lambda: several(counted(copies)), ours=True, info=True),
        Contestant(name=WEBDATASET, act=lambda: in_process(counted(webdataset_samples))),
        Contestant(name=TARFILE, act=lambda: in_process(counted(tarfile_samples))),
    ]
    speeds, _ = take_turns(contestants, lab.rounds, lab.samples)
    shutil.rmtree(out)
    return Result(
        name="read",
        title="Reading tar shards in order, one thread, nothing decoded",
        unit="samples/s",
        contestants=contestants,
        speeds=speeds,
        versus=[
            Versus(ours=INDEXED, peer=WEBDATASET, target=10.0),
            Versus(ours=VIEWS, peer=WEBDATASET, target=10.0),
            Versus(ours=COPIES, peer=WEBDATASET, note="both copy every image"),
            Versus(ours=VIEWS, peer=TARFILE),
            Versus(ours=COPIES, peer=TARFILE, note="both copy every image"),
        ],
        notes=[
            f"All in one process, on the {len(shards)} shards that `stoker data convert` made; opening them counts.",
            "By walking: key, label and a memoryview of the mapped file; the image's bytes are not touched, which is "
            "what a decoder is handed. By the index: the same without the key, and "
            "no header is parsed. Copies: walked, the same and `bytes` of every image, as the peers do.",
            "webdataset: `WebDataset(urls, shardshuffle=False)`, no decoding. tarfile: every member read.",
        ],
    )


def several(work: Callable[[], None]) -> Ran:
    """Time ten passes for one: a single one takes a tenth of a second, in which any hiccup shows."""
    return Ran(in_process(lambda: [work() for _ in range(10)]).seconds / 10)


def views(shards: list[Path]) -> int:
    walk = FORMATS.get("tar").walk
    return sum(1 for shard in shards for _ in walk(MappedFile(shard).view, shard.name))


def indexed(shards: list[Path]) -> int:
    (one,) = find_sets(str(shards[0].parent))
    return sum(1 for shard in shards for _ in read_images(one, shard.name))


def copies(shards: list[Path]) -> int:
    walk = FORMATS.get("tar").walk
    count = 0
    for shard in shards:
        for found in walk(MappedFile(shard).view, shard.name):
            bytes(found.sample.image)
            count += 1
    return count


def webdataset_samples(shards: list[Path]) -> int:
    import webdataset

    return sum(1 for _ in webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False))


def tarfile_samples(shards: list[Path]) -> int:
    count = 0
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                if (file := archive.extractfile(member)) is not None:
                    file.read()
                    count += member.name.endswith(".cls")
    return count
