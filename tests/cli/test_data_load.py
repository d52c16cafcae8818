"""`stoker data plan`, `peek` and `bench`: output, exit codes and refusals."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stoker.errors import InputError
from stoker.load import bench
from stoker.testing import make_shards
from tests.support.trees import image_bytes, make_dataset, stoker


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 training images in 30 shards, and 9 validation images."""
    root = tmp_path_factory.mktemp("plan")
    make_dataset(root / "pets", train=100, val=3)
    assert stoker("data", "convert", root / "pets", root / "shards", "--shard-samples", 10) == 0
    return root / "shards"


def read_plan(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    assert stoker("data", "plan", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_plan_covers_the_epoch_exactly(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("exact", "join"):
        report = read_plan(
            capsys, shards / "train", "--world-size", 4, "--nodes", 2, "--global-batch-size", 64, "--sampling", mode
        )
        assert report["samples"] == sum(rank["samples"] for rank in report["ranks"]) == 300
        assert report["duplicates"] == report["unread"] == 0
        assert [rank["node"] for rank in report["ranks"]] == [0, 0, 1, 1]
        size = sum(path.stat().st_size for path in (shards / "train").glob("*.tar"))
        assert abs(sum(rank["bytes"] for rank in report["ranks"]) - size) <= 4


def test_plan_reports_how_well_classes_are_mixed(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixing = read_plan(capsys, shards / "train")["mixing"]
    assert mixing.keys() == {"seen", "expected", "poor"}
    assert mixing["poor"] is False
    assert 1 <= mixing["seen"] <= 3


def test_exact_plan_reports_the_last_batch(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_plan(capsys, shards / "train", "--world-size", 7, "--global-batch-size", 64)
    assert (report["batches"], report["tail"]) == (5, 300 - 4 * 64)
    assert {rank["batches"] for rank in report["ranks"]} == {5}
    tails = [rank["tail"] for rank in report["ranks"]]
    assert sum(tails) == report["tail"]
    assert max(tails) - min(tails) <= 1


def test_join_plan_counts_whole_shards_and_names_join(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        stoker("data", "plan", shards / "train", "--world-size", "7", "--global-batch-size", "14", "--sampling", "join")
        == 0
    )
    assert "torch.distributed.algorithms.Join" in capsys.readouterr().err
    report = read_plan(capsys, shards / "train", "--world-size", 7, "--global-batch-size", 14, "--sampling", "join")
    assert sorted(rank["shards"] for rank in report["ranks"]) == [4, 4, 4, 4, 4, 5, 5]
    assert report["batches"] == 25


def test_resampled_plan_counts_duplicates_and_unread_samples(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_plan(
        capsys, shards / "train", "--sampling", "resampled", "--epoch-samples", 450, "--global-batch-size", 50
    )
    assert report["samples"] == 450
    assert report["duplicates"] > 150
    assert report["duplicates"] - report["unread"] == 150


def test_plan_from_a_cursor(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_plan(capsys, shards / "train", "--world-size", 3, "--global-batch-size", 50, "--resume", "2:130")
    assert (report["epoch"], report["consumed"], report["samples"], report["batches"]) == (2, 130, 170, 4)
    report = read_plan(capsys, shards / "train", "--resume", "2:300", "--global-batch-size", 50)
    assert (report["epoch"], report["consumed"], report["samples"]) == (3, 0, 300)


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["--world-size", "8", "--global-batch-size", "4"], ["--global-batch-size must", r"world size \(8\), got 4"]),
        (["--global-batch-size", "1000"], ["--global-batch-size must", r"\(300\), got 1,000"]),
        (
            ["--world-size", "31", "--global-batch-size", "31", "--sampling", "join"],
            ["--sampling must", "`join`", "30 shards", "31 ranks", "`exact`"],
        ),
        (
            ["--world-size", "3", "--nodes", "2", "--global-batch-size", "1"],
            ["--global-batch-size must", r"world size \(3\), got 1", r"--nodes must", r"ranks \(3\)", "got 2"],
        ),
        (["--global-batch-size", "50", "--resume", "0:301"], ["301", "300 samples"]),
        (["--global-batch-size", "50", "--resume", "now"], ["'now'", "EPOCH:CONSUMED"]),
        (
            ["--global-batch-size", "50", "--resume", "1:10", "--sampling", "join"],
            ["`join`", "10 samples", "epoch"],
        ),
        (["--global-batch-size", "50", "--sampling", "random"], ["'random'", "exact, join, resampled"]),
        (["--global-batch-size", "50", "--epoch-samples", "10"], ["--epoch-samples", "'resampled'", "'exact'"]),
        (["--world-size", "0"], ["--world-size must be >= 1, got 0"]),
        (["--world-size", "400"], [r"--global-batch-size must\b.*\(400\), got 256 \(the default\)"]),
        (["--world-size", "x"], ["--world-size must be an integer, got 'x'"]),
    ],
)
def test_plans_that_would_hang_or_starve_are_refused(
    shards: Path, capsys: pytest.CaptureFixture[str], words: list[str], reasons: list[str]
) -> None:
    assert stoker("data", "plan", shards / "train", *words) == 2
    sentence = capsys.readouterr().err
    first, *faults = sentence.splitlines()
    assert faults == [] or first == f"stoker: {len(faults)} errors"
    for reason in reasons:
        assert re.search(rf"(?<!\w)(?:{reason})(?!\w)", sentence), sentence


def test_directory_with_two_splits_names_both(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "plan", shards) == 2
    sentence = capsys.readouterr().err
    assert f"{shards}/train" in sentence
    assert f"{shards}/val" in sentence


def test_shards_sorted_by_class_cause_a_warning(
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
    assert stoker("data", "plan", f"{tmp_path}/sorted-{{000000..000005}}.tar", "--global-batch-size", "8") == 0
    assert "sorted by class" in capsys.readouterr().err
    assert stoker("data", "plan", shards / "train", "--global-batch-size", "8") == 0
    assert "sorted by class" not in capsys.readouterr().err


def test_peek_lists_samples(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "peek", shards / "train", "--count", "12", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report) == 12
    assert all(one["key"].startswith(f"{one['name']}/") for one in report)
    assert {(one["width"], one["height"], one["kind"]) for one in report} == {(24, 18, "jpg")}


def test_peek_writes_a_contact_sheet(shards: Path, tmp_path: Path) -> None:
    sheets = []
    for seed in ("0", "0", "1"):
        words = ("--count", "5", "--size", "40", "--seed", seed, "--png", tmp_path / "sheet.png")
        assert stoker("data", "peek", shards / "train", *words) == 0
        sheets.append((tmp_path / "sheet.png").read_bytes())
    assert sheets[0] == sheets[1] != sheets[2]
    assert Image.open(io.BytesIO(sheets[0])).width >= 3 * 40


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("small-train", 32)),
        (["--size", "128"], ("imagenet-train", 128)),
        (["--transform", "imagenet-val"], ("imagenet-val", 32)),
    ],
)
def test_small_images_are_shown_and_measured_as_the_trainer_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: tuple[str, int]
) -> None:
    shards = make_shards(tmp_path / "shards", samples=32, val=0, classes=2, size=(32, 32))
    chosen = []

    def record(*_args: object, **settings: Any) -> Any:
        chosen.append((settings["transform"], settings["size"]))
        raise InputError("enough")

    monkeypatch.setattr("stoker.load.peek.peek", record)
    monkeypatch.setattr("stoker.load.bench.run_benchmark", record)
    for command in ("peek", "bench"):
        assert stoker("data", command, shards / "train", *words) == 2
    assert chosen == [expected] * 2


def test_peek_refuses_a_missing_directory_before_it_reads_anything(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stoker.load.peek.peek", lambda *_args, **_settings: pytest.fail("samples were read"))
    folder = tmp_path / "none"
    assert stoker("data", "peek", shards / "train", "--png", folder / "sheet.png") == 2
    assert str(folder) in capsys.readouterr().err
    assert not folder.exists()


def test_peek_without_a_decodable_image_writes_no_sheet(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shards / "val", tmp_path / "val")
    (shard,) = (tmp_path / "val").glob("*.tar")
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff")
    data[at + 20 : at + 200] = bytes(180)
    shard.write_bytes(data)
    assert stoker("data", "peek", tmp_path / "val", "--count", "1", "--png", tmp_path / "sheet.png") == 2
    assert "stoker data verify --deep" in capsys.readouterr().err
    assert not (tmp_path / "sheet.png").exists()


def test_bench_reports_stages_and_a_verdict(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        stoker("data", "bench", shards / "train", "--seconds", "0.3", "--batch-size", "32", "--size", "32", "--json")
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["images_per_s"] > 0
    assert report["limit_images_per_s"] > 0
    assert set(report["stages"]) == {"fetch", "read", "decode", "transform", "idle"}
    assert sum(report["stages"].values()) == pytest.approx(1)
    assert f"{report['share_of_limit']:.0%}".rstrip("%") in report["verdict"]


def test_bench_shows_the_share_of_the_figures_beside_it(
    shards: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median of the ratios, 1.17, is not the ratio of the medians, 361 / 395."""
    speeds, limits = iter([1.0, 361.0, 300.0, 500.0]), iter([308.0, 395.0, 427.0])  # the first round warms up
    run_round = bench._run_round
    monkeypatch.setattr(bench, "_run_round", lambda *args: run_round(*args)._replace(speed=next(speeds)))
    monkeypatch.setattr(bench, "_decode_throughput", lambda *_: next(limits))
    assert stoker("data", "bench", shards / "train", "--seconds", "0.1", "--batch-size", "32", "--size", "32") == 0
    captured = capsys.readouterr()
    heading, row = (re.split(r"  +", line.strip()) for line in captured.out.splitlines())
    shown = dict(zip(heading, row, strict=True))
    assert [float(shown[name]) for name in ("images/s", "decoder alone")] == [361, 395]
    assert shown["share"] == "91%"
    assert captured.err.startswith("91% ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["bench", "--transform", "none"], "imagenet-train, imagenet-val"),
        (["bench", "--threads", "0"], r"--threads\b.*\b1024\b.*'0'"),
        (["bench", "--seconds", "0"], r"--seconds\b.*\b3600\b.* 0\b"),
        (["bench", "--batch-size", "301"], r"--batch-size must\b.*\(300\), got 301\b"),
        (["peek", "--count", "0"], r"--count\b.* 0\b"),
        (["peek", "--size", "0"], r"--size\b.* 0\b"),
    ],
)
def test_bad_options_are_refused(
    shards: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert stoker("data", words[0], shards / "train", *words[1:]) == 2
    assert re.search(reason, capsys.readouterr().err)
