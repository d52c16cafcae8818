"""The loader end to end: all formats and stores, all kinds of images, how iterations end, and invalid options."""

from __future__ import annotations

import gc
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

import stoker as stoker_package
from stoker import Loader
from stoker.errors import InputError, NotFoundError, SpecError
from stoker.load.loader import ITERATION_STOPPED, Batch
from stoker.load.transforms import TRANSFORMS
from tests.support.loaders import encode, gradient, loader_threads, write_shards
from tests.support.servers import aws_environ, nginx
from tests.support.trees import make_dataset, stoker

Pixels = npt.NDArray[np.uint8]


@pytest.fixture(autouse=True)
def _isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep scans and temporary directories of each test apart."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "scans"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shards(pets: Path) -> str:
    return f"{pets}/tar/train"


def leftovers() -> list[str]:
    """List threads and temporary directories of loaders."""
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("stoker-")]
    return loader_threads() + folders


def values(batches: Sequence[Batch] | Loader) -> list[tuple[Any, ...]]:
    """Return batches as comparable values."""
    return [
        (
            [bytes(image) for image in batch.images] if isinstance(batch.images, list) else batch.images.tobytes(),
            batch.labels.tolist(),
            batch.count,
            batch.cursor,
        )
        for batch in batches
    ]


# The same batches from every source


@pytest.mark.parametrize("transform", ["imagenet-train", None])
def test_every_format_and_store_gives_the_same_batches(
    pets: Path, tmp_path: Path, moto_url: str, gcs_url: str, monkeypatch: pytest.MonkeyPatch, transform: str | None
) -> None:
    for name, value in (aws_environ(moto_url) | {"STORAGE_EMULATOR_HOST": gcs_url}).items():
        monkeypatch.setenv(name, value)
    for bucket in (f"s3://bucket/{tmp_path.name}", f"gs://bucket/{tmp_path.name}"):
        assert stoker("data", "convert", pets / "pets", bucket, "--shard-samples", 20) == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (pets / "tar/train").glob("*.tar"):
        shutil.copy(path, bare)
    pattern = "pets-train-{000000..000004}.tar"

    def epochs(url: str, **options: Any) -> list[tuple[Any, ...]]:
        with Loader(url, global_batch=16, transform=transform, size=24, seed=3, **options) as loader:
            return [batch[:3] for _ in range(2) for batch in values(loader)]

    expected = epochs(f"{pets}/tar/train")
    assert len(expected) == 12
    with nginx(pets) as url, nginx(bare) as bare_url:
        assert epochs(f"{pets}/tfrecord") == expected
        assert epochs(f"{pets}/tar") == expected
        assert epochs(f"file://{pets}/tar/train") == expected
        assert epochs(f"{bare}/{pattern}") == expected
        assert epochs(f"{url}/tar/train") == expected
        assert epochs(f"{url}/tfrecord/train", cache=tmp_path / "cache") == expected
        assert epochs(f"{url}/tfrecord/train", cache=tmp_path / "cache") == expected
        assert epochs(f"{bare_url}/{pattern}") == expected
        assert epochs(f"s3://bucket/{tmp_path.name}/train") == expected
        assert epochs(f"gs://bucket/{tmp_path.name}") == expected
    assert leftovers() == []


def test_threads_and_prefetch_do_not_change_the_batches(shards: str) -> None:
    expected = values(Loader(shards, global_batch=32, size=24, threads=1, prefetch=1))
    for threads, prefetch in ((1, 8), (3, 2), (16, 5)):
        assert values(Loader(shards, global_batch=32, size=24, threads=threads, prefetch=prefetch)) == expected


def test_seed_and_epoch_change_the_order(shards: str) -> None:
    loader = Loader(shards, global_batch=90, size=24)
    (first,), (second,) = list(loader), list(loader)
    (other,) = Loader(shards, global_batch=90, size=24, seed=1)
    assert not np.array_equal(first.labels, second.labels)
    assert not np.array_equal(first.labels, other.labels)
    assert Counter(first.labels.tolist()) == Counter(second.labels.tolist()) == {0: 30, 1: 30, 2: 30}


def test_without_a_transform_images_are_the_original_files(pets: Path, shards: str) -> None:
    files = Counter(
        (path.read_bytes(), label)
        for label, folder in enumerate(sorted((pets / "pets").iterdir()))
        for path in folder.iterdir()
    )
    loader = Loader(shards, global_batch=7, transform=None)
    for _ in range(2):
        loaded = Counter(
            (bytes(image), label)
            for batch in loader
            for image, label in zip(batch.images, batch.labels.tolist(), strict=True)
        )
        assert loaded == files


def test_labels_belong_to_their_images(pets: Path, shards: str) -> None:
    """The pixels of the whole image identify its file."""
    label_of = {
        np.asarray(Image.open(path)).tobytes(): label
        for label, folder in enumerate(sorted((pets / "pets").iterdir()))
        for path in folder.iterdir()
    }
    for batch in Loader(shards, global_batch=16, transform=lambda pixels, _: pixels, threads=4):
        assert batch.images.shape == (batch.count, 18, 24, 3)
        assert [label_of[image.tobytes()] for image in batch.images] == batch.labels.tolist()
        assert batch.labels.dtype == np.int64


@pytest.mark.parametrize("transform", ["imagenet-train", "imagenet-val"])
def test_nchw_is_nhwc_transposed(shards: str, transform: str) -> None:
    last = list(Loader(shards, global_batch=16, transform=transform, size=24))
    first = list(Loader(shards, global_batch=16, transform=transform, size=24, layout="NCHW"))
    assert first[0].images.shape == (16, 3, 24, 24)
    assert first[-1].images.shape == (10, 3, 24, 24)
    for one, other in zip(last, first, strict=True):
        assert np.array_equal(one.images.transpose(0, 3, 1, 2), other.images)
        assert one.images.flags.c_contiguous
        assert other.images.flags.c_contiguous


def test_the_random_generator_depends_on_the_position_only(shards: str) -> None:
    def augment(pixels: Pixels, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        assert pixels.dtype == np.uint8
        return np.array([float(pixels.sum()), rng.random(), rng.normal()])

    def rows(batches: Iterator[Batch]) -> set[tuple[float, ...]]:
        return {tuple(row) for batch in batches for row in batch.images.tolist()}

    whole = rows(iter(Loader(shards, global_batch=16, transform=augment, seed=4)))
    assert len(whole) == 90
    assert rows(iter(Loader(shards, global_batch=5, transform=augment, seed=4, threads=7))) == whole
    parts = [rows(iter(Loader(shards, global_batch=9, transform=augment, seed=4, rank=(r, 3)))) for r in range(3)]
    assert [len(part) for part in parts] == [30, 30, 30]
    assert set.union(*parts) == whole
    again = Loader(shards, global_batch=16, transform=augment, seed=4)
    second = rows(iter(again)) and rows(iter(again))
    assert not {row[1] for row in second} & {row[1] for row in whole}


class UserError(Exception):
    """An exception class of the user."""


def test_an_exception_of_a_user_transform_is_raised_unchanged(shards: str) -> None:
    raised = UserError("mine")

    def augment(pixels: Pixels, rng: np.random.Generator) -> Pixels:
        raise raised

    with pytest.raises(UserError) as caught:
        next(iter(Loader(shards, global_batch=16, transform=augment)))
    assert caught.value is raised
    assert loader_threads() == []


def test_a_user_transform_may_work_in_place(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    url = write_shards(tmp_path / "set", [encode(gradient()), encode(gradient(), exif=exif), encode(gradient(), "PNG")])

    def darken(pixels: Pixels, rng: np.random.Generator) -> Pixels:
        pixels //= 2
        return pixels[:20, :20]

    (batch,) = Loader(url, global_batch=3, transform=darken)
    assert batch.images.max() <= 127


# Kinds of images


def by_label(batches: Loader) -> dict[int, Pixels]:
    return {label: image for batch in batches for label, image in zip(batch.labels.tolist(), batch.images, strict=True)}


def test_every_kind_of_image_is_decoded_correctly(tmp_path: Path) -> None:
    palette = Image.new("P", (60, 40), 0)
    palette.putpalette([10, 200, 90, 0, 0, 255])
    palette.paste(1, (0, 20, 60, 40))
    rotated = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        rotated.append(encode(gradient(), exif=exif))
    images = [
        *rotated,
        encode(gradient().convert("CMYK")),
        encode(gradient().convert("L")),
        encode(gradient(), progressive=True),
        encode(gradient(), restart_marker_rows=1),
        *(encode(gradient(), subsampling=kind) for kind in ("4:2:0", "4:2:2", "4:4:4")),
        encode(Image.new("RGB", (1, 1), (200, 30, 60))),
        encode(gradient(5_000, 4_000), quality=90),
        encode(palette, "PNG"),
        encode(palette, "PNG", transparency=0),
        encode(Image.new("I;16", (60, 40), 0x8080), "PNG"),
    ]
    url = write_shards(tmp_path / "set", images)
    white = np.full((20, 60, 3), 255, dtype=np.uint8)
    for layout in ("NHWC", "NCHW"):
        with Loader(url, global_batch=6, transform="imagenet-val", size=32, layout=layout) as loader:
            pixels_by_label = by_label(loader)
            assert loader.bad == []
        assert len(pixels_by_label) == len(images)
        for label, data in enumerate(images):
            with Image.open(io.BytesIO(data)) as image:
                image = ImageOps.exif_transpose(image)
                upright = image.convert("RGB") if image.mode != "I;16" else Image.new("RGB", image.size, (128,) * 3)
            if label == 18:  # the upper half is transparent
                upright = Image.fromarray(np.vstack((white, np.asarray(upright)[20:])))
            short = min(upright.size)
            wide, high = (int(37 * side / short) for side in upright.size)
            left, top = round((wide - 32) / 2), round((high - 32) / 2)
            center = upright.resize((wide, high), Image.Resampling.BILINEAR).crop((left, top, left + 32, top + 32))
            pixels = pixels_by_label[label] if layout == "NHWC" else pixels_by_label[label].transpose(1, 2, 0)
            assert np.abs(pixels.astype(int) - np.asarray(center)).mean() <= 2, label
    train = by_label(Loader(url, global_batch=6, size=32))
    assert sorted(train) == list(range(len(images)))


# How iterations end


@pytest.fixture(params=["local", "http"])
def local_or_http(request: pytest.FixtureRequest, pets: Path) -> Iterator[str]:
    if request.param == "local":
        yield f"{pets}/tar/train"
    else:
        with nginx(pets) as url:
            yield f"{url}/tar/train"


def test_state_dict_marks_consumed_batches_not_prefetched_ones(local_or_http: str, shards: str) -> None:
    options: dict[str, Any] = {"global_batch": 8, "size": 16, "prefetch": 8}
    expected = values(Loader(shards, **options))
    with Loader(local_or_http, **options) as loader:
        batches = iter(loader)
        assert loader.state_dict()["consumed"] == 0
        next(batches)
        second = next(batches)
        assert loader.state_dict() == second.cursor.state()
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (0, 16)
        assert len(loader) == 10
        state = loader.state_dict()
    with Loader(local_or_http, **options) as loader:
        loader.load_state_dict(state)
        assert values(loader) == expected[2:]
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)
        assert len(loader) == 12


def test_a_loop_continues_after_a_break(local_or_http: str) -> None:
    with Loader(local_or_http, global_batch=8, size=16) as loader:
        expected = values(loader)
        loader.load_state_dict(loader.plan.start_cursor().state())
        taken = []
        for _ in range(4):
            for batch in loader:
                taken.append(batch)
                if len(taken) % 5 == 0:
                    break
            assert not [name for name in loader_threads() if "decode" in name]
            if len(taken) == 12:
                break
        assert values(taken) == expected


def test_close_stops_everything_and_the_loader_can_be_used_again(local_or_http: str) -> None:
    loader = Loader(local_or_http, global_batch=8, size=16, prefetch=8)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert leftovers() == []
    with pytest.raises(InputError, match=ITERATION_STOPPED):
        next(batches)
    loader.close()
    assert sum(batch.count for batch in loader) == 82
    loader.close()
    assert leftovers() == []


def test_an_exception_in_the_loop_stops_everything(local_or_http: str) -> None:
    def train() -> None:
        with Loader(local_or_http, global_batch=8, size=16, prefetch=8) as loader:
            for _ in loader:
                raise UserError

    with pytest.raises(UserError):
        train()
    assert leftovers() == []


def test_an_exception_in_a_loop_without_with_stops_decoding(shards: str) -> None:
    def train() -> None:
        for _ in Loader(shards, global_batch=8, size=16, prefetch=8):
            raise UserError

    with pytest.raises(UserError):
        train()
    assert loader_threads() == []


def test_a_deleted_iterator_stops_everything(local_or_http: str) -> None:
    batches = iter(Loader(local_or_http, global_batch=8, size=16, prefetch=8))
    next(batches)
    assert loader_threads() != []
    del batches
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stoker-"):
            thread.join(60)
    assert leftovers() == []


def test_a_second_iteration_stops_the_first(shards: str) -> None:
    loader = Loader(shards, global_batch=8, size=16)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).cursor.consumed == 16
    with pytest.raises(InputError, match=ITERATION_STOPPED) as caught:  # StopIteration would look like the end
        next(first)
    assert caught.value.where == shards
    assert len(list(second)) == 10


SLOW = """
import signal, sys, threading, time
from stoker import Loader

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs, and inherited

loader = Loader(sys.argv[1], global_batch=4, size=16, prefetch=8)
try:
    for batch in loader:
        print("batch", flush=True)
        while True:
            time.sleep(0.01)  # short, because a signal just before a sleep is handled after it
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate() if "decode" in thread.name], flush=True)
    raise
"""


def test_ctrl_c_leaves_nothing_behind(local_or_http: str) -> None:
    environ = os.environ | {"TMPDIR": tempfile.gettempdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, local_or_http],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "batch\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "[]\n"
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert leftovers() == []


def test_concurrent_loaders(shards: str) -> None:
    expected = values(Loader(shards, global_batch=16, size=16))
    with ThreadPoolExecutor(4) as pool:
        loaders = [Loader(shards, global_batch=16, size=16) for _ in range(4)]
        assert all(batches == expected for batches in pool.map(values, loaders))


def test_positions_locate_the_samples_of_a_batch(shards: str) -> None:
    for sampling in ("exact", "join"):
        samples = []
        for rank in range(2):
            with Loader(shards, global_batch=16, size=16, rank=(rank, 2), sampling=sampling) as loader:
                view = loader.plan.epoch(0, loader.rank)
                for batch in loader:
                    assert len(batch.positions) == batch.count
                    location = view.locate(batch.positions)
                    samples += zip(location.shards.tolist(), location.samples.tolist(), strict=True)
        assert len(samples) == len(set(samples)) == loader.plan.samples


# Options


def test_all_invalid_options_are_reported_at_once(shards: str) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, global_batch=8, transform="imagenet", size=0, layout="XYZ", prefetch=0, threads=0, max_bad=2)
    assert caught.value.where == shards
    faults = {fault.path: fault.what for fault in caught.value.faults}
    assert list(faults) == ["transform", "size", "layout", "prefetch", "threads", "max_bad"]
    assert "'imagenet'" in faults["transform"]
    assert all(name in faults["transform"] for name in TRANSFORMS)
    assert re.search(r"\b1\b.*\b4096\b.*\b0\b", faults["size"])
    assert all(re.search(r"\b1\b.*\b0\b", faults[name]) for name in ("prefetch", "threads"))
    assert re.search(r"\b0\b.*\b1\b.*\b2\b", faults["max_bad"])
    assert all(name in faults["layout"] for name in ("'XYZ'", "NHWC", "NCHW"))


@pytest.mark.parametrize("transform", [None, lambda pixels, _: pixels])
def test_layout_is_rejected_where_it_has_no_effect(shards: str, transform: Any) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, global_batch=8, transform=transform, layout="NCHW")
    assert [fault.path for fault in caught.value.faults] == ["layout"]


def test_invalid_options_of_the_plan_are_reported_with_the_others(shards: str) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, global_batch=8, size=0, sampling="random", seed=-1)
    assert {fault.path for fault in caught.value.faults} == {"size", "sampling", "seed"}


@pytest.mark.parametrize("rank", [(2, 2), (5, 2), (-1, 2), (0, 0)])
def test_an_invalid_rank_is_rejected(shards: str, rank: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        Loader(shards, global_batch=8, rank=rank)


def test_a_batch_larger_than_the_epoch_is_rejected(shards: str) -> None:
    with pytest.raises(SpecError, match=r"train: global_batch: .*\b90\b.*\bgot 91\b"):
        Loader(shards, global_batch=91)


def test_a_url_with_two_shard_sets_is_rejected(tmp_path: Path) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out") == 0
    with pytest.raises(InputError, match=r"out: .*\b2 shard sets\b.*/train, .*/val; .*\bone of them"):
        Loader(str(tmp_path / "out"), global_batch=2)


def test_a_url_without_shards_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere: no such file or directory"):
        Loader(str(tmp_path / "nowhere"), global_batch=2)


# Memory

EPOCH = """
import re, sys
from pathlib import Path
from stoker import Loader

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

loader = Loader(sys.argv[1], global_batch=32, transform=None)
before, read = peak(), 0
for batch in loader:
    read += sum(len(bytes(image)) for image in batch.images)
print(before, peak(), read >> 20)
"""


def test_memory_does_not_grow_with_the_shard_set(tmp_path: Path) -> None:
    """All shards stay mapped to the end, so pages that are never released would add up to the size of the set."""
    noise = np.random.default_rng(0).bytes(512 << 10)
    url = write_shards(tmp_path / "set", [noise] * 800, shard_samples=400)
    run = subprocess.run([sys.executable, "-c", EPOCH, url], capture_output=True, text=True, check=True)
    before, peak, read = map(int, run.stdout.split())
    assert read == 400
    assert peak - before < 250


def test_batches_are_printed_on_one_line(shards: str) -> None:
    for settings, text in (
        ({}, "16×24×24×3 uint8"),
        ({"layout": "NCHW"}, "16×3×24×24 uint8"),
        ({"transform": None}, "16 encoded images"),
        ({"transform": lambda pixels, _: pixels.mean()}, "16 float64"),
    ):
        with Loader(shards, **{"global_batch": 16, "size": 24, **settings}) as loader:
            assert repr(next(iter(loader))) == f"Batch({text}, epoch 0, consumed 16)"


def test_loader_is_printed_on_one_line(shards: str) -> None:
    with Loader(shards, global_batch=16, size=24, rank=(1, 2)) as loader:
        next(iter(loader))
        text = repr(loader)
        assert "\n" not in text
        for part in (shards, f"{loader.plan.samples} samples", "batch 16", "exact", "rank 1 of 2", "consumed 16"):
            assert part in text


def test_outputs_of_different_shapes_are_an_error_that_names_samples_and_shapes(shards: str) -> None:
    def crop(pixels: Pixels, generator: np.random.Generator) -> Pixels:
        height = int(generator.integers(2, 9))
        return pixels[:height, :4]

    with Loader(shards, global_batch=16, transform=crop) as loader, pytest.raises(InputError) as caught:
        next(iter(loader))
    found = re.findall(r"\((\d), 4, 3\) for sample (\d+)", str(caught.value))
    assert len({height for height, _ in found}) == len({sample for _, sample in found}) == 2


@pytest.mark.parametrize(
    "name", ["missing", "missing/train", "missing/a.tar", "missing/{0..1}.tar", "empty", "file", "a\0"]
)
def test_path_without_shards_is_one_exception(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    with pytest.raises(InputError) as caught:
        Loader(f"{tmp_path}/{name}", global_batch=8)
    error: BaseException = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    assert str(tmp_path) in str(error)


def test_public_names_are_listed_without_importing_them() -> None:
    program = "import stoker, sys; print(dir(stoker), *{'numpy', 'cv2', 'torch'}.intersection(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    listed, _, imported = shown.partition("]")
    assert {"Batch", "Loader", "__version__"} <= set(re.findall(r"\w+", listed))
    assert imported == "\n"
    assert all(hasattr(stoker_package, name) for name in stoker_package.__all__)
