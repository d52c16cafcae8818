"""`stoker data plan`, `peek` and `bench` as a user meets them."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.trees import image_bytes, make_dataset, stoker


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 × 100 training images in 30 shards, and 3 × 3 to validate."""
    root = tmp_path_factory.mktemp("plan")
    make_dataset(root / "pets", train=100, val=3)
    assert stoker("data", "convert", root / "pets", root / "shards", "--shard-samples", 10) == 0
    return root / "shards"


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "plan", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_adds_up_to_the_epoch(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("exact", "join"):
        told = planned(capsys, shards / "train", "--world", 4, "--nodes", 2, "--batch", 64, "--sampling", mode)
        assert told["samples"] == sum(rank["samples"] for rank in told["ranks"]) == 300
        assert told["duplicates"] == told["unread"] == 0
        assert [rank["node"] for rank in told["ranks"]] == [0, 0, 1, 1]
        size = sum(path.stat().st_size for path in (shards / "train").glob("*.tar"))
        assert abs(sum(rank["bytes"] for rank in told["ranks"]) - size) <= 4


def test_an_exact_plan_tells_the_tail(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, shards / "train", "--world", 7, "--batch", 64)
    assert (told["batches"], told["tail"]) == (5, 300 - 4 * 64)
    assert {rank["batches"] for rank in told["ranks"]} == {5}
    tails = [rank["tail"] for rank in told["ranks"]]
    assert sum(tails) == told["tail"]
    assert max(tails) - min(tails) <= 1


def test_a_join_plan_counts_whole_shards_and_tells_of_join(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "plan", shards / "train", "--world", "7", "--batch", "14", "--sampling", "join") == 0
    assert "torch.distributed.algorithms.Join" in capsys.readouterr().err
    told = planned(capsys, shards / "train", "--world", 7, "--batch", 14, "--sampling", "join")
    assert sorted(rank["shards"] for rank in told["ranks"]) == [4, 4, 4, 4, 4, 5, 5]
    assert told["batches"] == 25


def test_a_resampled_plan_counts_what_comes_again_and_what_does_not_come(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = planned(capsys, shards / "train", "--sampling", "resampled", "--epoch-samples", 450, "--batch", 50)
    assert told["samples"] == 450
    assert told["duplicates"] > 150
    assert told["duplicates"] - told["unread"] == 150


def test_a_plan_resumes(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, shards / "train", "--world", 3, "--batch", 50, "--resume", "2:130")
    assert (told["epoch"], told["consumed"], told["samples"], told["batches"]) == (2, 130, 170, 4)
    told = planned(capsys, shards / "train", "--resume", "2:300", "--batch", 50)
    assert (told["epoch"], told["consumed"], told["samples"]) == (3, 0, 300)


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["--world", "8", "--batch", "4"], ["cannot feed 8 ranks"]),
        (["--batch", "1000"], ["more than an epoch's 300 samples"]),
        (["--world", "31", "--batch", "31", "--sampling", "join"], ["30 are not enough for 31 ranks"]),
        (["--world", "3", "--nodes", "2", "--batch", "1"], ["cannot feed 3 ranks", "evenly over 2 nodes"]),
        (["--batch", "50", "--resume", "0:301"], ["301 of an epoch of 300"]),
        (["--batch", "50", "--resume", "now"], ["'now' is no cursor", "EPOCH:CONSUMED"]),
        (["--batch", "50", "--resume", "1:10", "--sampling", "join"], ["resumes at the beginning of an epoch"]),
        (["--batch", "50", "--sampling", "random"], ["'random' is none of exact, join, resampled"]),
        (["--batch", "50", "--epoch-samples", "10"], ["only `resampled` can have another length"]),
        (["--world", "0"], ["0 is less than 1"]),
    ],
)
def test_what_would_hang_or_starve_is_refused(
    shards: Path, capsys: pytest.CaptureFixture[str], words: list[str], reasons: list[str]
) -> None:
    assert stoker("data", "plan", shards / "train", *words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for reason in reasons:
        assert reason in said


def test_a_folder_of_two_splits_names_both(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "plan", shards) == 2
    said = capsys.readouterr().err
    assert f"{shards}/train" in said
    assert f"{shards}/val" in said


def test_shards_sorted_by_class_are_warned_of(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    for label in range(6):
        with tarfile.open(tmp_path / f"sorted-{label:06d}.tar", "w") as archive:
            for number in range(20):
                members = {"jpg": image_bytes(20 * label + number), "cls": str(label).encode()}
                for kind, data in members.items():
                    info = tarfile.TarInfo(f"{label}-{number}.{kind}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    assert stoker("data", "plan", f"{tmp_path}/sorted-{{000000..000005}}.tar", "--batch", "8") == 0
    assert "sorted by class" in capsys.readouterr().err
    assert stoker("data", "plan", shards / "train", "--batch", "8") == 0
    assert "sorted by class" not in capsys.readouterr().err


def test_peek_tells_what_there_is(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "peek", shards / "train", "--n", "12", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told) == 12
    assert all(one["key"].startswith(f"{one['name']}/") for one in told)
    assert {(one["width"], one["height"], one["kind"]) for one in told} == {(24, 18, "jpg")}


def test_peek_draws_a_sheet_of_what_the_model_sees(shards: Path, tmp_path: Path) -> None:
    sheets = []
    for seed in ("0", "0", "1"):
        words = ("--n", "5", "--size", "40", "--seed", seed, "--png", tmp_path / "sheet.png")
        assert stoker("data", "peek", shards / "train", *words) == 0
        sheets.append((tmp_path / "sheet.png").read_bytes())
    assert sheets[0] == sheets[1] != sheets[2]
    assert Image.open(io.BytesIO(sheets[0])).width >= 3 * 40


def test_peek_shows_a_bad_image_as_such(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(shards / "val", tmp_path / "val")
    (shard,) = (tmp_path / "val").glob("*.tar")
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff")
    data[at + 20 : at + 200] = bytes(180)
    shard.write_bytes(data)
    assert stoker("data", "peek", tmp_path / "val", "--n", "1", "--png", tmp_path / "sheet.png") == 2
    said = capsys.readouterr()
    assert "no image could be decoded" in said.err
    assert not (tmp_path / "sheet.png").exists()


def test_bench_measures_and_says_what_holds_it_back(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "bench", shards / "train", "--seconds", "0.3", "--batch", "32", "--size", "32", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images_per_s"] > 0
    assert told["limit_images_per_s"] > 0
    assert set(told["stages"]) == {"fetch", "read", "decode", "transform", "idle"}
    assert sum(told["stages"].values()) == pytest.approx(1)
    assert "of what the decoder alone gives" in told["verdict"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["bench", "--transform", "none"], "imagenet-train, imagenet-val"),
        (["bench", "--threads", "0"], "--threads is '0'"),
        (["bench", "--seconds", "0"], "--seconds is 0"),
        (["bench", "--batch", "301"], "more than an epoch's 300 samples"),
        (["peek", "--n", "0"], "--n is 0"),
        (["peek", "--size", "0"], "--size is 0"),
    ],
)
def test_bad_options_are_refused(
    shards: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert stoker("data", words[0], shards / "train", *words[1:]) == 2
    assert reason in capsys.readouterr().err
