"""Invalid input to `stoker data convert`: one sentence, an exit code, no partial shard and no manifest."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.destination import RESUME_HINT
from stoker.shards.formats import FORMATS
from stoker.shards.plan import SOURCE_CHANGED
from stoker.shards.sample import Sample
from stoker.shards.sources.folder import FolderSource
from tests.shards.test_convert import crash
from tests.support.datasets import make_cifar10, make_imagenet
from tests.support.trees import digests, image_bytes, make_dataset, make_tree, stoker


def run_and_fail(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """Run a command that must fail with this exit code; return its error message, which must be one line."""
    capsys.readouterr()
    assert stoker(*words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("stoker: ")
    return lines[0]


def is_clean(out: Path) -> bool:
    """Return whether there is no manifest, no shard and no partial file."""
    return not any(path.is_file() and "_work" not in path.parts for path in out.rglob("*"))


Damage = Callable[[Path], object]


def add_empty_class(data: Path) -> None:
    (data / "train/dog").mkdir()


def add_class_of_text(data: Path) -> None:
    (data / "train/dog").mkdir()
    (data / "train/dog/notes.txt").write_text("no image here")


def rename_jpeg_to_txt(data: Path) -> None:
    (data / "train/ant/00000.jpg").rename(data / "train/ant/00000.txt")


def add_duplicate_key(data: Path) -> None:
    (data / "train/ant/00000.png").write_bytes(image_bytes(1, "PNG"))


def add_keys_equal_after_dots(data: Path) -> None:
    (data / "train/ant/a.b.jpg").write_bytes(image_bytes(1))
    (data / "train/ant/a_b.jpg").write_bytes(image_bytes(2))


def add_class_to_val(data: Path) -> None:
    make_tree(data / "val", {"zebra": 1})


def add_image_outside_class(data: Path) -> None:
    (data / "train/loose.jpg").write_bytes(image_bytes(1))


def add_second_val(data: Path) -> None:
    shutil.copytree(data / "val", data / "validation")


def add_non_utf8_name(data: Path) -> None:
    with open(os.fsencode(data / "train/ant") + b"/\xff.jpg", "wb") as file:
        file.write(image_bytes(1))


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (add_empty_class, ["train/dog: ", "no images", "; remove "]),
        (add_class_of_text, ["train/dog: ", "no images", "; remove "]),
        (rename_jpeg_to_txt, ["train/ant/00000.txt: ", "JPG", "; rename ", ".jpg"]),
        (add_duplicate_key, ["train: ", "ant/00000.jpg", "ant/00000.png", "key 'ant/00000'", "; rename "]),
        (add_keys_equal_after_dots, ["ant/a.b.jpg", "ant/a_b.jpg", "key 'ant/a_b'", "; rename "]),
        (add_class_to_val, ["pets/val: ", "zebra", "pets/train"]),
        (add_image_outside_class, ["pets/train: ", "loose.jpg", "class folder", "; move "]),
        (add_second_val, ["val/ and validation/", "'val' split"]),
        (add_non_utf8_name, ["train/ant: ", r"'\udcff.jpg'", "UTF-8", "; rename "]),
    ],
)
def test_invalid_folder_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, parts: list[str]
) -> None:
    data = make_dataset(tmp_path / "pets")
    damage(data)
    sentence = run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out")
    assert all(part in sentence for part in parts), sentence
    assert is_clean(tmp_path / "out")


def test_missing_or_unknown_source_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"hello")
    for where in ("missing", "empty", "file.bin"):
        assert where in run_and_fail(capsys, 2, "data", "convert", tmp_path / where, tmp_path / "out")
    sentence = run_and_fail(capsys, 2, "data", "convert", tmp_path / "empty", tmp_path / "out", "--source", "folder")
    assert f"{tmp_path}/empty: " in sentence
    assert "class folders" in sentence
    assert "<class>/<image>" in sentence
    assert is_clean(tmp_path / "out")


def test_source_of_another_kind_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    for kind in ("imagenet", "cifar10", "mnist", "shards"):
        sentence = run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out", "--source", kind)
        assert "pets" in sentence
    sentence = run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out", "--source", "folders")
    assert "did you mean 'folder'" in sentence


def test_truncated_archives_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_imagenet(tmp_path / "imagenet")
    tar = tmp_path / "imagenet/ILSVRC2012_img_train.tar"
    tar.write_bytes(tar.read_bytes()[:-15_000])
    sentence = run_and_fail(capsys, 2, "data", "convert", tmp_path / "imagenet", tmp_path / "out")
    assert "ILSVRC2012_img_train.tar" in sentence
    assert "truncated" in sentence
    make_cifar10(tmp_path / "cifar")
    (archive,) = (tmp_path / "cifar").glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-500])
    assert archive.name in run_and_fail(capsys, 2, "data", "convert", archive, tmp_path / "out")
    assert is_clean(tmp_path / "out")


@pytest.mark.parametrize("cut", [3_000, 1_024])
def test_truncated_shard_as_source_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    """With and without manifest, also when the cut is between two samples."""
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "first") == 0
    (shard,) = (tmp_path / "first/train").glob("*.tar")
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-cut])
    sentence = run_and_fail(capsys, 2, "data", "convert", tmp_path / "first", tmp_path / "out")
    assert shard.name in sentence
    assert re.search(rf"\b{size - cut:,} bytes\b.*manifest lists {size:,}", sentence)
    assert sentence.endswith("stoker data verify")
    (tmp_path / "first/train/manifest.json").unlink()
    sentence = run_and_fail(capsys, 2, "data", "convert", tmp_path / "first/train", tmp_path / "out")
    assert shard.name in sentence
    assert "truncated at byte" in sentence
    assert is_clean(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--format", "zip"], "format 'zip'"),
        (["--shard-size", "huge"], "size such as 200Gi, 1.5GB or 1048576, got 'huge'"),
        (["--shard-size", "0"], "--shard-size"),
        (["--shard-size", "10"], "--force"),
        (["--shard-size", "1023KiB"], "--force"),
        (["--shard-size", "0", "--force"], "--shard-size"),
        (["--shard-samples", "0"], "--shard-samples"),
        (["--limit", "-1"], "--limit"),
        (["--seed", "-1"], "--seed"),
        (["--jobs", "many"], "--jobs"),
        (["--quality", "101"], "--quality"),
        (["--max-side", "0"], "--max-side"),
        (["--prefix", "a/b"], "--prefix"),
    ],
)
def test_invalid_options_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    data = make_dataset(tmp_path / "pets")
    assert word in run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("size", "is_advised"), [("10", True), ("10KB", False)])
def test_unit_is_advised_only_for_a_size_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str, is_advised: bool
) -> None:
    data = make_dataset(tmp_path / "pets")
    sentence = run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out", "--shard-size", size)
    assert ("add a unit" in sentence) == is_advised


@pytest.mark.parametrize("command", ["verify", "summary", "plan", "peek", "bench", "serve"])
def test_missing_path_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = run_and_fail(capsys, 2, "data", command, tmp_path / "nowhere")
    assert re.search(rf"{tmp_path}/nowhere: no such (file or )?directory$", sentence)


# --- Destinations


def test_destination_with_another_dataset_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), out) == 0
    before = digests(out)
    other = make_tree(tmp_path / "other", {"x": 3})
    sentence = run_and_fail(capsys, 2, "data", "convert", other, out)
    assert re.search(rf"{out}: .*\bpets \(30 train samples\b", sentence)
    sentence = run_and_fail(capsys, 2, "data", "convert", tmp_path / "pets", out, "--seed", 1)
    assert re.search(rf"{out}: .*\bpets \(30 train samples\b", sentence)
    assert digests(out) == before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["--shard-samples", "8"], ["--shard-samples", "9"]),
        (["--seed", "1"], ["--seed", "2"]),
        (["--limit", "9"], ["--limit", "8"]),
        (["--shard-size", "1MiB"], ["--shard-size", "2MiB"]),
    ],
)
def test_other_options_for_the_same_dataset_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: list[str], second: list[str]
) -> None:
    data, out = make_dataset(tmp_path / "pets"), tmp_path / "out"
    assert stoker("data", "convert", data, out, *first) == 0
    sentence = run_and_fail(capsys, 2, "data", "convert", data, out, *second)
    assert sentence.index(" ".join(first)) < sentence.index(" ".join(second)) < sentence.index("; choose another")
    assert "another dataset" not in sentence
    assert "--restart" not in sentence  # a finished set is never discarded


def test_other_options_for_an_unfinished_conversion_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = make_dataset(tmp_path / "pets"), tmp_path / "out"
    assert crash(data, out, 12, "--shard-samples", 4)
    sentence = run_and_fail(capsys, 2, "data", "convert", data, out, "--shard-samples", 9)
    assert all(part in sentence for part in ("--shard-samples 4", "--shard-samples 9", "--restart")), sentence
    (data / "train/ant/00000.jpg").unlink()
    sentence = run_and_fail(capsys, 2, "data", "convert", data, out, "--shard-samples", 4)
    assert SOURCE_CHANGED in sentence
    assert "--shard-samples" not in sentence


def test_destination_that_cannot_be_created_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    sentence = run_and_fail(capsys, 2, "data", "convert", data, "/proc/nothing")
    assert sentence.startswith("stoker: /proc/nothing: ")
    assert "_work" not in sentence


def test_small_shard_size_with_force(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-size", "20KiB", "--force") == 0
    assert len(list((tmp_path / "out/train").glob("*.tar"))) > 2


def test_destination_inside_the_source_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    for inside in (data, data / "shards", data / "train/../deep/er"):
        assert "inside the source" in run_and_fail(capsys, 2, "data", "convert", data, inside)


def test_labels_beyond_the_index_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = FORMATS.get("tfrecord")
    chunks = records.encode(Sample("a", image_bytes(1), "jpg", 2**40)).chunks
    (tmp_path / "x-train-0.tfrecord").write_bytes(b"".join(map(bytes, chunks)))
    sentence = run_and_fail(capsys, 2, "data", "convert", tmp_path, tmp_path.parent / "out-labels")
    assert re.search(r"'train'.*\b1099511627776\b.*\b2147483647\b", sentence)
    assert stoker("data", "verify", tmp_path) == 2
    assert "label 1099511627776" in capsys.readouterr().out


@pytest.mark.parametrize("label", [2**63, 10**19, -(2**63) - 1])
def test_labels_beyond_64_bits_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str], label: int) -> None:
    tar = FORMATS.get("tar")
    chunks = [
        chunk
        for key, number in (("a", 0), ("b", label))
        for chunk in tar.encode(Sample(key, image_bytes(1), "jpg", number)).chunks
    ]
    (tmp_path / "x-train-0.tar").write_bytes(b"".join(map(bytes, chunks)) + tar.trailer)
    for command in (["convert", tmp_path, tmp_path.parent / "out-wide-labels"], ["plan", tmp_path], ["peek", tmp_path]):
        sentence = run_and_fail(capsys, 2, "data", *command)
        assert "x-train-0.tar" in sentence
        assert "sample 'b'" in sentence
        assert str(label) in sentence
    assert stoker("data", "verify", tmp_path, "--json") == 2
    ((report,), _) = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    assert report["samples"] == 1
    assert any(str(label) in finding["what"] for finding in report["findings"])


def test_destination_with_other_files_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in run_and_fail(capsys, 2, "data", "convert", make_dataset(tmp_path / "pets"), out)
    assert digests(out).keys() == {"thesis.tex"}


def test_destination_with_another_unfinished_conversion_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    data = make_dataset(tmp_path / "pets")
    (out / "_work").mkdir(parents=True)
    (out / "_work/plan.json").write_text('{"plan": "another"}')
    sentence = run_and_fail(capsys, 2, "data", "convert", data, out)
    assert "unfinished conversion" in sentence
    assert "--restart" in sentence


def test_destination_that_is_a_file_or_read_only_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "pets")
    (tmp_path / "file").write_text("x")
    assert "file" in run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "file")
    assert "read-only" in run_and_fail(capsys, 2, "data", "convert", data, "http://127.0.0.1:9/x")
    assert "ftp" in run_and_fail(capsys, 2, "data", "convert", data, "ftp://host/x")


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs setpriv to leave root")
def test_destination_without_permission_exits_5(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if "pytest" in folder.name:
            folder.chmod(0o755)
    import sys

    command = [sys.executable, "-m", "stoker", "data", "convert", str(data), str(locked / "out")]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    else:
        locked.chmod(0o555)
    if subprocess.run([*command[:-4], "--help"], capture_output=True, check=False).returncode != 0:
        pytest.skip("another user cannot run this Python")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "permission denied" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def small_disk(where: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs with these limits; skip the test where that is not allowed."""
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_disk_without_enough_space_is_rejected_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "pets", train=100)
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        sentence = run_and_fail(capsys, 5, "data", "convert", data, disk / "out")
        assert f"{disk}/out: " in sentence
        assert re.search(r"\b2\d\d(\.\d)? KiB are free; ", sentence)
        assert not (disk / "out").exists()
        (disk / "own/empty").mkdir(parents=True)
        run_and_fail(capsys, 5, "data", "convert", data, disk / "own")
        assert list(disk.rglob("*")) == [disk / "own", disk / "own/empty"]


def test_full_disk_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inodes run out before bytes do, so only writing can fail; the same command then resumes."""
    data = make_dataset(tmp_path / "pets", train=100)
    assert stoker("data", "convert", data, tmp_path / "whole", "--shard-samples", 10) == 0
    with small_disk(tmp_path / "disk", "size=64m,nr_inodes=40") as disk:
        command = ("data", "convert", data, disk / "out", "--shard-samples", 10)
        sentence = run_and_fail(capsys, 5, *command)
        assert f"{disk}/out/" in sentence
        assert "no space left" in sentence
        assert sentence.endswith(f"; {RESUME_HINT}")
        whole = digests(tmp_path / "whole")
        shards = {name: digest for name, digest in digests(disk / "out").items() if name.endswith(".tar")}
        assert shards
        assert all(whole[name] == digest for name, digest in shards.items())
        assert not list(disk.rglob("manifest.json"))
        assert not list(disk.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,nr_inodes=4000", str(disk)], check=True)
        assert stoker(*command) == 0
        assert digests(disk / "out") == whole


def test_image_that_changes_during_the_conversion_is_rejected(tmp_path: Path) -> None:
    source = FolderSource(str(make_dataset(tmp_path / "pets")), scratch=tmp_path)
    item = next(iter(source.scan("train")))
    (tmp_path / "pets/train" / item.name).write_bytes(b"shorter")
    with pytest.raises(SourceError, match=rf"{item.name}: .*\b{item.size} bytes"):
        source.read("train", item)
