"""`stoker data summary`: shard sets, brace patterns and listings."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from tests.support.trees import make_dataset, stoker


def summary_rows(capsys: pytest.CaptureFixture[str], url: object) -> list[dict[str, object]]:
    capsys.readouterr()
    assert stoker("data", "summary", url, "--json") == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out", "--shard-samples", 5) == 0
    return tmp_path / "out"


def test_folder_of_shard_sets(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, val = summary_rows(capsys, shards)
    assert train == {
        "pattern": f"{shards}/train/pets-train-{{000000..000005}}.tar",
        "split": "train",
        "format": "tar",
        "shards": 6,
        "samples": 30,
        "bytes": sum(path.stat().st_size for path in (shards / "train").glob("*.tar")),
        "classes": 3,
        "quarantined": 0,
        "missing": [],
    }
    assert (val["split"], val["shards"], val["samples"]) == ("val", 2, 9)


def test_printed_pattern_can_be_used_as_url(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pattern = summary_rows(capsys, shards)[0]["pattern"]
    again = summary_rows(capsys, pattern)[0]
    assert (again["pattern"], again["shards"]) == (pattern, 6)
    assert again["samples"] == 30  # from the manifest next to the shards


def test_missing_shards(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / "train/pets-train-000003.tar").unlink()
    pattern = shards / "train/pets-train-{000000..000005}.tar"
    for manifest in ("there", "gone"):
        for url in (shards / "train", pattern):
            (row,) = summary_rows(capsys, url)
            assert (row["shards"], row["missing"]) == (5, ["pets-train-000003.tar"])
            assert row["samples"] == (25 if manifest == "there" else None)
        assert stoker("data", "summary", pattern) == 0
        assert f"missing in {pattern}: pets-train-000003.tar\n" in capsys.readouterr().err
        (shards / "train/manifest.json").unlink(missing_ok=True)
    assert stoker("data", "verify", pattern) == 2  # only the summary accepts missing shards
    assert re.search(r"\b1 of 6 shards\b.*missing\b.*pets-train-000003\.tar", capsys.readouterr().err)


def test_split_without_manifest_is_listed(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / "train/manifest.json").unlink()
    assert [(row["split"], row["samples"]) for row in summary_rows(capsys, shards)] == [("train", None), ("val", 9)]


def test_split_is_guessed_from_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "000000.tar").write_bytes(b"")
    assert [row["split"] for row in summary_rows(capsys, tmp_path)] == ["train", "val"]


def test_listing_on_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"imagenet-train-{i:06d}.tar" for i in range(1282)] + [f"imagenet-val-{i:06d}.tar" for i in range(50)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*names, "README", "manifest.json"])))
    train, val = summary_rows(capsys, "-")
    assert (train["pattern"], train["shards"]) == ("imagenet-train-{000000..001281}.tar", 1282)
    assert (val["pattern"], val["shards"], val["split"]) == ("imagenet-val-{000000..000049}.tar", 50, "val")


def test_long_listing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "2024-01-01 10:00:00  268435456 train-00000-of-00003\n2024-01-01 10:00:00 5 train-00002-of-00003\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    (row,) = summary_rows(capsys, "-")
    assert row["pattern"] == "train-{00000..00002}-of-00003"
    assert row["missing"] == ["train-00001-of-00003"]


def test_nothing_to_summarize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("README\n"))
    assert stoker("data", "summary", "-") == 2
    assert stoker("data", "summary", tmp_path) == 2
    assert re.search(rf"{tmp_path}: no shards .*; .*stoker data convert SOURCE DEST$", capsys.readouterr().err.strip())
    assert stoker("data", "summary", tmp_path / "nowhere") == 2
    assert f"{tmp_path}/nowhere: no such file or directory" in capsys.readouterr().err
