import builtins
import errno
import gzip
import io
import os
import re
import shutil
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from stoker.errors import MissingExtraError, NotFoundError, SourceError, StorageFullError
from stoker.shards.images import BadImageError
from stoker.shards.sources.files import DOWNLOAD_AGAIN
from stoker.shards.sources.imagenet import ImagenetSource
from tests.support.datasets import WNIDS_BY_ID, Expected, Imagenet, jpeg, make_imagenet, make_tar, meta_mat
from tests.support.trees import assert_rejected

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
META = "ILSVRC2012_devkit_t12/data/meta.mat"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def check(where: Path, scratch: Path, dataset: Imagenet, splits: tuple[str, ...] = ("train", "val")) -> ImagenetSource:
    """Open `where`, and compare everything with the generated dataset."""
    source = ImagenetSource(str(where), scratch=scratch)
    assert (source.name, tuple(source.splits), list(source.classes)) == ("imagenet", splits, dataset.classes)
    expected: dict[str, Mapping[str, Expected]] = {"train": dataset.train, "val": dataset.val}
    for split in splits:
        items = list(source.scan(split))
        assert items == list(source.scan(split))
        with ThreadPoolExecutor(8) as threads:
            images = list(threads.map(lambda item: source.read(split, item).image, items))  # noqa: B023
        samples = {item.name: Expected(item.label, bytes(image)) for item, image in zip(items, images, strict=True)}
        assert len(samples) == len(items)
        assert samples == expected[split]
        assert all(item.size == len(image) for item, image in zip(items, images, strict=True))
    source.close()
    source.close()
    return source


@pytest.mark.parametrize("layout", ["tars", "class tars", "folders", "kaggle"])
@pytest.mark.parametrize("truth", ["devkit.tar.gz", "devkit", "csv"])
def test_every_layout(tmp_path: Path, scratch: Path, layout: str, truth: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout=layout, truth=truth)
    assert ImagenetSource.can_read(str(dataset.folder))
    assert check(dataset.folder, scratch, dataset).notes == ()
    assert not list(scratch.glob("*img*"))


def test_generated_ids_are_not_in_the_order_of_wnids(tmp_path: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    assert list(WNIDS_BY_ID) != dataset.classes
    assert {image.label for image in dataset.val.values()} == {0, 1, 2, 3}


def test_val_by_class_needs_no_devkit(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="val by class", truth="none")
    check(dataset.folder, scratch, dataset)


def test_folders_named_like_the_tars(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    for split in ("train", "val"):
        (dataset.folder / split).rename(dataset.folder / f"ILSVRC2012_img_{split}")
    check(dataset.folder, scratch, dataset)


def test_train_tar_alone(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    assert ImagenetSource.can_read(str(dataset.folder / TRAIN))
    check(dataset.folder / TRAIN, scratch, dataset, ("train",))


@pytest.mark.parametrize("layout", ["tars", "folders"])
@pytest.mark.parametrize("truth", ["devkit.tar.gz", "csv"])
def test_single_split(tmp_path: Path, scratch: Path, layout: str, truth: str) -> None:
    dataset = make_imagenet(tmp_path / "train only", layout=layout, val=0, truth="none")
    check(dataset.folder, scratch, dataset, ("train",))
    dataset = make_imagenet(tmp_path / "val only", layout=layout, per_class=0, truth=truth)
    check(dataset.folder, scratch, dataset, ("val",))


def test_single_class(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", wnids_by_id=["n01440764"], per_class=1, val=1)
    check(dataset.folder, scratch, dataset)


@pytest.mark.parametrize("compressed", [True, False])
def test_tars_with_gz_extension(tmp_path: Path, scratch: Path, compressed: bool) -> None:
    dataset = make_imagenet(tmp_path / "data")
    for name in (TRAIN, VAL):
        data = (dataset.folder / name).read_bytes()
        (dataset.folder / name).unlink()
        (dataset.folder / f"{name}.gz").write_bytes(gzip.compress(data) if compressed else data)
    assert ImagenetSource.can_read(str(dataset.folder))
    check(dataset.folder, scratch, dataset)
    assert len(list(scratch.glob("*img*"))) == (2 if compressed else 0)


def test_tar_is_preferred_over_folder_with_a_note(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    (dataset.folder / "train" / "n01440764").mkdir(parents=True)
    (dataset.folder / "val").mkdir()
    source = check(dataset.folder, scratch, dataset)
    (note,) = source.notes
    assert re.match(rf"train: .*{TRAIN}.*\btrain$", note)


def test_other_files_are_skipped_and_counted(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    for stray in (
        "train/n01440764/notes.txt",
        "train/n01440764/.hidden.JPEG",
        "val/list.txt",
        "train/readme.md",
    ):
        (dataset.folder / stray).write_text("x")
    source = check(dataset.folder, scratch, dataset)
    assert [note.partition(":")[0] for note in source.notes] == ["train", "val"]
    assert all(" 1 file " in note for note in source.notes)


def test_other_files_inside_tars_are_skipped(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="class tars", val=0, truth="none")
    path = dataset.folder / "train" / "n01440764.tar"
    with tarfile.open(path, "a") as tar:
        for name in ("._n01440764_1.JPEG", "notes.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert " 2 files" in check(dataset.folder, scratch, dataset, ("train",)).notes[0]


def test_read_without_scan(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="class tars", truth="csv")
    items = list(ImagenetSource(str(dataset.folder), scratch=scratch).scan("val"))
    other = ImagenetSource(str(dataset.folder), scratch=scratch)
    assert [other.read("val", item).image for item in items] == [image.image for image in dataset.val.values()]


# Damaged datasets


def test_truncated_train_tar(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", truth="none", val=0)
    path = dataset.folder / TRAIN
    whole = path.read_bytes()
    inner = len(make_tar({f"n01000000_{number}.JPEG": jpeg(number) for number in range(3)}))
    path.write_bytes(whole[: 512 + inner // 2])
    assert_rejected(
        ImagenetSource,
        path,
        scratch,
        TRAIN,
        f"truncated at byte {512 + inner // 2}",
        "'n01000000.tar'",
        f"{inner} bytes at offset 512",
        DOWNLOAD_AGAIN,
    )
    end = 4 * (512 + inner)
    # All members are complete, but without the end-of-archive block there may have been more.
    for size, part in ((end, "end-of-archive"), (end + 100, f"header at byte {end} ")):
        path.write_bytes(whole[:size])
        assert_rejected(ImagenetSource, path, scratch, TRAIN, f"truncated at byte {size}", part, DOWNLOAD_AGAIN)


def test_truncated_class_tar(tmp_path: Path, scratch: Path) -> None:
    images = {f"n01440764_{number}.JPEG": jpeg(number) for number in range(3)}
    inner = make_tar(images)
    end = sum(512 + -(-len(image) // 512) * 512 for image in images.values())
    for size, part in ((700, "'n01440764_0.JPEG'"), (end, "end-of-archive")):
        path = tmp_path / TRAIN
        path.write_bytes(make_tar({"n01440764.tar": inner[:size]}))
        assert_rejected(
            ImagenetSource, path, scratch, f"{TRAIN} (n01440764.tar)", f"truncated at byte {512 + size}", part
        )


def test_truncated_val_tar(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    path = dataset.folder / VAL
    path.write_bytes(path.read_bytes()[:3000])
    assert_rejected(ImagenetSource, dataset.folder, scratch, VAL, "truncated at byte 3000")


def test_file_that_is_not_a_tar(tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / TRAIN
    path.write_bytes(b"<html>please log in</html>" * 100)
    assert_rejected(ImagenetSource, path, scratch, TRAIN, "header at byte 0", "checksum")
    path.write_bytes(b"")
    assert_rejected(ImagenetSource, path, scratch, TRAIN, "truncated")
    path.write_bytes(make_tar({}))
    assert_rejected(ImagenetSource, path, scratch, TRAIN, "no class tars")


@pytest.mark.parametrize("name", ["readme.txt", "ILSVRC2012_val_00000001.JPEG", "cat.tar"])
def test_train_tar_with_another_member(tmp_path: Path, scratch: Path, name: str) -> None:
    path = tmp_path / TRAIN
    path.write_bytes(make_tar({"n01440764.tar": make_tar({"n01440764_1.JPEG": jpeg(1)}), name: b"x"}))
    assert_rejected(ImagenetSource, path, scratch, TRAIN, repr(name), "class")


def test_truncated_gzip(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", val=0, truth="none")
    data = gzip.compress((dataset.folder / TRAIN).read_bytes())
    (dataset.folder / TRAIN).write_bytes(data[: len(data) // 2])
    assert_rejected(ImagenetSource, dataset.folder, scratch, TRAIN, "truncated gzip", DOWNLOAD_AGAIN)


def test_full_disk(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_imagenet(tmp_path / "data", val=0, truth="none")
    (dataset.folder / TRAIN).write_bytes(gzip.compress((dataset.folder / TRAIN).read_bytes()))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StorageFullError, match="TMPDIR") as caught:
        ImagenetSource(str(dataset.folder), scratch=scratch)
    assert caught.value.where == str(scratch)


@pytest.mark.parametrize("inner", [make_tar({}), b"", make_tar({"notes.txt": b"x"})])
def test_empty_class_tar(tmp_path: Path, scratch: Path, inner: bytes) -> None:
    path = tmp_path / TRAIN
    path.write_bytes(make_tar({"n01440764.tar": make_tar({"n01440764_1.JPEG": jpeg(1)}), "n02119789.tar": inner}))
    assert_rejected(ImagenetSource, path, scratch, "class n02119789 has no images")


@pytest.mark.parametrize("layout", ["folders", "val by class", "class tars"])
def test_empty_class_in_a_folder(tmp_path: Path, scratch: Path, layout: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout=layout)
    if layout == "class tars":
        (dataset.folder / "train" / "n01440764.tar").write_bytes(make_tar({}))
    else:
        shutil.rmtree(dataset.folder / "train" / "n01440764")
        (dataset.folder / "train" / "n01440764").mkdir()
    assert_rejected(ImagenetSource, dataset.folder, scratch, "class n01440764 has no images")


@pytest.mark.parametrize("layout", ["tars", "folders"])
@pytest.mark.parametrize("lines", [9, 11])
def test_ground_truth_of_wrong_length(tmp_path: Path, scratch: Path, layout: str, lines: int) -> None:
    dataset = make_imagenet(tmp_path / "data", layout=layout, truth="devkit")
    (dataset.folder / TRUTH).write_text("1\n" * lines)
    assert_rejected(ImagenetSource, dataset.folder, scratch, "10 images", f"{lines} lines", "ground_truth.txt")


@pytest.mark.parametrize("layout", ["tars", "folders"])
def test_gap_in_the_image_numbers(tmp_path: Path, scratch: Path, layout: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout=layout)
    name, other = "ILSVRC2012_val_00000004.JPEG", "ILSVRC2012_val_00000011.JPEG"
    if layout == "folders":
        (dataset.folder / "val" / name).rename(dataset.folder / "val" / other)
        assert_rejected(ImagenetSource, dataset.folder, scratch, f"{name} not found")
    else:
        files = {f"ILSVRC2012_val_{n:08d}.JPEG": jpeg(n) for n in (1, 2, 3, 11, 5, 6, 7, 8, 9, 10)}
        (dataset.folder / VAL).write_bytes(make_tar(files))
        assert_rejected(ImagenetSource, dataset.folder, scratch, f"{other} has no line")


def test_duplicate_val_image(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    names = ("ILSVRC2012_val_00000004.JPEG", "./ILSVRC2012_val_00000004.JPEG")
    (dataset.folder / VAL).write_bytes(make_tar({name: jpeg(1) for name in names}))
    assert_rejected(ImagenetSource, dataset.folder, scratch, "ILSVRC2012_val_00000004.JPEG", "twice")


@pytest.mark.parametrize("layout", ["tars", "folders", "kaggle"])
def test_no_ground_truth(tmp_path: Path, scratch: Path, layout: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout=layout, truth="none")
    assert ImagenetSource.can_read(str(dataset.folder))
    assert_rejected(ImagenetSource, dataset.folder, scratch, DEVKIT, str(dataset.folder), "LOC_val_solution.csv")


@pytest.mark.parametrize("line", ["0", "5", "6", "x", "-1", "9" * 100])
def test_invalid_line_of_ground_truth(tmp_path: Path, scratch: Path, line: str) -> None:
    dataset = make_imagenet(tmp_path / "data", truth="devkit")
    (dataset.folder / TRUTH).write_text("1\n2\n" + line + "\n")  # 5 and 6 are synsets, but not leaves
    assert_rejected(ImagenetSource, dataset.folder, scratch, "line 3 is", "ILSVRC2012_ID")


@pytest.mark.parametrize(
    "data", [b"", b"nonsense" * 50, meta_mat(WNIDS_BY_ID)[:400], meta_mat(["x", "y"]), meta_mat([])]
)
def test_invalid_meta_mat(tmp_path: Path, scratch: Path, data: bytes) -> None:
    dataset = make_imagenet(tmp_path / "data", truth="devkit")
    (dataset.folder / META).write_bytes(data)
    assert_rejected(ImagenetSource, dataset.folder, scratch, "meta.mat")


@pytest.mark.parametrize("truth", ["devkit", "devkit.tar.gz"])
@pytest.mark.parametrize("name", [TRUTH, META])
def test_incomplete_devkit(tmp_path: Path, scratch: Path, truth: str, name: str) -> None:
    dataset = make_imagenet(tmp_path / "data", truth="devkit")
    (dataset.folder / name).unlink()
    if truth == "devkit.tar.gz":
        folder = dataset.folder / "ILSVRC2012_devkit_t12"
        files = {str(path.relative_to(dataset.folder)): path.read_bytes() for path in folder.rglob("*.*")}
        (dataset.folder / DEVKIT).write_bytes(make_tar(files, "w:gz"))
        shutil.rmtree(folder)
    assert_rejected(ImagenetSource, dataset.folder, scratch, f"data/{Path(name).name} is missing", DEVKIT)


def test_damaged_devkit(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    (dataset.folder / DEVKIT).write_bytes((dataset.folder / DEVKIT).read_bytes()[:300])
    assert_rejected(ImagenetSource, dataset.folder, scratch, DEVKIT, "truncated")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ILSVRC2012_val_00000001,n01440764 1 2\nILSVRC2012_val_00000001,n01440764\n", "line 2"),
        ("ILSVRC2012_val_00000001,cat 1 2 3 4\n", "line 1"),
        ("ILSVRC2012_val_1,n01440764 1 2\n", "line 1"),
        ("alone\n", "line 1"),
        ("ILSVRC2012_val_00000002,n01440764 1 2\n", "none has number 1"),
        ('"' + "x" * 200_000, "CSV"),
    ],
)
def test_invalid_solution(tmp_path: Path, scratch: Path, text: str, part: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="kaggle", truth="csv")
    (dataset.folder / "LOC_val_solution.csv").write_text(text)
    assert_rejected(ImagenetSource, dataset.folder, scratch, "LOC_val_solution.csv", part)


@pytest.mark.parametrize("truth", ["devkit", "csv"])
def test_class_only_in_val(tmp_path: Path, scratch: Path, truth: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders", truth=truth)
    shutil.rmtree(dataset.folder / "train" / "n02119789")
    assert_rejected(ImagenetSource, dataset.folder, scratch, "only in train none, only in val n02119789")


@pytest.mark.parametrize("truth", ["devkit", "csv", "by class"])
def test_class_only_in_train(tmp_path: Path, scratch: Path, truth: str) -> None:
    layout = "val by class" if truth == "by class" else "folders"
    dataset = make_imagenet(tmp_path / "data", layout=layout, truth=truth)
    shutil.copytree(dataset.folder / "train" / "n02119789", dataset.folder / "train" / "n09999999")
    assert_rejected(ImagenetSource, dataset.folder, scratch, "only in train n09999999, only in val none")


def test_devkit_class_without_val_images_is_allowed(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", val=2)
    check(dataset.folder, scratch, dataset)


def test_partly_moved_val(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    (dataset.folder / "val" / "n01440764").mkdir()
    assert_rejected(ImagenetSource, dataset.folder, scratch, str(dataset.folder / "val"), "class folders")


def test_partly_unpacked_train(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="class tars")
    (dataset.folder / "train" / "n01440764").mkdir()
    assert_rejected(ImagenetSource, dataset.folder, scratch, "4 class tars and 1 class folders")


@pytest.mark.parametrize("stray", ["cat", "n123"])
def test_folder_that_is_not_a_class(tmp_path: Path, scratch: Path, stray: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    (dataset.folder / "train" / stray).mkdir()
    assert_rejected(ImagenetSource, dataset.folder, scratch, f"{stray} ", "class folder", "class tar")


def test_name_that_is_not_printable(tmp_path: Path, scratch: Path) -> None:
    path = tmp_path / TRAIN
    path.write_bytes(make_tar({"n01440764.tar": make_tar({"n\udcff.JPEG": jpeg(1)})}))
    assert_rejected(ImagenetSource, path, scratch, r"'n\udcff.JPEG'", "printable")


def test_image_that_changes(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    source = ImagenetSource(str(dataset.folder), scratch=scratch)
    item = next(source.scan("train"))
    with open(dataset.folder / "train" / item.name, "ab") as file:
        file.write(b"more")
    with pytest.raises(SourceError, match=rf"{item.name}: .*\b{item.size} bytes"):
        source.read("train", item)
    (dataset.folder / "train" / item.name).unlink()
    with pytest.raises(SourceError, match=item.name):
        source.read("train", item)
    (dataset.folder / "train" / item.name).symlink_to("/nowhere.JPEG")
    item = next(iter(source.scan("train")))
    assert item.size == 0
    with pytest.raises(BadImageError, match="broken symbolic link"):
        source.read("train", item)


@pytest.mark.parametrize("target", ["/nowhere.JPEG", "ILSVRC2012_val_00000004.JPEG"])
def test_broken_links_among_the_numbered_images(tmp_path: Path, scratch: Path, target: str) -> None:
    """A link to nowhere, and one to itself."""
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    name = "ILSVRC2012_val_00000004.JPEG"
    (dataset.folder / "val" / name).unlink()
    (dataset.folder / "val" / name).symlink_to(target)
    source = ImagenetSource(str(dataset.folder), scratch=scratch)
    items = list(source.scan("val"))
    assert len(items) == 10
    (broken,) = (item for item in items if item.size == 0)
    assert broken.name.endswith(f"/{name}")
    with pytest.raises(BadImageError):
        source.read("val", broken)


@pytest.mark.parametrize("split", ["train", "val"])
def test_class_folder_that_is_a_loop_of_links(tmp_path: Path, scratch: Path, split: str) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="val by class")
    wnid = dataset.classes[0]
    shutil.rmtree(dataset.folder / split / wnid)
    (dataset.folder / split / wnid).symlink_to(wnid)
    assert_rejected(ImagenetSource, dataset.folder, scratch, f"{split}/{wnid}: ")


def test_tar_that_shrinks(tmp_path: Path, scratch: Path) -> None:
    dataset = make_imagenet(tmp_path / "data")
    source = ImagenetSource(str(dataset.folder), scratch=scratch)
    items = list(source.scan("val"))
    os.truncate(dataset.folder / VAL, items[-1].offset + 5)
    with pytest.raises(SourceError, match=rf"{VAL}: truncated.*{items[-1].size} bytes at offset {items[-1].offset}\b"):
        source.read("val", items[-1])
    source.close()
    with pytest.raises(SourceError, match=rf"{VAL}: .*offset {items[0].offset}\b"):
        source.read("val", items[0])


def test_without_scipy(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_imagenet(tmp_path / "data", layout="folders")
    actual = builtins.__import__

    def no_scipy(name: str, *args: object) -> ModuleType:
        if name.startswith("scipy"):
            raise ModuleNotFoundError(name)
        return actual(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", no_scipy)
    with pytest.raises(MissingExtraError, match=r"pip install 'path/to/stoker\[imagenet\]'"):
        ImagenetSource(str(dataset.folder), scratch=scratch)


def test_empty_and_missing_folders(tmp_path: Path, scratch: Path) -> None:
    assert_rejected(ImagenetSource, tmp_path, scratch, TRAIN, VAL)
    with pytest.raises(NotFoundError):
        ImagenetSource(str(tmp_path / "none"), scratch=scratch)
    assert not ImagenetSource.can_read(str(tmp_path))
    assert not ImagenetSource.can_read(str(tmp_path / "none"))
    assert not ImagenetSource.can_read("a\0b")


def test_can_read_only_the_full_dataset(tmp_path: Path) -> None:
    """A tree with wnids may be a smaller dataset, which the folder source reads."""
    small = make_imagenet(tmp_path / "imagenette", layout="val by class", truth="none")
    assert not ImagenetSource.can_read(str(small.folder))
    for label in range(1000):
        (tmp_path / "full" / "train" / f"n{label:08d}").mkdir(parents=True)
    assert ImagenetSource.can_read(str(tmp_path / "full"))
    (tmp_path / "full" / "train" / "cat").mkdir()
    assert not ImagenetSource.can_read(str(tmp_path / "full"))
