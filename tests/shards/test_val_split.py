"""`stoker data convert --val-fraction`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from stoker.shards.catalog import Catalog
from stoker.shards.sample import Item
from stoker.shards.val_split import select_val
from tests.shards.test_bad_input import run_and_fail
from tests.shards.test_convert import crash, read_shard_set
from tests.support.trees import digests, make_dataset, make_tree, stoker

CLASSES = {"ant": 40, "bee": 15, "cat": 2, "dog": 1}


def test_a_fraction_of_each_class_becomes_the_val_split(tmp_path: Path) -> None:
    data, out = make_tree(tmp_path / "pets", CLASSES), tmp_path / "out"
    assert stoker("data", "convert", data, out, "--val-fraction", 0.1) == 0
    train, val = read_shard_set(out / "train"), read_shard_set(out / "val")
    files = {str(path.relative_to(data).with_suffix("")): path.read_bytes() for path in data.rglob("*.jpg")}
    assert {key: image for key, (image, _, _) in (train | val).items()} == files
    assert not train.keys() & val.keys()
    # Rounded, at least one of each class that can spare one.
    assert Counter(key.split("/")[0] for key in val) == {"ant": 4, "bee": 2, "cat": 1}
    assert all(label == list(CLASSES).index(key.split("/")[0]) for key, (_, label, _) in (train | val).items())
    assert json.loads((out / "val/manifest.json").read_text())["options"]["val_fraction"] == 0.1
    assert stoker("data", "verify", out) == 0


def test_val_split_depends_on_the_seed_and_the_keys_only(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "pets", CLASSES)
    for jobs in (1, 5):
        out = tmp_path / f"out{jobs}"
        assert stoker("data", "convert", data, out, "--val-fraction", 0.2, "--shard-samples", 4, "--jobs", jobs) == 0
    assert digests(tmp_path / "out1") == digests(tmp_path / "out5")
    assert stoker("data", "convert", data, tmp_path / "other", "--val-fraction", 0.2, "--seed", 1) == 0
    assert read_shard_set(tmp_path / "other/val").keys() != read_shard_set(tmp_path / "out1/val").keys()
    # Shards hold the images in another order than the folder.
    assert stoker("data", "convert", data, tmp_path / "whole") == 0
    assert stoker("data", "convert", tmp_path / "whole", tmp_path / "again", "--val-fraction", 0.2) == 0
    assert read_shard_set(tmp_path / "again/val").keys() == read_shard_set(tmp_path / "out1/val").keys()


@pytest.mark.parametrize(("fraction", "expected"), [(0.1, 2), (0.5, 10), (0.95, 19), (0.001, 1), (0.999, 19)])
def test_rounding(tmp_path: Path, fraction: float, expected: int) -> None:
    catalog = Catalog.write(tmp_path, "train", (Item(f"ant/{i}.jpg", 0, 10) for i in range(20)))
    assert select_val(catalog, fraction, 0).sum() == expected


def test_interrupted_conversion_is_resumed_with_the_same_fraction_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = make_tree(tmp_path / "pets", CLASSES), tmp_path / "out"
    options = ("--val-fraction", 0.2, "--shard-samples", 4)
    assert stoker("data", "convert", data, tmp_path / "whole", *options) == 0
    assert crash(data, out, 12, *options)
    for other in (("--val-fraction", 0.3), ()):
        sentence = run_and_fail(capsys, 2, "data", "convert", data, out, "--shard-samples", 4, *other)
        assert "--val-fraction 0.2" in sentence
        assert "--restart" in sentence
    assert stoker("data", "convert", data, out, *options) == 0
    assert digests(out) == digests(tmp_path / "whole")
    sentence = run_and_fail(capsys, 2, "data", "convert", data, out, "--val-fraction", 0.3, "--shard-samples", 4)
    assert "--val-fraction 0.2" in sentence
    assert "--val-fraction 0.3" in sentence


def test_source_with_a_val_split_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    sentence = run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out", "--val-fraction", 0.1)
    assert f"{data}: " in sentence
    assert "--val-fraction" in sentence
    (data / "val").rename(data / "test")
    assert stoker("data", "convert", data, tmp_path / "out", "--val-fraction", 0.1) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test", "train", "val"]


def test_classes_of_one_image_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_tree(tmp_path / "pets", {"ant": 1, "bee": 1})
    assert "--val-fraction" in run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out", "--val-fraction", 0.5)
    for fraction in ("0", "1", "-0.1", "nan"):
        words = ("data", "convert", data, tmp_path / "out", f"--val-fraction={fraction}")
        assert "--val-fraction" in run_and_fail(capsys, 2, *words)
