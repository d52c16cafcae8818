"""Images that cannot be read are quarantined; errors that affect many images are not."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.images import BadImageError
from stoker.shards.pack import MAX_UNREADABLE
from stoker.shards.sources.folder import FolderSource
from tests.shards.test_bad_input import run_and_fail
from tests.shards.test_convert import read_shard_set
from tests.support.trees import make_dataset, make_tree, stoker


def read_quarantine(out: Path, split: str = "train") -> dict[str, str]:
    """Return the reason of each quarantined image by name."""
    path = out / split / "quarantine.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["name"]: line["reason"] for line in lines}


def test_links_and_special_files_are_quarantined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = make_dataset(tmp_path / "pets"), tmp_path / "out"
    assert stoker("data", "convert", data, tmp_path / "plain") == 0
    (data / "train/ant/gone.jpg").symlink_to("/nowhere/at/all.jpg")
    (data / "train/ant/self.jpg").symlink_to("self.jpg")
    os.mkfifo(data / "train/bee/pipe.png")
    (data / "train/bee/gone.txt").symlink_to("/nowhere/notes.txt")
    (data / "train/cat/again").symlink_to(data / "train/cat")
    (data / "train/cat/all").symlink_to(data)
    (data / "train/dog").symlink_to("/nowhere/dog")
    capsys.readouterr()
    assert stoker("data", "convert", data, out) == 0
    captured = capsys.readouterr()
    assert "3 bad images" in captured.err
    assert "2 × link to a parent directory" in captured.err
    assert str(data / "train/dog") in captured.err
    assert list(read_quarantine(out)) == ["ant/gone.jpg", "ant/self.jpg", "bee/pipe.png"]
    assert "broken symbolic link" in read_quarantine(out)["ant/gone.jpg"]
    assert read_shard_set(out / "train") == read_shard_set(tmp_path / "plain/train")
    assert stoker("data", "verify", out) == 0
    assert stoker("data", "convert", data, out) == 0  # the same source again


def test_image_without_permission_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = make_dataset(tmp_path / "pets"), tmp_path / "out"
    open_file = os.open

    def open_unless_forbidden(path: str, *args: int) -> int:
        if str(path).endswith("00003.jpg"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, *args)

    (data / "train/ant/00003.jpg").chmod(0)
    monkeypatch.setattr(os, "open", open_unless_forbidden)  # the tests may run as root, who may read everything
    assert stoker("data", "convert", data, out) == 0
    assert read_quarantine(out) == {"ant/00003.jpg": f"cannot read: {os.strerror(errno.EACCES)}"}


def test_share_that_denies_access_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files whose own mode permits reading are denied: the share is at fault, not the file."""
    data, out = make_tree(tmp_path / "pets", {"ant": 20}), tmp_path / "out"
    open_file, opened = os.open, set[str]()

    def open_first_files(path: str, *args: int) -> int:
        if str(path).endswith(".jpg"):
            if len(opened) >= 10:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            opened.add(path)
        return open_file(path, *args)

    monkeypatch.setattr(os, "open", open_first_files)
    assert os.strerror(errno.EACCES) in run_and_fail(capsys, 2, "data", "convert", data, out, "--jobs", 1)
    assert not (out / "train/manifest.json").exists()


@pytest.mark.parametrize("siblings", [True, False])
def test_forbidden_file_is_quarantined_only_if_a_sibling_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: bool
) -> None:
    data = make_dataset(tmp_path / "pets")
    source = FolderSource(str(data), scratch=tmp_path)
    item = next(iter(source.scan("train")))
    (data / "train" / item.name).chmod(0)
    open_file = os.open

    def deny(path: str, *args: int) -> int:
        if not siblings or str(path).endswith(item.name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, *args)

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(BadImageError if siblings else SourceError):
        source.read("train", item)


@pytest.mark.parametrize("count", [MAX_UNREADABLE, MAX_UNREADABLE + 1])
def test_many_unreadable_images_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    data, out = make_dataset(tmp_path / "pets", train=60), tmp_path / "out"
    for number in range(count):
        (data / f"train/ant/link{number}.jpg").symlink_to("/nowhere.jpg")
    if count <= MAX_UNREADABLE:
        assert stoker("data", "convert", data, out) == 0
        assert len(read_quarantine(out)) == count
        return
    sentence = run_and_fail(capsys, 2, "data", "convert", data, out, "--shard-samples", 16, "--jobs", 1)
    assert str(count) in sentence
    assert "ant/link" in sentence
    again = run_and_fail(capsys, 2, "data", "convert", data, out, "--shard-samples", 16, "--jobs", 1)
    assert str(count) in again  # finished shards of the first run count too
    for number in range(count):
        (data / f"train/ant/link{number}.jpg").unlink()
        (data / f"train/ant/link{number}.jpg").write_bytes(b"no image")
    assert stoker("data", "convert", data, out, "--restart") == 0  # any number of damaged images is quarantined
    assert len(read_quarantine(out)) == count


def test_deleted_image_is_an_error(tmp_path: Path) -> None:
    source = FolderSource(str(make_dataset(tmp_path / "pets")), scratch=tmp_path)
    first, second, *_ = source.scan("train")
    (tmp_path / "pets/train" / first.name).unlink()
    with pytest.raises(SourceError, match=first.name):
        source.read("train", first)
    shutil.rmtree(tmp_path / "pets/train/ant")
    with pytest.raises(SourceError, match=second.name):
        source.read("train", second)


def test_link_whose_target_disappears_during_the_conversion_is_an_error(tmp_path: Path) -> None:
    """The target may be on a share that was unmounted, with many others."""
    data = make_dataset(tmp_path / "pets")
    image = data / "train/ant/00000.jpg"
    image.rename(tmp_path / "target.jpg")
    image.symlink_to(tmp_path / "target.jpg")
    source = FolderSource(str(data), scratch=tmp_path)
    item = next(iter(source.scan("train")))
    (tmp_path / "target.jpg").unlink()
    with pytest.raises(SourceError, match=item.name):
        source.read("train", item)


def test_failing_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FolderSource(str(make_dataset(tmp_path / "pets")), scratch=tmp_path)
    item = next(iter(source.scan("train")))

    def fail(fd: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(SourceError, match=item.name):
        source.read("train", item)


class FailingEntry:
    """An entry of a folder that cannot be followed, as on a mount whose server is gone."""

    def __init__(self, entry: os.DirEntry[str], code: int) -> None:
        self.name, self.path = entry.name, entry.path
        self._code = code

    def __fspath__(self) -> str:
        return self.path

    def is_symlink(self) -> bool:
        return True

    def is_dir(self) -> bool:
        raise OSError(self._code, os.strerror(self._code))

    is_file = is_dir

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        if follow_symlinks:
            raise OSError(self._code, os.strerror(self._code))
        return os.lstat(self.path)


def break_entry(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Make every attempt to follow the entries with this name fail."""
    scandir = os.scandir

    @contextmanager
    def scan_with_failure(path: str) -> Iterator[list[os.DirEntry[str] | FailingEntry]]:
        with scandir(path) as entries:
            yield [FailingEntry(entry, code) if entry.name == name else entry for entry in entries]

    monkeypatch.setattr(os, "scandir", scan_with_failure)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EACCES])
@pytest.mark.parametrize("name", ["bee", "00001.jpg", "notes.txt"])
def test_entry_on_a_failed_mount_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Without permission, one image is quarantined and one other file skipped, but no class is left out."""
    data = make_tree(tmp_path / "pets", {"ant": 3, "bee": 3, "cat": 3})
    (data / "ant/notes.txt").write_text("text")
    break_entry(monkeypatch, name, code)
    assert FolderSource.can_read(str(data))
    if code == errno.EACCES and name != "bee":
        sizes = [item.size for item in FolderSource(str(data), scratch=tmp_path).scan("train")]
        assert (len(sizes), sizes.count(0)) == (9, 1 if name == "00001.jpg" else 0)
    else:
        with pytest.raises(SourceError, match=f"{name}: .*{os.strerror(code)}"):
            list(FolderSource(str(data), scratch=tmp_path).scan("train"))


def test_unreadable_image_on_a_failed_mount_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was broken at the scan must not hide that the mount failed since."""
    data = make_tree(tmp_path / "pets", {"ant": 3})
    (data / "ant/00000.jpg").unlink()
    (data / "ant/00000.jpg").symlink_to("/nowhere.jpg")
    source = FolderSource(str(data), scratch=tmp_path)
    item = next(iter(source.scan("train")))

    def fail(path: str) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        with pytest.raises(SourceError, match=item.name):
            source.read("train", item)


def test_class_that_is_a_loop_of_links_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    (data / "train/bat").symlink_to("bat")
    assert "train/bat: " in run_and_fail(capsys, 2, "data", "convert", data, tmp_path / "out")
