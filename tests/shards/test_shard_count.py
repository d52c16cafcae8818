"""The default number of shards, and conversions that were started with the earlier default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.shards.convert import prepare_conversion
from stoker.shards.manifest import default_lanes
from stoker.shards.options import MIN_SHARD_SAMPLES, MIN_SHARDS, ConversionOptions
from stoker.shards.plan import ConversionPlan, SplitPlan
from tests.support.trees import digests, make_dataset, make_tree, stoker

DEFAULT = ConversionOptions(min_shards=MIN_SHARDS)


def read_manifest(out: Path, split: str = "train") -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((out / split / "manifest.json").read_text())
    return manifest


@pytest.mark.parametrize(
    ("samples", "size", "shards"),
    [
        (1, 100, 1),
        (2 * MIN_SHARD_SAMPLES - 1, 10_000, 1),
        (2 * MIN_SHARD_SAMPLES, 10_000, 2),
        (120, 10_000, 7),
        (MIN_SHARDS * MIN_SHARD_SAMPLES, 1 << 20, MIN_SHARDS),
        (50_000, 100 << 20, MIN_SHARDS),
        (1_281_167, 150 << 30, 600),
        (3, 1 << 30, 3),  # never more shards than samples
    ],
)
def test_default_is_at_least_32_shards_where_the_data_allows(samples: int, size: int, shards: int) -> None:
    assert DEFAULT.count_shards(samples, size) == shards
    assert shards < MIN_SHARDS or default_lanes(shards) >= 2


def test_explicit_sizes_are_unchanged() -> None:
    assert ConversionOptions(shard_bytes=1 << 20).count_shards(10_000, 10 << 20) == 10
    assert ConversionOptions(shard_samples=5000).count_shards(10_000, 10 << 20) == 2


def test_plan_digests_of_explicit_sizes_are_unchanged() -> None:
    """Finished and unfinished conversions are recognized by this digest."""
    split = SplitPlan(split="train", found=40, samples=40, bytes=90_000, digest="d" * 64, shards=1, lanes=1, window=2)
    plan = ConversionPlan(
        name="pets",
        source="folder",
        recipe="",
        options=ConversionOptions(seed=3),
        classes=("ant", "bee"),
        splits=(split,),
    )
    assert plan.digest == "27724d9099221586f9ee9bfd3af9e5a0a6f8577cf34049717133bc1ec2ea3add"


def test_few_shards_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_tree(tmp_path / "pets", {"ant": 300, "bee": 300})
    assert stoker("data", "convert", data, tmp_path / "default") == 0
    assert "warning" not in capsys.readouterr().err
    assert (len(read_manifest(tmp_path / "default")["shards"]), read_manifest(tmp_path / "default")["lanes"]) == (32, 2)
    for options in ((), ("--dry-run",)):
        assert stoker("data", "convert", data, tmp_path / "few", "--shard-samples", 100, *options) == 0
        assert "--shard-samples 18" in capsys.readouterr().err
    assert stoker("data", "convert", data, tmp_path / "enough", "--shard-samples", 18, *options) == 0
    assert "warning" not in capsys.readouterr().err


def test_shards_smaller_than_the_minimum_are_not_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_tree(tmp_path / "pets", {"ant": 120})
    assert stoker("data", "convert", data, tmp_path / "out", "--dry-run") == 0
    message = capsys.readouterr().err
    assert "warning" in message
    assert "--shard-samples" not in message


def write_with_earlier_default(data: Path, out: Path, scratch: Path) -> str:
    """Convert as before there was a minimum number of shards; return the stamp of the source."""
    scratch.mkdir()
    with prepare_conversion(str(data), ConversionOptions(), scratch=scratch) as conversion:
        conversion.run(str(out), jobs=1)
        return "/".join(conversion.catalogs[split.split].stamp for split in conversion.plan.splits)


def test_set_with_the_earlier_default_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = make_dataset(tmp_path / "pets", train=40), tmp_path / "out"
    write_with_earlier_default(data, out, tmp_path / "scratch")
    expected = digests(out)
    assert len(read_manifest(out)["shards"]) == 1
    assert stoker("data", "convert", data, out) == 0
    assert digests(out) == expected
    capsys.readouterr()
    assert stoker("data", "convert", data, out, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["digest"] == read_manifest(out)["plan"]
    (out / "val/pets-val-000000.tar").unlink()
    assert stoker("data", "convert", data, out) == 0
    assert digests(out) == expected


def test_unfinished_conversion_with_the_earlier_default_is_resumed(tmp_path: Path) -> None:
    data, out = make_dataset(tmp_path / "pets", train=40), tmp_path / "out"
    stamp = write_with_earlier_default(data, out, tmp_path / "scratch")
    expected, plan = digests(out), read_manifest(out)["plan"]
    for split in ("train", "val"):
        (out / split / "manifest.json").unlink()
    (out / "_work").mkdir()
    (out / "_work/plan.json").write_text(json.dumps({"plan": plan, "stamp": stamp}))
    assert stoker("data", "convert", data, out) == 0
    assert digests(out) == expected


def test_restart_uses_the_default_of_today(tmp_path: Path) -> None:
    data, out = make_dataset(tmp_path / "pets", train=40), tmp_path / "out"
    stamp = write_with_earlier_default(data, tmp_path / "earlier", tmp_path / "scratch")
    (out / "_work").mkdir(parents=True)
    plan = read_manifest(tmp_path / "earlier")["plan"]
    (out / "_work/plan.json").write_text(json.dumps({"plan": plan, "stamp": stamp}))
    assert stoker("data", "convert", data, out, "--restart") == 0
    assert len(read_manifest(out)["shards"]) == 7
