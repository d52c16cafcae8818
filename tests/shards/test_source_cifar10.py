import gzip
import io
import os
import pickle
import re
import subprocess
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.errors import NotFoundError
from stoker.shards.sources.cifar10 import Cifar10Source
from tests.support.datasets import (
    CIFAR_CLASSES,
    Cifar10,
    cifar_batch,
    cifar_meta,
    make_cifar10,
    make_tar,
    python2_pickle,
)
from tests.support.trees import assert_rejected


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def check(where: Path, scratch: Path, dataset: Cifar10) -> Cifar10Source:
    """Open `where`, and compare everything with the generated dataset."""
    source = Cifar10Source(str(where), scratch=scratch)
    assert (source.name, source.splits, source.classes) == ("cifar10", ("train", "test"), CIFAR_CLASSES)
    for split, expected in (("train", dataset.train), ("test", dataset.test)):
        items = list(source.scan(split))
        assert items == list(source.scan(split))
        assert [item.name for item in items] == list(expected)
        assert {item.size for item in items} == {3072}
        with ThreadPoolExecutor(8) as threads:
            images = list(threads.map(lambda item: source.read(split, item).image, items))  # noqa: B023
        for item, image, (label, pixels) in zip(items, images, expected.values(), strict=True):
            opened = Image.open(io.BytesIO(image))
            assert (opened.format, opened.mode, item.label) == ("PNG", "RGB", label)
            assert (np.asarray(opened) == pixels).all()
        assert source.read(split, items[0]).image == images[0]
    source.close()
    return source


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("column_order", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_reads_every_layout(tmp_path: Path, scratch: Path, packed: bool, column_order: bool, inside: bool) -> None:
    dataset = make_cifar10(tmp_path / "data", packed=packed, column_order=column_order)
    where = dataset.where if inside else tmp_path / "data"
    assert Cifar10Source.can_read(str(where))
    assert check(where, scratch, dataset).notes == ()


def test_read_without_scan(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path)
    items = list(Cifar10Source(str(dataset.where), scratch=scratch).scan("train"))
    (tmp_path / "other").mkdir()
    source = Cifar10Source(str(dataset.where), scratch=tmp_path / "other")
    with ThreadPoolExecutor(8) as threads:
        images = list(threads.map(lambda item: source.read("train", item).image, items))
    for image, (_, pixels) in zip(images, dataset.train.values(), strict=True):
        assert (np.asarray(Image.open(io.BytesIO(image))) == pixels).all()


def test_batch_pickled_by_newer_numpy(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path, packed=False, rows=2)
    names = ["x_s_1.png", "x_s_2.png"]
    batch = cifar_batch(np.ones((2, 3072), np.uint8), [3, 4], names)
    (dataset.where / "test_batch").write_bytes(python2_pickle(batch, "numpy._core"))
    source = Cifar10Source(str(dataset.where), scratch=scratch)
    assert [item.name for item in source.scan("test")] == ["cat/x_s_1.png", "deer/x_s_2.png"]


def test_scan_needs_little_memory(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path, rows=800)  # 2.5 MB of pixels per batch
    source = Cifar10Source(str(dataset.where), scratch=scratch)
    tracemalloc.start()
    try:
        count = sum(1 for _ in source.scan("train"))
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 4000
    assert held < 1_000_000
    assert peak < 3.5 * 800 * 3072


@pytest.mark.parametrize(
    "names",
    [
        ["a.png", "a.png"],
        ["a.png"],
        ["a.png", "../b.png"],
        ["a.png", "b"],
        [],
        ["a.png", ".png"],
        ["a.png", "b\n.png"],
    ],
)
def test_unusable_file_names_are_replaced(tmp_path: Path, scratch: Path, names: list[str]) -> None:
    dataset = make_cifar10(tmp_path, packed=False, rows=2)
    batch = cifar_batch(np.ones((2, 3072), np.uint8), [0, 9], names)
    (dataset.where / "test_batch").write_bytes(python2_pickle(batch))
    source = Cifar10Source(str(dataset.where), scratch=scratch)
    for _ in range(2):
        assert [item.name for item in source.scan("test")] == [
            "airplane/test_batch_00000.png",
            "truck/test_batch_00001.png",
        ]
    assert next(source.scan("train")).name in dataset.train
    (note,) = source.notes
    assert re.match("test: file names .*batch and row$", note)


def test_missing_file_names_are_replaced(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path, packed=False, rows=2)
    batch = cifar_batch(np.ones((2, 3072), np.uint8), [0, 9], [])
    del batch[b"filenames"]
    (dataset.where / "data_batch_3").write_bytes(python2_pickle(batch))
    items = list(Cifar10Source(str(dataset.where), scratch=scratch).scan("train"))
    assert items[0].name.endswith("/data_batch_1_00000.png")
    assert len({item.name for item in items}) == 10


def malicious(command: str) -> bytes:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (command,)

    return pickle.dumps({"data": Payload(), "labels": []}, protocol=2)


@pytest.mark.parametrize("file", ["data_batch_2", "test_batch", "batches.meta"])
def test_malicious_pickle_executes_nothing(tmp_path: Path, scratch: Path, file: str) -> None:
    dataset = make_cifar10(tmp_path / "data", packed=False)
    marker, proof = tmp_path / "ran", tmp_path / "proof"
    (dataset.where / file).write_bytes(malicious(f"touch {marker}"))
    assert_rejected(Cifar10Source, dataset.where, scratch, file, "posix.system")
    assert not marker.exists()
    pickle.loads(malicious(f"touch {proof}"))  # proves that the payload works without the restricted unpickler
    assert proof.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy", "core.multiarray._reconstruct"),
        ("_codecs", "encode"),
        ("copyreg", "_reconstructor"),
        ("stoker.shards.sources.cifar10", "_PickleStub"),
    ],
)
def test_other_names_in_pickles_are_rejected(tmp_path: Path, scratch: Path, module: str, name: str) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    (dataset.where / "data_batch_1").write_bytes(b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"K\x01\x85R.")
    assert_rejected(Cifar10Source, dataset.where, scratch, "data_batch_1", f"{module}.{name}")


def test_popen_in_a_pickle_is_rejected(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    (dataset.where / "data_batch_1").write_bytes(pickle.dumps(subprocess.Popen, protocol=4))
    assert_rejected(Cifar10Source, dataset.where, scratch, "data_batch_1", "subprocess.Popen")


PIXELS = np.zeros((2, 3072), np.uint8)
NAMES = ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (cifar_batch(PIXELS, [0, 10], NAMES), ["label 10 of row 1", "0 and 9"]),
        (cifar_batch(PIXELS, [-1, 1], NAMES), ["label -1 of row 0"]),
        (cifar_batch(PIXELS, [0, b"1"], NAMES), ["label b'1' of row 1"]),
        (cifar_batch(PIXELS, [0], NAMES), ["2 rows", "1 labels"]),
        (cifar_batch(PIXELS[:, :3071].copy(), [0, 1], NAMES), ["data is 2 × 3071", "3072"]),
        (cifar_batch(PIXELS[:0], [], []), ["data is 0 × 3072"]),
        (cifar_batch(PIXELS.ravel(), [0, 1], NAMES), ["two-dimensional array"]),
        (cifar_batch(PIXELS.astype("<u2"), [0, 1], NAMES), ["two-dimensional array"]),
        (cifar_batch(b"text", [0, 1], NAMES), ["two-dimensional array"]),
        ({b"data": PIXELS, b"labels": b"01"}, ["labels", "list"]),
        ({}, ["two-dimensional array"]),
        ([1, 2], ["list", "dict"]),
    ],
)
def test_invalid_batches(tmp_path: Path, scratch: Path, content: object, parts: list[str]) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    (dataset.where / "data_batch_4").write_bytes(python2_pickle(content))
    assert_rejected(Cifar10Source, dataset.where, scratch, "data_batch_4", *parts)


@pytest.mark.parametrize("names", [[b"cat"] * 9, None, [b"cat"] * 9 + [b"a/b"], [b"cat"] * 9 + [3]])
def test_invalid_class_names(tmp_path: Path, scratch: Path, names: object) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    (dataset.where / "batches.meta").write_bytes(python2_pickle({**cifar_meta(), b"label_names": names}))
    assert_rejected(Cifar10Source, dataset.where, scratch, "batches.meta", "label_names", "10 names")


@pytest.mark.parametrize("keep", [0, 1, 50, 0.5, -1])
def test_truncated_pickle(tmp_path: Path, scratch: Path, keep: float) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    path = dataset.where / "data_batch_5"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    assert_rejected(Cifar10Source, dataset.where, scratch, "data_batch_5", "corrupt pickle")


@pytest.mark.parametrize(
    "data", [b"not a pickle", b"\x80\x02]e.", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x3f.", b"\x80\x63."]
)
def test_malformed_pickle(tmp_path: Path, scratch: Path, data: bytes) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    (dataset.where / "data_batch_5").write_bytes(data)
    assert_rejected(Cifar10Source, dataset.where, scratch, "data_batch_5", "corrupt pickle")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_missing_file(tmp_path: Path, scratch: Path, packed: bool, file: str) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    (dataset.where / file).unlink()
    if packed:
        files = {f"cifar-10-batches-py/{path.name}": path.read_bytes() for path in dataset.where.iterdir()}
        dataset.where = tmp_path / "cifar-10-python.tar.gz"
        dataset.where.write_bytes(make_tar(files, "w:gz"))
    assert_rejected(Cifar10Source, dataset.where, scratch, f"{file} not found", "cifar-10-python.tar.gz again")


def test_oversized_file_is_not_read(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path, packed=False)
    with open(dataset.where / "data_batch_1", "ab") as file:
        file.truncate(200_000_000)
    assert_rejected(Cifar10Source, dataset.where, scratch, "data_batch_1", "200000000 bytes")


def test_damaged_archives(tmp_path: Path, scratch: Path) -> None:
    dataset = make_cifar10(tmp_path)
    whole = dataset.where.read_bytes()
    plain = gzip.decompress(whole)
    for number, data in enumerate(
        [
            whole[: len(whole) // 2],
            whole[:1000] + bytes(50) + whole[1050:],
            b"no archive",
            plain[: len(plain) // 2],
            gzip.compress(plain[: len(plain) // 2]),
        ]
    ):
        dataset.where.write_bytes(data)
        (scratch / str(number)).mkdir()
        assert_rejected(Cifar10Source, dataset.where, scratch / str(number), "cifar-10-python.tar.gz")


def test_empty_and_missing_folders(tmp_path: Path, scratch: Path) -> None:
    assert_rejected(Cifar10Source, tmp_path, scratch, "cifar-10-python.tar.gz")
    with pytest.raises(NotFoundError):
        Cifar10Source(str(tmp_path / "none"), scratch=scratch)
    assert not Cifar10Source.can_read(str(tmp_path))
    assert not Cifar10Source.can_read("a\0b")
