"""Bad input to `stoker data convert`: one sentence, an exit code by class, no half-written shard and no manifest."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample
from tests.support.datasets import make_cifar10, make_imagenet
from tests.support.trees import digests, image_bytes, make_dataset, make_tree, stoker


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """Run a command that must fail with this code, and return its one sentence."""
    capsys.readouterr()
    assert stoker(*words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("stoker: ")
    return lines[0]


def nothing_written(out: Path) -> bool:
    """Whether there is no manifest, no shard and nothing half-written."""
    return not any(path.is_file() and "_work" not in path.parts for path in out.rglob("*"))


Break = Callable[[Path], object]


def an_empty_class(data: Path) -> None:
    (data / "train/dog").mkdir()


def a_class_of_text_only(data: Path) -> None:
    (data / "train/dog").mkdir()
    (data / "train/dog/notes.txt").write_text("no image here")


def a_jpeg_named_txt(data: Path) -> None:
    (data / "train/ant/00000.jpg").rename(data / "train/ant/00000.txt")


def two_files_with_one_key(data: Path) -> None:
    (data / "train/ant/00000.png").write_bytes(image_bytes(1, "PNG"))


def two_keys_made_equal_by_dots(data: Path) -> None:
    (data / "train/ant/a.b.jpg").write_bytes(image_bytes(1))
    (data / "train/ant/a_b.jpg").write_bytes(image_bytes(2))


def a_stranger_in_val(data: Path) -> None:
    make_tree(data / "val", {"zebra": 1})


def an_image_without_a_class(data: Path) -> None:
    (data / "train/loose.jpg").write_bytes(image_bytes(1))


def a_dead_link(data: Path) -> None:
    (data / "train/ant/gone.jpg").symlink_to("/nowhere/at/all.jpg")


def a_loop_of_links(data: Path) -> None:
    (data / "train/ant/again").symlink_to(data / "train/ant")


def two_names_of_one_split(data: Path) -> None:
    shutil.copytree(data / "val", data / "validation")


def a_name_that_is_not_utf8(data: Path) -> None:
    with open(os.fsencode(data / "train/ant") + b"/\xff.jpg", "wb") as file:
        file.write(image_bytes(1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (an_empty_class, ["train/dog", "has no images", "remove it"]),
        (a_class_of_text_only, ["train/dog", "has no images"]),
        (a_jpeg_named_txt, ["train/ant/00000.txt", "JPG image", "rename it"]),
        (two_files_with_one_key, ["ant/00000.jpg", "ant/00000.png", "key 'ant/00000'", "rename or remove"]),
        (two_keys_made_equal_by_dots, ["ant/a.b.jpg", "ant/a_b.jpg", "key 'ant/a_b'"]),
        (a_stranger_in_val, ["val", "zebra", "training split"]),
        (an_image_without_a_class, ["train", "loose.jpg", "outside of any class"]),
        (a_dead_link, ["gone.jpg", "leads nowhere"]),
        (a_loop_of_links, ["again", "back to a folder above"]),
        (two_names_of_one_split, ["val/ and validation/", "'val' split"]),
        (a_name_that_is_not_utf8, ["not UTF-8", "rename"]),
    ],
)
def test_a_folder_that_is_not_as_it_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Break, words: list[str]
) -> None:
    data = make_dataset(tmp_path / "pets")
    spoil(data)
    sentence = refused(capsys, 2, "data", "convert", data, tmp_path / "out")
    assert all(word in sentence for word in words), sentence
    assert nothing_written(tmp_path / "out")


def test_a_source_that_is_not_there_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"hello")
    for where in ("missing", "empty", "file.bin"):
        assert where in refused(capsys, 2, "data", "convert", tmp_path / where, tmp_path / "out")
    assert "no class folders" in refused(
        capsys, 2, "data", "convert", tmp_path / "empty", tmp_path / "out", "--source", "folder"
    )
    assert nothing_written(tmp_path / "out")


def test_a_source_that_is_not_what_it_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    for kind in ("imagenet", "cifar10", "mnist", "shards"):
        sentence = refused(capsys, 2, "data", "convert", data, tmp_path / "out", "--source", kind)
        assert "pets" in sentence
    assert "did you mean 'folder'" in refused(
        capsys, 2, "data", "convert", data, tmp_path / "out", "--source", "folders"
    )


def test_truncated_archives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_imagenet(tmp_path / "imagenet")
    tar = tmp_path / "imagenet/ILSVRC2012_img_train.tar"
    tar.write_bytes(tar.read_bytes()[:-15_000])
    sentence = refused(capsys, 2, "data", "convert", tmp_path / "imagenet", tmp_path / "out")
    assert "ILSVRC2012_img_train.tar" in sentence
    assert "truncated" in sentence
    make_cifar10(tmp_path / "cifar")
    (archive,) = (tmp_path / "cifar").glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-500])
    assert archive.name in refused(capsys, 2, "data", "convert", archive, tmp_path / "out")
    assert nothing_written(tmp_path / "out")


@pytest.mark.parametrize("cut", [3_000, 1_024])
def test_a_truncated_shard_as_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    """With its manifest and without, also when the cut falls between two samples."""
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "first") == 0
    (shard,) = (tmp_path / "first/train").glob("*.tar")
    shard.write_bytes(shard.read_bytes()[:-cut])
    sentence = refused(capsys, 2, "data", "convert", tmp_path / "first", tmp_path / "out")
    assert shard.name in sentence
    assert "the manifest says" in sentence
    (tmp_path / "first/train/manifest.json").unlink()
    sentence = refused(capsys, 2, "data", "convert", tmp_path / "first/train", tmp_path / "out")
    assert shard.name in sentence
    assert "truncated at byte" in sentence
    assert nothing_written(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--format", "zip"], "unknown format 'zip'"),
        (["--shard-size", "huge"], "expected a size"),
        (["--shard-size", "0"], "--shard-size"),
        (["--shard-samples", "0"], "--shard-samples"),
        (["--limit", "-1"], "--limit"),
        (["--seed", "-1"], "--seed"),
        (["--jobs", "many"], "--jobs"),
        (["--quality", "101"], "--quality"),
        (["--max-side", "0"], "--max-side"),
        (["--prefix", "a/b"], "--prefix"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    data = make_dataset(tmp_path / "pets")
    assert word in refused(capsys, 2, "data", "convert", data, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


# --- Destinations


def test_a_destination_with_another_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), out) == 0
    before = digests(out)
    other = make_tree(tmp_path / "other", {"x": 3})
    sentence = refused(capsys, 2, "data", "convert", other, out)
    assert "already holds another dataset: pets, 30 samples of train" in sentence
    sentence = refused(capsys, 2, "data", "convert", tmp_path / "pets", out, "--seed", 1)
    assert "already holds another dataset" in sentence
    assert digests(out) == before


def test_a_destination_inside_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    for inside in (data, data / "shards", data / "train/../deep/er"):
        assert "inside the source" in refused(capsys, 2, "data", "convert", data, inside)


def test_labels_that_no_index_can_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = FORMATS.get("tfrecord")
    chunks = records.encode(Sample("a", image_bytes(1), "jpg", 2**40)).chunks
    (tmp_path / "x-train-0.tfrecord").write_bytes(b"".join(map(bytes, chunks)))
    assert "labels of 'train' run from" in refused(
        capsys, 2, "data", "convert", tmp_path, tmp_path.parent / "out-labels"
    )
    assert stoker("data", "verify", tmp_path) == 2
    assert "label is 1099511627776" in capsys.readouterr().out


def test_a_destination_with_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "thesis.tex" in refused(capsys, 2, "data", "convert", make_dataset(tmp_path / "pets"), out)
    assert digests(out).keys() == {"thesis.tex"}


def test_a_destination_with_an_unfinished_other_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    data = make_dataset(tmp_path / "pets")
    (out / "_work").mkdir(parents=True)
    (out / "_work/plan.json").write_text('{"plan": "another"}')
    assert "unfinished conversion" in refused(capsys, 2, "data", "convert", data, out)


def test_a_destination_that_is_a_file_or_read_only_web(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    (tmp_path / "file").write_text("x")
    assert "file" in refused(capsys, 2, "data", "convert", data, tmp_path / "file")
    assert "read-only" in refused(capsys, 2, "data", "convert", data, "http://127.0.0.1:9/x")
    assert "ftp" in refused(capsys, 2, "data", "convert", data, "ftp://host/x")


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="needs setpriv to leave root")
def test_a_folder_without_permission(tmp_path: Path) -> None:
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
    """Mount a tmpfs with these limits, if this machine lets us."""
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


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "pets", train=100)
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        sentence = refused(capsys, 5, "data", "convert", data, disk / "out")
        assert "only 2" in sentence
        assert "KiB are free" in sentence
        assert nothing_written(disk / "out")


def test_a_disk_that_fills_up_on_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files run out before bytes do, so only the write itself can tell; the same command then goes on."""
    data = make_dataset(tmp_path / "pets", train=100)
    assert stoker("data", "convert", data, tmp_path / "whole", "--shard-samples", 10) == 0
    with small_disk(tmp_path / "disk", "size=64m,nr_inodes=40") as disk:
        command = ("data", "convert", data, disk / "out", "--shard-samples", 10)
        sentence = refused(capsys, 5, *command)
        assert "no space left" in sentence
        assert "run the same command again" in sentence
        whole = digests(tmp_path / "whole")
        shards = {name: digest for name, digest in digests(disk / "out").items() if name.endswith(".tar")}
        assert shards
        assert all(whole[name] == digest for name, digest in shards.items())
        assert not list(disk.rglob("manifest.json"))
        assert not list(disk.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,nr_inodes=4000", str(disk)], check=True)
        assert stoker(*command) == 0
        assert digests(disk / "out") == whole


def test_an_image_that_changes_under_our_hands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.errors import SourceError
    from stoker.shards.sources.folder import FolderSource

    source = FolderSource(str(make_dataset(tmp_path / "pets")), scratch=tmp_path)
    item = next(iter(source.scan("train")))
    (tmp_path / "pets/train" / item.name).write_bytes(b"shorter")
    with pytest.raises(SourceError, match="changed while it was converted"):
        source.read("train", item)
    (tmp_path / "pets/train" / item.name).unlink()
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        source.read("train", item)
