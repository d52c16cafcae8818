import os
import re
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.sources.folder import FolderSource
from tests.support.trees import image_bytes, make_dataset, make_tree


def open_folder(where: object) -> FolderSource:
    return FolderSource(str(where), scratch=Path("/nowhere"))


def test_class_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    make_tree(tmp_path, {"ant": 1})
    (tmp_path / os.fsdecode(b"b\xff")).mkdir()
    with pytest.raises(SourceError, match="UTF-8") as caught:
        open_folder(tmp_path)
    str(caught.value).encode()


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    make_tree(tmp_path, {"ant": 1, "b\x1b[2J": 0})
    with pytest.raises(SourceError, match="no images") as caught:
        list(open_folder(tmp_path).scan("train"))
    assert "\x1b" not in str(caught.value)
    assert "b\\x1b[2J" in str(caught.value)


def test_folders_next_to_the_splits_are_noted(tmp_path: Path) -> None:
    make_tree(make_dataset(tmp_path) / "dev", {"ant": 1})
    (note,) = open_folder(tmp_path).notes
    assert re.search(r"^skipped .* dev .*\btrain$", note)
    (tmp_path / "extra").mkdir()
    (tmp_path / "train/ant/notes.txt").write_text("some")
    source = open_folder(tmp_path)
    assert source.splits == ("train", "val")
    assert len(list(source.scan("train"))) == 30
    folders, files = source.notes
    assert re.search(r"^skipped .* dev, extra .*\btrain$", folders)
    assert re.search(r"^skipped 1 file\b.*not an image: 1 × \.txt$", files)


def test_class_named_train(tmp_path: Path) -> None:
    source = open_folder(make_tree(tmp_path, {"bus": 1, "car": 2, "train": 3}))
    assert (source.splits, source.classes) == (("train",), ("bus", "car", "train"))
    assert [item.label for item in source.scan("train")] == [0, 1, 1, 2, 2, 2]
    assert source.notes == ()


def test_splits_without_class_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"train: 00000\.jpg, .*class folder; move "):
        open_folder(make_tree(tmp_path, {"train": 3, "val": 2}))


def test_test_folder_without_classes_is_skipped(tmp_path: Path) -> None:
    make_tree(make_dataset(tmp_path), {"test": 2})
    source = open_folder(tmp_path)
    assert source.splits == ("train", "val")
    (note,) = source.notes
    assert re.search(r"^skipped .* test: .*class folders$", note)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_folder(make_tree(tmp_path, {"ant": 1}))
    (item,) = source.scan("train")
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 100)))
    assert source.read("train", item).image == image_bytes(0)
    for size in (item.size + 1, item.size - 1):
        with pytest.raises(SourceError, match=rf"{item.name}: .*\b{size} bytes"):
            source.read("train", item._replace(size=size))


def test_file_urls_and_other_urls(tmp_path: Path) -> None:
    make_tree(tmp_path / "my pets", {"ant": 1})
    url = (tmp_path / "my pets").as_uri()
    assert "%20" in url
    assert FolderSource.can_read(url)
    source = open_folder(url)
    assert source.name == "my pets"
    assert len(list(source.scan("train"))) == 1
    for other in ("s3://bucket/pets", "file://host/pets", "a\0b", str(tmp_path / "none")):
        assert not FolderSource.can_read(other)


def test_stamp_is_the_modification_time(tmp_path: Path) -> None:
    source = open_folder(make_tree(tmp_path, {"ant": 1}))
    os.utime(tmp_path / "ant/00000.jpg", ns=(1, 1_234_567_890_123))
    (item,) = source.scan("train")
    assert item.stamp == 1_234_567_890_123
