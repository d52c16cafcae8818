"""Class folders in a tar."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.shards.sources import detect_source
from stoker.shards.sources.folder import FolderSource
from stoker.shards.sources.folder_tar import PEEKED_FILES, FolderTarSource
from tests.shards.test_bad_input import run_and_fail
from tests.shards.test_convert import read_shard_set
from tests.support.trees import digests, image_bytes, make_dataset, make_tree, stoker


def archive(folder: Path, path: Path, top: str = "") -> Path:
    """Write the content of a folder to a tar, compressed if its name says so, below a top folder."""
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for entry in sorted(folder.iterdir(), reverse=True):
            tar.add(entry, f"{top}{entry.name}")
    return path


def archive_files(path: Path, files: dict[str, bytes]) -> Path:
    """Write a tar with these files."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
@pytest.mark.parametrize("top", ["", "./", "pets/", "data/pets/"])
def test_tar_is_read_like_its_folder(tmp_path: Path, suffix: str, top: str) -> None:
    data = make_dataset(tmp_path / "pets")
    tar = archive(data, tmp_path / f"pets{suffix}", top)
    assert detect_source(str(tar)) == "folder-tar"
    assert stoker("data", "convert", data, tmp_path / "plain") == 0
    assert stoker("data", "convert", tar, tmp_path / "out") == 0
    for split in ("train", "val"):
        assert read_shard_set(tmp_path / "out" / split) == read_shard_set(tmp_path / "plain" / split)
        manifest = json.loads((tmp_path / "out" / split / "manifest.json").read_text())
        assert (manifest["name"], manifest["classes"]) == ("pets", ["ant", "bee", "cat"])


def test_tar_of_classes_without_splits(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "pets", {"bus": 3, "car": 2, "train": 4})
    assert stoker("data", "convert", archive(data, tmp_path / "pets.tar"), tmp_path / "out") == 0
    samples = read_shard_set(tmp_path / "out/train")
    assert sorted(label for _, label, _ in samples.values()) == [0] * 3 + [1] * 2 + [2] * 4
    assert stoker("data", "convert", tmp_path / "pets.tar", tmp_path / "two", "--val-fraction", 0.3) == 0
    assert len(read_shard_set(tmp_path / "two/val")) == 3


def test_same_bytes_again(tmp_path: Path) -> None:
    tar = archive(make_dataset(tmp_path / "pets"), tmp_path / "pets.tar")
    for jobs in (1, 4):
        assert stoker("data", "convert", tar, tmp_path / f"out{jobs}", "--shard-samples", 7, "--jobs", jobs) == 0
    assert digests(tmp_path / "out1") == digests(tmp_path / "out4")


def test_other_files_are_skipped_and_bad_images_quarantined(tmp_path: Path) -> None:
    files = {f"pets/ant/{i}.jpg": image_bytes(i) for i in range(5)}
    extra = {"pets/README.md": b"text", "pets/ant/._1.jpg": b"resource fork", "pets/ant/bad.jpg": b"no image"}
    tar = archive_files(tmp_path / "pets.tar", files | extra)
    source = FolderTarSource(str(tar), scratch=tmp_path)
    assert [item.name for item in source.scan("train")] == [f"ant/{i}.jpg" for i in range(5)] + ["ant/bad.jpg"]
    note = source.notes[-1]
    assert "1 × hidden" in note
    assert "1 × .md" in note
    source.close()
    assert stoker("data", "convert", tar, tmp_path / "out") == 0
    assert json.loads((tmp_path / "out/train/manifest.json").read_text())["quarantined"] == 1


def test_webdataset_shards_are_not_class_folders(tmp_path: Path) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "shards") == 0
    shard = tmp_path / "shards/train/pets-train-000000.tar"
    assert detect_source(str(shard)) == "shards"
    late = {f"a/{i}.txt": b"text" for i in range(PEEKED_FILES)} | {"a/z.jpg": image_bytes(1), "a/z.cls": b"0"}
    assert not FolderTarSource.can_read(str(archive_files(tmp_path / "x.tar", late)))
    with pytest.raises(SourceError, match=r"\.cls"):
        FolderTarSource(str(shard), scratch=tmp_path)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"train/ant/1.jpg": image_bytes(1), "val/zebra/2.jpg": image_bytes(2)}, "zebra"),
        ({"ant/1.jpg": image_bytes(1), "2.jpg": image_bytes(2)}, "2.jpg"),
        ({"ant/1.jpg": image_bytes(1), "ant/../../2.jpg": image_bytes(2)}, "'..'"),
        ({"ant/1.jpg": image_bytes(1), "ant/unnamed": image_bytes(2)}, "ant/unnamed"),
        ({"ant/1.jpg": image_bytes(1), "./ant/1.jpg": image_bytes(2)}, "ant/1"),
    ],
)
def test_invalid_archives_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, bytes], part: str
) -> None:
    tar = archive_files(tmp_path / "pets.tar", files)
    assert part in run_and_fail(capsys, 2, "data", "convert", tar, tmp_path / "out")


def test_links_and_truncated_archives_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "pets")
    (data / "train/ant/link.jpg").symlink_to("00000.jpg")
    tar = archive(data, tmp_path / "pets.tar")
    assert "--dereference" in run_and_fail(capsys, 2, "data", "convert", tar, tmp_path / "out")
    (data / "train/ant/link.jpg").unlink()
    for name in ("cut.tar", "cut.tar.gz"):
        tar = archive(data, tmp_path / name)
        tar.write_bytes(tar.read_bytes()[:-12_000])
        assert "truncated" in run_and_fail(capsys, 2, "data", "convert", tar, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["xml", "json"])
def test_annotations_next_to_images_are_not_labels(tmp_path: Path, kind: str) -> None:
    files = {
        f"pets/{name}/{i}.{extension}": content
        for name in ("cat", "dog")
        for i in range(3)
        for extension, content in (("jpg", image_bytes(i)), (kind, b"annotation"))
    }
    tar = archive_files(tmp_path / "pets.tar", files)
    assert detect_source(str(tar)) == "folder-tar"
    assert read_source(FolderTarSource(str(tar), scratch=tmp_path))[0] == ["cat", "dog"]


def test_many_other_files_before_the_first_image(tmp_path: Path) -> None:
    files = {f"pets/docs{i}.md": b"text" for i in range(PEEKED_FILES + 1)} | {"pets/cat/1.jpg": image_bytes(1)}
    assert detect_source(str(archive_files(tmp_path / "pets.tar", files))) == "folder-tar"


def test_tar_without_labels_suggests_class_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tar = archive_files(tmp_path / "pets.tar", {"1.jpg": image_bytes(1), "cat/2.jpg": image_bytes(2)})
    sentence = run_and_fail(capsys, 2, "data", "convert", tar, tmp_path / "out", "--source", "shards")
    assert "--source folder-tar" in sentence


def read_source(source: FolderSource | FolderTarSource) -> tuple[list[str], dict[str, list[tuple[str, int, bytes]]]]:
    """Return the classes of a source, and its items by split."""
    items = {
        split: sorted((item.name, item.label, bytes(source.read(split, item).image)) for item in source.scan(split))
        for split in source.splits
    }
    source.close()
    return list(source.classes), items


LAYOUTS = {
    "classes": ["ant/1.jpg", "bee/2.jpg"],
    "one class": ["ant/1.jpg", "ant/2.jpg"],
    "one class with subfolders": ["cat/a/1.jpg", "cat/b/2.jpg"],
    "one class with images and subfolders": ["cat/1.jpg", "cat/b/2.jpg"],
    "one class with deep subfolders": ["cat/a/b/1.jpg", "cat/a/c/2.jpg"],
    "class with the name of a split": ["bus/1.jpg", "car/2.jpg", "train/3.jpg"],
    "splits": ["train/ant/1.jpg", "train/bee/2.jpg", "val/bee/3.jpg"],
    "one split": ["train/ant/1.jpg", "train/bee/2.jpg"],
    "one class in splits": ["train/ant/1.jpg", "val/ant/2.jpg"],
    "splits with subfolders": ["train/ant/x/1.jpg", "train/ant/y/2.jpg"],
    "splits and other files": ["README.md", "docs/a.txt", "train/ant/1.jpg", "val/ant/2.jpg"],
}


@pytest.mark.parametrize("top", ["pets/", "./pets/", "."])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_folder_and_tar_have_the_same_classes_and_items(tmp_path: Path, layout: str, top: str) -> None:
    """As `tar cf pets.tar pets/`, `./pets/` and, in the folder, `.` write it."""
    data = tmp_path / "pets"
    for number, name in enumerate(LAYOUTS[layout]):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(image_bytes(number) if name.endswith(".jpg") else b"text")
    with tarfile.open(tmp_path / "pets.tar", "w") as tar:
        tar.add(data, top)
    folder = read_source(FolderSource(str(data), scratch=tmp_path))
    assert read_source(FolderTarSource(str(tmp_path / "pets.tar"), scratch=tmp_path)) == folder


@pytest.mark.parametrize("top", ["pets/", "."])
@pytest.mark.parametrize("empty", ["train/bat", "val/bat", "train/ant2/sub"])
def test_empty_class_is_rejected_as_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: str, top: str
) -> None:
    data = make_dataset(tmp_path / "pets")
    (data / "train/bat").mkdir()
    if not empty.startswith("train/bat"):
        (data / "train/bat/1.jpg").write_bytes(image_bytes(1))
    (data / empty).mkdir(parents=True, exist_ok=True)
    with tarfile.open(tmp_path / "pets.tar", "w") as tar:
        tar.add(data, top)
    class_folder = "/".join(empty.split("/")[:2])
    for source in (data, tmp_path / "pets.tar"):
        sentence = run_and_fail(capsys, 2, "data", "convert", source, tmp_path / "out")
        assert re.search(rf"{class_folder}\)?: .*no images", sentence)
