"""An epoch that is killed and goes on elsewhere: real shards, real processes, and the pixels of every sample."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from stoker.errors import InputError
from stoker.load.loader import Loader
from tests.support.trees import stoker

Pixels = npt.NDArray[np.uint8]

SAMPLES = 300


def make_noise(root: Path, start: int = 0) -> Path:
    """Write images in which every pixel differs, so that another crop of one of them is seen."""
    root.mkdir(parents=True)
    for label in ("ant", "bee", "cat"):
        (root / label).mkdir()
    for number in range(start, start + SAMPLES):
        noise = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / ("ant", "bee", "cat")[number % 3] / f"{number:05d}.jpg", quality=90)
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 34 shards in two lanes."""
    root = tmp_path_factory.mktemp("resume")
    make_noise(root / "tree/train")
    assert stoker("data", "convert", root / "tree", root / "out", "--shard-samples", 9) == 0
    manifest = json.loads((root / "out/train/manifest.json").read_text())
    assert (manifest["samples"], manifest["lanes"], len(manifest["shards"])) == (SAMPLES, 2, 34)
    return root / "out/train"


# Takes batches in lockstep with the other ranks, as training does: a step begins once all have recorded the last one.
READER = """
import hashlib, json, os, random, sys, time
from stoker.load.loader import Loader

url, rank, world, batch, state, records = sys.argv[1:]
rank, world = int(rank), int(world)

def recorded(other):
    try:
        return open(f"{records}.{other}").read().count("\\n")
    except FileNotFoundError:
        return 0

with Loader(url, transform=None, global_batch=int(batch), seat=(rank, world), threads=1) as loader:
    if state:
        loader.load_state_dict(json.loads(state))
    with open(f"{records}.{rank}", "w") as out:
        for step, taken in enumerate(loader, 1):
            time.sleep(random.random() * 0.03)
            digests = [hashlib.sha256(image).hexdigest() for image in taken.images]
            out.write(json.dumps([digests, loader.state_dict()]) + "\\n")
            out.flush()
            os.fsync(out.fileno())
            while any(recorded(other) < step for other in range(world)):
                time.sleep(0.001)
"""

Record = tuple[list[str], dict[str, Any]]


@contextmanager
def readers(
    url: Path, world: int, batch: int, state: dict[str, Any] | None, records: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a reader for each rank; whichever still runs at the end is killed."""
    text = json.dumps(state) if state else ""
    ranks = []
    try:
        for rank in range(world):
            words = map(str, (url, rank, world, batch, text, records))
            ranks.append(subprocess.Popen([sys.executable, "-c", READER, *words]))
        yield ranks
    finally:
        for one in ranks:
            one.send_signal(signal.SIGKILL)
        for one in ranks:
            one.wait()


def recorded(records: Path, world: int) -> list[list[Record]]:
    """What each rank has recorded; a line that the kill cut off was not."""
    paths = [Path(f"{records}.{rank}") for rank in range(world)]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    return [[json.loads(line) for line in text.split("\n")[:-1]] for text in texts]


def test_an_epoch_killed_and_resumed_in_other_worlds_is_read_exactly_once(shards: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    state: dict[str, Any] | None = None
    # Two ranks, then three, are killed at any moment after a few steps.
    for world, batch in ((2, 5), (3, 7)):
        records = tmp_path / f"killed-{world}"
        enough = random.randint(1, 8)
        with readers(shards, world, batch, state, records) as ranks:
            while min(map(len, recorded(records, world))) < enough:
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.001)
            time.sleep(random.random() * 0.03)
        assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * world
        found = recorded(records, world)
        together = min(map(len, found))
        assert max(map(len, found)) <= together + 1
        states = [mine[together - 1][1] for mine in found]
        state = states[0]
        assert states == [state] * world
        assert (state["epoch"], 0 < state["consumed"] < SAMPLES) == (0, True)
        seen += [digest for mine in found for digests, _ in mine[:together] for digest in digests]
        assert len(seen) == state["consumed"]

    records = tmp_path / "last"
    with readers(shards, 4, 13, state, records) as ranks:
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    found = recorded(records, 4)
    assert len({len(mine) for mine in found}) == 1
    assert all(mine[-1][1] | {"plan": ""} == {"epoch": 1, "consumed": 0, "plan": ""} for mine in found)
    seen += [digest for mine in found for digests, _ in mine for digest in digests]

    images = (shards.parent.parent / "tree/train").rglob("*.jpg")
    every = Counter(hashlib.sha256(path.read_bytes()).hexdigest() for path in images)
    assert (len(every), every.total()) == (SAMPLES, SAMPLES)
    assert Counter(seen) == every


def batches(
    url: Path, *, batch: int, seat: tuple[int, int] = (0, 1), state: dict[str, Any] | None = None, **settings: Any
) -> list[tuple[Pixels, list[int], dict[str, Any]]]:
    """The pixels, the labels and the state after each batch, from a state to the end of its epoch."""
    with Loader(str(url), global_batch=batch, size=32, seat=seat, **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        expected = len(loader)
        taken = [(one.images.copy(), one.labels.tolist(), loader.state_dict()) for one in loader]
        assert len(taken) == expected
        return taken


@pytest.mark.parametrize(("world", "batch"), [(1, 17), (2, 24), (3, 25)])
def test_from_every_kill_point_every_world_sees_the_same_pixels(shards: Path, world: int, batch: int) -> None:
    alone = batches(shards, batch=24, threads=2)
    pixels = np.concatenate([images for images, _, _ in alone])
    labels = [label for _, some, _ in alone for label in some]
    assert len(pixels) == SAMPLES

    for state in [None, *(state for _, _, state in alone[:-1])]:
        consumed = 0 if state is None else state["consumed"]
        ranks = [batches(shards, batch=batch, seat=(rank, world), state=state, threads=2) for rank in range(world)]
        for step, together in enumerate(zip(*ranks, strict=True)):
            first = consumed + step * batch
            last = min(first + batch, SAMPLES)
            assert sum(len(images) for images, _, _ in together) == last - first
            for rank, (images, some, _) in enumerate(together):
                # Rows of the global batch go round the ranks.
                mine = slice(first + (rank - first) % world, last, world)
                assert images.tobytes() == pixels[mine].tobytes()
                assert some == labels[mine]


def test_a_rank_that_gets_nothing_of_the_last_batch_still_makes_the_step(shards: Path) -> None:
    ranks = [batches(shards, batch=SAMPLES - 1, seat=(rank, 3)) for rank in range(3)]
    assert [[len(images) for images, _, _ in steps] for steps in ranks] == [[100, 0], [100, 0], [99, 1]]
    assert ranks[0][1][0].shape == (0, 32, 32, 3)
    assert len({json.dumps(steps[-1][2]) for steps in ranks}) == 1


def test_threads_and_prefetch_change_no_byte(shards: Path) -> None:
    found = {}
    for threads in (1, 2, 5):
        for prefetch in (1, 8):
            taken = batches(shards, batch=50, seed=3, threads=threads, prefetch=prefetch)
            found[threads, prefetch] = [(images.tobytes(), labels, state) for images, labels, state in taken]
    first = found[1, 1]
    assert all(each == first for each in found.values())
    other = batches(shards, batch=50, seed=4)
    assert [images.tobytes() for images, _, _ in other] != [pixels for pixels, _, _ in first]


def test_a_loop_goes_on_where_the_last_was_left(shards: Path) -> None:
    whole = [images.tobytes() for images, _, _ in batches(shards, batch=40)]
    with Loader(str(shards), global_batch=40, size=32, seat=(0, 1)) as loader:
        taken = []
        for batch in loader:
            taken.append(batch.images.tobytes())
            if len(taken) == 2:
                break
        assert (loader.cursor.epoch, loader.cursor.consumed) == (0, 80)  # not what was prefetched
        taken += [batch.images.tobytes() for batch in loader]
        assert taken == whole
        assert (loader.cursor.epoch, loader.cursor.consumed) == (1, 0)
        assert [batch.images.tobytes() for batch in loader] != whole
        assert (loader.cursor.epoch, loader.cursor.consumed) == (2, 0)


def test_a_cursor_goes_on_in_a_copy_of_the_set_and_nowhere_else(shards: Path, tmp_path: Path) -> None:
    (_, _, state), *rest = batches(shards, batch=100)
    copy = shutil.copytree(shards, tmp_path / "copy")
    again = batches(copy, batch=100, state=state)
    assert [images.tobytes() for images, _, _ in again] == [images.tobytes() for images, _, _ in rest]

    make_noise(tmp_path / "tree/train", start=1)
    assert stoker("data", "convert", tmp_path / "tree", tmp_path / "other", "--shard-samples", 9) == 0
    for url, settings in ((tmp_path / "other/train", {}), (copy, {"seed": 1}), (copy, {"sampling": "resampled"})):
        with pytest.raises(InputError, match="the cursor is of plan"):
            batches(url, batch=100, state=state, **settings)


def test_join_resumes_at_the_beginning_of_an_epoch(shards: Path) -> None:
    found: Counter[bytes] = Counter()
    for rank in range(3):
        with Loader(str(shards), transform=None, global_batch=30, sampling="join", seat=(rank, 3)) as loader:
            stood = []
            for batch in loader:
                found.update(map(bytes, batch.images))
                stood.append((loader.cursor.epoch, loader.cursor.consumed))
            assert stood == [(0, 0)] * (len(stood) - 1) + [(1, 0)]
            with pytest.raises(InputError, match="cannot be entered"):
                loader.load_state_dict(loader.state_dict() | {"consumed": 10})
    assert (len(found), found.total()) == (SAMPLES, SAMPLES)


def test_resampled_resumes_in_any_world(shards: Path) -> None:
    settings: dict[str, Any] = {"sampling": "resampled", "epoch_samples": 100, "transform": "imagenet-train"}
    alone = batches(shards, batch=30, **settings)
    assert [len(images) for images, _, _ in alone] == [30, 30, 30, 10]
    pixels = np.concatenate([images for images, _, _ in alone])
    for rank in range(2):
        mine = batches(shards, batch=21, seat=(rank, 2), state=alone[0][2], **settings)
        assert np.concatenate([images for images, _, _ in mine]).tobytes() == pixels[30 + rank :: 2].tobytes()
