import os
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.sources.folder import FolderSource
from tests.support.trees import image_bytes, make_dataset, make_tree


def opened(where: object) -> FolderSource:
    return FolderSource(str(where), scratch=Path("/nowhere"))


def test_a_class_that_is_not_utf8(tmp_path: Path) -> None:
    make_tree(tmp_path, {"ant": 1})
    (tmp_path / os.fsdecode(b"b\xff")).mkdir()
    with pytest.raises(SourceError, match="is not UTF-8") as caught:
        opened(tmp_path)
    str(caught.value).encode()


def test_names_that_a_terminal_would_obey_are_quoted(tmp_path: Path) -> None:
    make_tree(tmp_path, {"ant": 1, "b\x1b[2J": 0})
    with pytest.raises(SourceError, match="no images") as caught:
        list(opened(tmp_path).scan("train"))
    assert "\x1b" not in str(caught.value)
    assert "b\\x1b[2J" in str(caught.value)


def test_folders_beside_the_splits_are_told(tmp_path: Path) -> None:
    make_tree(make_dataset(tmp_path) / "dev", {"ant": 1})
    assert opened(tmp_path).notes == ("left out the folder dev beside train",)
    (tmp_path / "extra").mkdir()
    (tmp_path / "train/ant/notes.txt").write_text("some")
    source = opened(tmp_path)
    assert source.splits == ("train", "val")
    assert len(list(source.scan("train"))) == 30
    assert source.notes == (
        "left out the folders dev, extra beside train",
        "left out 1 files that are not images: 1 × .txt",
    )


def test_a_class_called_train(tmp_path: Path) -> None:
    source = opened(make_tree(tmp_path, {"bus": 1, "car": 2, "train": 3}))
    assert (source.splits, source.classes) == (("train",), ("bus", "car", "train"))
    assert [item.label for item in source.scan("train")] == [0, 1, 1, 2, 2, 2]
    assert source.notes == ()


def test_splits_without_classes_are_no_classes(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="outside of any class"):
        opened(make_tree(tmp_path, {"train": 3, "val": 2}))


def test_a_flat_test_folder_is_left_out(tmp_path: Path) -> None:
    make_tree(make_dataset(tmp_path), {"test": 2})
    source = opened(tmp_path)
    assert source.splits == ("train", "val")
    assert source.notes == ("left out the folder test: it has no class folders",)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(make_tree(tmp_path, {"ant": 1}))
    (item,) = source.scan("train")
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 100)))
    assert source.read("train", item).image == image_bytes(0)
    with pytest.raises(SourceError, match="changed"):
        source.read("train", item._replace(size=item.size + 1))
    with pytest.raises(SourceError, match="changed"):
        source.read("train", item._replace(size=item.size - 1))


def test_a_file_url_and_what_is_no_folder(tmp_path: Path) -> None:
    make_tree(tmp_path / "my pets", {"ant": 1})
    url = (tmp_path / "my pets").as_uri()
    assert "%20" in url
    assert FolderSource.can_read(url)
    source = opened(url)
    assert source.name == "my pets"
    assert len(list(source.scan("train"))) == 1
    for other in ("s3://bucket/pets", "file://host/pets", "a\0b", str(tmp_path / "none")):
        assert not FolderSource.can_read(other)


def test_the_stamp_is_the_time_of_change(tmp_path: Path) -> None:
    source = opened(make_tree(tmp_path, {"ant": 1}))
    os.utime(tmp_path / "ant/00000.jpg", ns=(1, 1_234_567_890_123))
    (item,) = source.scan("train")
    assert item.stamp == 1_234_567_890_123
