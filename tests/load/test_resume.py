"""Resuming an epoch after kills, with other world sizes: real shards, real processes, every pixel compared."""

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
    """Write images of noise, in which every crop is different."""
    root.mkdir(parents=True)
    for label in ("ant", "bee", "cat"):
        (root / label).mkdir()
    for number in range(start, start + SAMPLES):
        noise = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / ("ant", "bee", "cat")[number % 3] / f"{number:05d}.jpg", quality=90)
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard set of 34 shards in two lanes."""
    root = tmp_path_factory.mktemp("resume")
    make_noise(root / "tree/train")
    assert stoker("data", "convert", root / "tree", root / "out", "--shard-samples", 9) == 0
    manifest = json.loads((root / "out/train/manifest.json").read_text())
    assert (manifest["samples"], manifest["lanes"], len(manifest["shards"])) == (SAMPLES, 2, 34)
    return root / "out/train"


# Reads batches in lockstep with the other ranks, as training does: a step starts once all have recorded the last one.
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

with Loader(url, transform=None, global_batch=int(batch), rank=(rank, world), threads=1) as loader:
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
    """Start a reader process per rank; kill those that still run at the end."""
    text = json.dumps(state) if state else ""
    ranks = []
    try:
        for rank in range(world):
            words = map(str, (url, rank, world, batch, text, records))
            ranks.append(subprocess.Popen([sys.executable, "-c", READER, *words]))
        yield ranks
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
        for process in ranks:
            process.wait()


def recorded(records: Path, world: int) -> list[list[Record]]:
    """Return the records of each rank; a line truncated by the kill does not count."""
    paths = [Path(f"{records}.{rank}") for rank in range(world)]
    texts = [path.read_text() if path.exists() else "" for path in paths]
    return [[json.loads(line) for line in text.split("\n")[:-1]] for text in texts]


def test_an_epoch_killed_and_resumed_with_other_world_sizes_is_read_exactly_once(shards: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    state: dict[str, Any] | None = None
    # Two ranks, then three, are killed at a random moment after a few steps.
    for world, batch in ((2, 5), (3, 7)):
        records = tmp_path / f"killed-{world}"
        min_steps = random.randint(1, 8)
        with readers(shards, world, batch, state, records) as ranks:
            while min(map(len, recorded(records, world))) < min_steps:
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.001)
            time.sleep(random.random() * 0.03)
        assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * world
        by_rank = recorded(records, world)
        together = min(map(len, by_rank))
        assert max(map(len, by_rank)) <= together + 1
        states = [rank_records[together - 1][1] for rank_records in by_rank]
        state = states[0]
        assert states == [state] * world
        assert (state["epoch"], 0 < state["consumed"] < SAMPLES) == (0, True)
        seen += [digest for rank_records in by_rank for digests, _ in rank_records[:together] for digest in digests]
        assert len(seen) == state["consumed"]

    records = tmp_path / "last"
    with readers(shards, 4, 13, state, records) as ranks:
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    by_rank = recorded(records, 4)
    assert len({len(rank_records) for rank_records in by_rank}) == 1
    assert all(
        rank_records[-1][1] | {"plan": ""} == {"epoch": 1, "consumed": 0, "plan": ""} for rank_records in by_rank
    )
    seen += [digest for rank_records in by_rank for digests, _ in rank_records for digest in digests]

    images = (shards.parent.parent / "tree/train").rglob("*.jpg")
    every = Counter(hashlib.sha256(path.read_bytes()).hexdigest() for path in images)
    assert (len(every), every.total()) == (SAMPLES, SAMPLES)
    assert Counter(seen) == every


def batches(
    url: Path, *, batch: int, rank: tuple[int, int] = (0, 1), state: dict[str, Any] | None = None, **settings: Any
) -> list[tuple[Pixels, list[int], dict[str, Any]]]:
    """Return pixels, labels and state of each batch, from a state to the end of its epoch."""
    with Loader(str(url), global_batch=batch, size=32, rank=rank, **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        expected = len(loader)
        taken = [(read.images.copy(), read.labels.tolist(), loader.state_dict()) for read in loader]
        assert len(taken) == expected
        return taken


@pytest.mark.parametrize(("world", "batch"), [(1, 17), (2, 24), (3, 25)])
def test_every_world_size_resumes_from_every_cursor_with_the_same_pixels(shards: Path, world: int, batch: int) -> None:
    alone = batches(shards, batch=24, threads=2)
    pixels = np.concatenate([images for images, _, _ in alone])
    labels = [label for _, some, _ in alone for label in some]
    assert len(pixels) == SAMPLES

    for state in [None, *(state for _, _, state in alone[:-1])]:
        consumed = 0 if state is None else state["consumed"]
        ranks = [batches(shards, batch=batch, rank=(rank, world), state=state, threads=2) for rank in range(world)]
        for step, together in enumerate(zip(*ranks, strict=True)):
            first = consumed + step * batch
            last = min(first + batch, SAMPLES)
            assert sum(len(images) for images, _, _ in together) == last - first
            for rank, (images, some, _) in enumerate(together):
                # Rows of the global batch are assigned round-robin to the ranks.
                rows = slice(first + (rank - first) % world, last, world)
                assert images.tobytes() == pixels[rows].tobytes()
                assert some == labels[rows]


def test_a_rank_without_samples_in_the_last_batch_still_makes_the_step(shards: Path) -> None:
    ranks = [batches(shards, batch=SAMPLES - 1, rank=(rank, 3)) for rank in range(3)]
    assert [[len(images) for images, _, _ in steps] for steps in ranks] == [[100, 0], [100, 0], [99, 1]]
    assert ranks[0][1][0].shape == (0, 32, 32, 3)
    assert len({json.dumps(steps[-1][2]) for steps in ranks}) == 1


def test_threads_and_prefetch_do_not_change_the_batches(shards: Path) -> None:
    by_options = {}
    for threads in (1, 2, 5):
        for prefetch in (1, 8):
            taken = batches(shards, batch=50, seed=3, threads=threads, prefetch=prefetch)
            by_options[threads, prefetch] = [(images.tobytes(), labels, state) for images, labels, state in taken]
    first = by_options[1, 1]
    assert all(each == first for each in by_options.values())
    other = batches(shards, batch=50, seed=4)
    assert [images.tobytes() for images, _, _ in other] != [pixels for pixels, _, _ in first]


def test_a_loop_continues_where_the_last_one_stopped(shards: Path) -> None:
    whole = [images.tobytes() for images, _, _ in batches(shards, batch=40)]
    with Loader(str(shards), global_batch=40, size=32, rank=(0, 1)) as loader:
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


def test_a_cursor_is_accepted_for_a_copy_of_the_dataset_only(shards: Path, tmp_path: Path) -> None:
    (_, _, state), *rest = batches(shards, batch=100)
    copy = shutil.copytree(shards, tmp_path / "copy")
    again = batches(copy, batch=100, state=state)
    assert [images.tobytes() for images, _, _ in again] == [images.tobytes() for images, _, _ in rest]

    make_noise(tmp_path / "tree/train", start=1)
    assert stoker("data", "convert", tmp_path / "tree", tmp_path / "other", "--shard-samples", 9) == 0
    for url, settings in ((tmp_path / "other/train", {}), (copy, {"seed": 1}), (copy, {"sampling": "resampled"})):
        with pytest.raises(InputError, match=f"plan {state['plan']}, the current plan is .*same dataset"):
            batches(url, batch=100, state=state, **settings)


def test_join_resumes_at_the_start_of_an_epoch_only(shards: Path) -> None:
    images: Counter[bytes] = Counter()
    for rank in range(3):
        with Loader(str(shards), transform=None, global_batch=30, sampling="join", rank=(rank, 3)) as loader:
            cursors = []
            for batch in loader:
                images.update(map(bytes, batch.images))
                cursors.append((loader.cursor.epoch, loader.cursor.consumed))
            assert cursors == [(0, 0)] * (len(cursors) - 1) + [(1, 0)]
            with pytest.raises(InputError, match=r"join.*middle of an epoch.*\b10\b.*start of an epoch"):
                loader.load_state_dict(loader.state_dict() | {"consumed": 10})
    assert (len(images), images.total()) == (SAMPLES, SAMPLES)


def test_resampled_resumes_with_any_world_size(shards: Path) -> None:
    settings: dict[str, Any] = {"sampling": "resampled", "epoch_samples": 100, "transform": "imagenet-train"}
    alone = batches(shards, batch=30, **settings)
    assert [len(images) for images, _, _ in alone] == [30, 30, 30, 10]
    pixels = np.concatenate([images for images, _, _ in alone])
    for rank in range(2):
        own_batches = batches(shards, batch=21, rank=(rank, 2), state=alone[0][2], **settings)
        assert np.concatenate([images for images, _, _ in own_batches]).tobytes() == pixels[30 + rank :: 2].tobytes()
