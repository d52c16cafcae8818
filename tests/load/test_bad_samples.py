"""Bad samples: skipped, counted, logged, and fatal above max_bad."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker import Loader
from stoker.errors import VerificationError
from stoker.load.planning import find_shard_set
from tests.support.loaders import encode, gradient, loader_threads, write_shards


@pytest.fixture(autouse=True)
def _isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "scans"))


@pytest.fixture
def shards(pets: Path) -> str:
    return f"{pets}/tar/train"


@pytest.fixture
def broken(pets: Path, tmp_path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """A copy of the shard set with four overwritten images; the shard and offset of each by the kind of damage."""
    shutil.copytree(pets / "tar/train", tmp_path / "broken")
    shard_set = find_shard_set(str(tmp_path / "broken"))
    spots = {}
    for number, damage in enumerate(("garbage", "truncated", "zeros", "text")):
        path = tmp_path / "broken" / shard_set.shards[number].name
        offset, length, _ = shard_set.read_index(path.name)[number + 2].tolist()
        image = path.read_bytes()[offset : offset + length]
        bad = {
            "garbage": np.random.default_rng(1).bytes(length),
            "truncated": image[: length * 2 // 3] + bytes(length - length * 2 // 3),
            "zeros": bytes(length),
            "text": b"not found".ljust(length),
        }[damage]
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bad)
        spots[damage] = (str(path), offset)
    return str(tmp_path / "broken"), spots


@pytest.mark.parametrize("transform", ["imagenet-train", "imagenet-val", lambda pixels, _: pixels[:8, :8]])
def test_bad_samples_are_skipped_counted_and_logged(
    broken: tuple[str, dict[str, tuple[int, int]]], shards: str, transform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url, spots = broken
    options: dict[str, Any] = {"global_batch": 16, "transform": transform, "size": 24, "seed": 2}
    good = list(Loader(shards, **options))
    assert caplog.messages == []
    bad_spots = {
        spot for damage, spot in spots.items() if damage != "truncated"
    }  # an image that ends in zeros may still decode
    with Loader(url, max_bad=0.05, **options) as loader:
        batches = list(loader)
        skipped = loader.bad
    assert bad_spots <= {(bad.shard, bad.offset) for bad in skipped} <= set(spots.values())
    assert [batch.cursor.consumed for batch in batches] == [16, 32, 48, 64, 80, 0]
    assert [batch.cursor for batch in batches[:-1]] == [
        batch.cursor._replace(plan=batches[0].cursor.plan) for batch in good[:-1]
    ]
    assert sum(batch.count for batch in batches) == 90 - len(skipped)
    positions = {bad.position for bad in skipped}
    for start, (one, other) in enumerate(zip(batches, good, strict=True)):
        rows = [row for row in range(other.count) if start * 16 + row not in positions]
        truncated = spots["truncated"] in {(bad.shard, bad.offset) for bad in skipped}
        assert np.array_equal(one.labels, other.labels[rows])
        assert one.count == len(rows) == len(one.images)
        same = (one.images == other.images[rows]).reshape(len(rows), -1).all(axis=1)
        assert (~same).sum() <= (0 if truncated else 1)
    (message,) = caplog.messages
    first = skipped[0]
    assert caplog.records[0].levelno == logging.WARNING
    assert message.startswith(f"{url}: epoch 0 ")
    assert f" {len(skipped)} bad samples " in message
    assert f"{first.shard} at byte {first.offset:,}: {first.reason}" in message
    for bad in skipped:
        data = Path(bad.shard).read_bytes()[bad.offset :]
        assert bad.epoch == 0
        assert bad.reason
        assert data[:2] != b"\xff\xd8" or (bad.shard, bad.offset) == spots["truncated"]


def test_truncated_and_empty_images_are_bad_whatever_the_crop(tmp_path: Path) -> None:
    images = [encode(gradient(400, 300)) for _ in range(30)]
    images[7] = images[7][: len(images[7]) * 9 // 10]
    images[11] = b""
    images[17] = encode(gradient(400, 300), progressive=True)[:-500]
    images[23] = encode(gradient(400, 300), restart_marker_rows=1)[:-2_000]
    url = write_shards(tmp_path / "set", images)
    with Loader(url, global_batch=4, size=16, max_bad=1, seed=1) as loader:
        for epoch in range(10):
            labels = [label for batch in loader for label in batch.labels.tolist()]
            assert sorted(labels) == [label for label in range(30) if label not in (7, 11, 17, 23)], epoch


def test_bad_samples_are_fatal_by_default(
    broken: tuple[str, dict[str, tuple[int, int]]], caplog: pytest.LogCaptureFixture
) -> None:
    url, spots = broken
    loader = Loader(url, global_batch=16, size=24)
    with pytest.raises(VerificationError) as caught:
        list(loader)
    first = loader.bad[0]
    assert (first.shard, first.offset) in spots.values()
    assert caught.value.where == url
    assert re.match(r"[1-4] bad samples? ", caught.value.what)
    assert f"{first.shard} at byte {first.offset:,}: " in caught.value.what
    assert "max_bad=0.001" in caught.value.what
    assert "stoker data verify --deep" in str(caught.value.hint)
    assert "max_bad" in str(caught.value.hint)
    assert loader_threads() == []


@pytest.mark.parametrize(("max_bad", "fatal"), [(3 / 90, False), (2.9 / 90, True), (0, True), (1, False)])
def test_max_bad_is_a_fraction_of_the_epoch(tmp_path: Path, max_bad: float, fatal: bool) -> None:
    images = [encode(gradient(20, 20)) for _ in range(90)]
    images[5] = images[50] = images[89] = b"bad"
    url = write_shards(tmp_path / "set", images, shard_samples=30)
    loader = Loader(url, global_batch=16, size=8, max_bad=max_bad)
    if fatal:
        with pytest.raises(VerificationError):
            list(loader)
    else:
        for epoch in range(1, 4):  # each epoch counts by itself
            assert sum(batch.count for batch in loader) == 87
            assert len(loader.bad) == 3 * epoch


def test_a_batch_of_only_bad_samples_is_empty(tmp_path: Path) -> None:
    url = write_shards(tmp_path / "set", [b"bad"] * 4)
    for transform, shape in (("imagenet-val", (0, 8, 8, 3)), (lambda pixels, _: pixels, None)):
        (batch,) = Loader(url, global_batch=4, transform=transform, size=8, max_bad=1)
        assert (batch.count, len(batch.images), len(batch.labels)) == (0, 0, 0)
        assert shape is None or batch.images.shape == shape
