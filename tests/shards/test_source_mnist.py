import gzip
import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.errors import NotFoundError
from stoker.shards.sources.mnist import MnistSource
from tests.support.datasets import Mnist, idx, make_mnist
from tests.support.trees import assert_rejected


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def check(where: Path, scratch: Path, dataset: Mnist) -> MnistSource:
    """Open `where`, and compare everything with the generated dataset."""
    source = MnistSource(str(where), scratch=scratch)
    assert list(source.splits) == list(dataset.pixels)
    for split, pixels in dataset.pixels.items():
        items = list(source.scan(split))
        assert [item.label for item in items] == dataset.labels[split]
        assert {item.size for item in items} == {pixels[0].size}
        assert items[3].name == f"{dataset.labels[split][3]}/00000003.png"
        with ThreadPoolExecutor(8) as threads:
            images = list(threads.map(lambda item: source.read(split, item).image, items))  # noqa: B023
        for image, expected in zip(images, pixels, strict=True):
            opened = Image.open(io.BytesIO(image))
            assert (opened.format, opened.mode) == ("PNG", "L")
            assert (np.asarray(opened) == expected).all()
    source.close()
    return source


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("inside", ["", "raw", "MNIST/raw"])
def test_reads_every_layout(tmp_path: Path, scratch: Path, packed: bool, mark: str, inside: str) -> None:
    dataset = make_mnist(tmp_path / "data" / inside, packed=packed, separator=mark)
    assert MnistSource.can_read(str(tmp_path / "data"))
    source = check(tmp_path / "data", scratch, dataset)
    assert (source.name, source.classes, source.notes) == ("mnist", tuple("0123456789"), ())


@pytest.mark.parametrize("inside", ["fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_detected_by_folder_name(tmp_path: Path, scratch: Path, inside: str) -> None:
    dataset = make_mnist(tmp_path / inside)
    source = check(tmp_path / inside, scratch, dataset)
    assert (source.name, source.classes[9]) == ("fashion-mnist", "Ankle boot")
    assert "Fashion-MNIST" in source.notes[0]


def test_single_split_and_other_dimensions(tmp_path: Path, scratch: Path) -> None:
    check(tmp_path / "d", scratch, make_mnist(tmp_path / "d", train=0, size=(5, 9)))


def test_decompressed_file_is_preferred(tmp_path: Path, scratch: Path) -> None:
    make_mnist(tmp_path / "d", packed=True)
    check(tmp_path / "d", scratch, make_mnist(tmp_path / "d", packed=False))
    assert not list(scratch.iterdir())


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "data", "parts"),
    [
        (IMAGES, idx(np.zeros((3, 4), np.uint8)), ["00000802", "00000803"]),
        (LABELS, b"\0\0\x08", ["truncated", "header of 8 bytes"]),
        (IMAGES, idx(np.zeros((25, 28, 28), np.uint8))[:-1], ["19615 bytes", "25 × 28 × 28 need 19616"]),
        (IMAGES, idx(np.zeros((25, 28, 28), np.uint8)) + b"x", ["19617 bytes", "need 19616"]),
        (IMAGES, idx(np.zeros((25, 0, 28), np.uint8)), ["25 × 0 × 28"]),
        (IMAGES, idx(np.zeros((24, 28, 28), np.uint8)), ["24 images", "25 labels"]),
        (LABELS, idx(np.array([0] * 24 + [10], np.uint8)), ["label 10 of row 24", "0 and 9"]),
    ],
)
def test_invalid_files(tmp_path: Path, scratch: Path, file: str, data: bytes, parts: list[str]) -> None:
    dataset = make_mnist(tmp_path / "d", packed=False)
    (dataset.folder / file).write_bytes(data)
    assert_rejected(MnistSource, dataset.folder, scratch, file, *parts)


@pytest.mark.parametrize("file", [IMAGES, LABELS])
def test_missing_images_or_labels(tmp_path: Path, scratch: Path, file: str) -> None:
    dataset = make_mnist(tmp_path / "d")
    (dataset.folder / f"{file}.gz").unlink()
    assert_rejected(MnistSource, dataset.folder, scratch, f"{file}[.gz] not found")


def test_damaged_gzip(tmp_path: Path, scratch: Path) -> None:
    dataset = make_mnist(tmp_path / "d")
    packed = dataset.folder / f"{IMAGES}.gz"
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    assert_rejected(MnistSource, dataset.folder, scratch, f"{IMAGES}.gz", "truncated")
    shutil.rmtree(scratch)
    scratch.mkdir()
    packed.write_bytes(whole[:100] + bytes(100) + whole[200:])
    assert_rejected(MnistSource, dataset.folder, scratch, f"{IMAGES}.gz", "damaged")


def test_uncompressed_file_with_gz_extension(tmp_path: Path, scratch: Path) -> None:
    dataset = make_mnist(tmp_path / "d")
    for packed in dataset.folder.iterdir():
        packed.write_bytes(gzip.decompress(packed.read_bytes()))
    check(dataset.folder, scratch, dataset)


def test_empty_and_missing_folders(tmp_path: Path, scratch: Path) -> None:
    assert_rejected(MnistSource, tmp_path, scratch, "train-images-idx3-ubyte")
    with pytest.raises(NotFoundError):
        MnistSource(str(tmp_path / "none"), scratch=scratch)
    assert not MnistSource.can_read(str(tmp_path))
    assert not MnistSource.can_read("a\0b")


def test_two_datasets_are_rejected(tmp_path: Path, scratch: Path) -> None:
    make_mnist(tmp_path / "MNIST/raw")
    make_mnist(tmp_path / "FashionMNIST/raw")
    assert MnistSource.can_read(str(tmp_path))
    assert_rejected(MnistSource, tmp_path, scratch, str(tmp_path / "MNIST/raw"), str(tmp_path / "FashionMNIST/raw"))
