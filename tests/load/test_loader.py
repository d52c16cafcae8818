"""The loader from end to end: every kind of set and store, every kind of image, bad samples, and how it ends."""

from __future__ import annotations

import gc
import io
import logging
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

from stoker import Loader
from stoker.errors import DataFaultError, InputError, NotFoundError, SpecError
from stoker.load.loader import Batch, find_one
from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample
from tests.support.servers import aws_environ, nginx
from tests.support.trees import make_dataset, make_tree, stoker

Pixels = npt.NDArray[np.uint8]


EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans, temporary folders and threads of this test."""
    EARLIER.update(threading.enumerate())
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "scans"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety images of three classes, with the folders `pets` and, by format, `tar` and `tfrecord`."""
    root = tmp_path_factory.mktemp("loader")
    make_tree(root / "pets", {"ant": 30, "bee": 30, "cat": 30})
    for kind in ("tar", "tfrecord"):
        assert stoker("data", "convert", root / "pets", root / kind, "--format", kind, "--shard-samples", 20) == 0
    return root


@pytest.fixture
def shards(pets: Path) -> str:
    return f"{pets}/tar/train"


def our_threads() -> list[str]:
    return [thread.name for thread in set(threading.enumerate()) - EARLIER if thread.name.startswith("stoker-")]


def left_behind() -> list[str]:
    """Threads and temporary folders of ours."""
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("stoker-")]
    return our_threads() + folders


def values(batches: Sequence[Batch] | Loader) -> list[tuple[Any, ...]]:
    """Batches as values that can be compared."""
    return [
        (
            [bytes(image) for image in batch.images] if isinstance(batch.images, list) else batch.images.tobytes(),
            batch.labels.tolist(),
            batch.count,
            batch.cursor,
        )
        for batch in batches
    ]


# What is the same wherever it comes from


@pytest.mark.parametrize("transform", ["imagenet-train", None])
def test_the_same_batches_from_everywhere(
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
    assert left_behind() == []


def test_threads_and_prefetch_change_nothing(shards: str) -> None:
    expected = values(Loader(shards, global_batch=32, size=24, threads=1, prefetch=1))
    for threads, prefetch in ((1, 8), (3, 2), (16, 5)):
        assert values(Loader(shards, global_batch=32, size=24, threads=threads, prefetch=prefetch)) == expected


def test_seeds_and_epochs_change_order_and_crops(shards: str) -> None:
    loader = Loader(shards, global_batch=90, size=24)
    (first,), (second,) = list(loader), list(loader)
    (other,) = Loader(shards, global_batch=90, size=24, seed=1)
    assert not np.array_equal(first.labels, second.labels)
    assert not np.array_equal(first.labels, other.labels)
    assert Counter(first.labels.tolist()) == Counter(second.labels.tolist()) == {0: 30, 1: 30, 2: 30}


def test_without_a_transform_the_files_come_as_they_are(pets: Path, shards: str) -> None:
    files = Counter(
        (path.read_bytes(), label)
        for label, folder in enumerate(sorted((pets / "pets").iterdir()))
        for path in folder.iterdir()
    )
    loader = Loader(shards, global_batch=7, transform=None)
    for _ in range(2):
        got = Counter(
            (bytes(image), label)
            for batch in loader
            for image, label in zip(batch.images, batch.labels.tolist(), strict=True)
        )
        assert got == files


def test_labels_belong_to_their_images(pets: Path, shards: str) -> None:
    """Pixels of the whole image tell which file it is."""
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
def test_planes_are_the_pixels_transposed(shards: str, transform: str) -> None:
    last = list(Loader(shards, global_batch=16, transform=transform, size=24))
    first = list(Loader(shards, global_batch=16, transform=transform, size=24, layout="NCHW"))
    assert first[0].images.shape == (16, 3, 24, 24)
    assert first[-1].images.shape == (10, 3, 24, 24)
    for one, other in zip(last, first, strict=True):
        assert np.array_equal(one.images.transpose(0, 3, 1, 2), other.images)
        assert one.images.flags.c_contiguous
        assert other.images.flags.c_contiguous


def test_the_generator_depends_on_the_position_alone(shards: str) -> None:
    def augment(pixels: Pixels, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        assert pixels.dtype == np.uint8
        return np.array([float(pixels.sum()), rng.random(), rng.normal()])

    def rows(batches: Iterator[Batch]) -> set[tuple[float, ...]]:
        return {tuple(row) for batch in batches for row in batch.images.tolist()}

    whole = rows(iter(Loader(shards, global_batch=16, transform=augment, seed=4)))
    assert len(whole) == 90
    assert rows(iter(Loader(shards, global_batch=5, transform=augment, seed=4, threads=7))) == whole
    parts = [rows(iter(Loader(shards, global_batch=9, transform=augment, seed=4, seat=(r, 3)))) for r in range(3)]
    assert [len(part) for part in parts] == [30, 30, 30]
    assert set.union(*parts) == whole
    again = Loader(shards, global_batch=16, transform=augment, seed=4)
    second = rows(iter(again)) and rows(iter(again))
    assert not {row[1] for row in second} & {row[1] for row in whole}


class OwnError(Exception):
    """A user's own."""


def test_an_error_of_the_users_function_comes_as_it_is(shards: str) -> None:
    raised = OwnError("mine")

    def augment(pixels: Pixels, rng: np.random.Generator) -> Pixels:
        raise raised

    with pytest.raises(OwnError) as caught:
        next(iter(Loader(shards, global_batch=16, transform=augment)))
    assert caught.value is raised
    assert our_threads() == []


def test_the_users_function_may_work_in_place(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    url = hand_made(tmp_path / "set", [saved(gradient()), saved(gradient(), exif=exif), saved(gradient(), "PNG")])

    def darken(pixels: Pixels, rng: np.random.Generator) -> Pixels:
        pixels //= 2
        return pixels[:20, :20]

    (batch,) = Loader(url, global_batch=3, transform=darken)
    assert batch.images.max() <= 127


# Kinds of images


def gradient(width: int = 60, height: int = 40) -> Image.Image:
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    return Image.fromarray(np.dstack((255 * (x + 0 * y), 255 * (0 * x + y), 128 + 0 * x * y)).astype(np.uint8))


def saved(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def hand_made(folder: Path, images: Sequence[bytes], shard_samples: int = 4) -> str:
    """Write shards without a manifest, whatever the images are; the labels count up."""
    tar = FORMATS.get("tar")
    folder.mkdir()
    count = -(-len(images) // shard_samples)
    for shard in range(count):
        with (folder / f"made-{shard:06d}.tar").open("wb") as file:
            for number in range(shard * shard_samples, min(len(images), (shard + 1) * shard_samples)):
                file.writelines(tar.encode(Sample(f"{number:04d}", images[number], "jpg", number)).chunks)
            file.write(tar.trailer)
    return f"{folder}/made-{{000000..{count - 1:06d}}}.tar"


def by_label(batches: Loader) -> dict[int, Pixels]:
    return {label: image for batch in batches for label, image in zip(batch.labels.tolist(), batch.images, strict=True)}


def test_every_kind_of_image_comes_out_right(tmp_path: Path) -> None:
    palette = Image.new("P", (60, 40), 0)
    palette.putpalette([10, 200, 90, 0, 0, 255])
    palette.paste(1, (0, 20, 60, 40))
    turns = []
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        turns.append(saved(gradient(), exif=exif))
    images = [
        *turns,
        saved(gradient().convert("CMYK")),
        saved(gradient().convert("L")),
        saved(gradient(), progressive=True),
        saved(gradient(), restart_marker_rows=1),
        *(saved(gradient(), subsampling=kind) for kind in ("4:2:0", "4:2:2", "4:4:4")),
        saved(Image.new("RGB", (1, 1), (200, 30, 60))),
        saved(gradient(5_000, 4_000), quality=90),
        saved(palette, "PNG"),
        saved(palette, "PNG", transparency=0),
        saved(Image.new("I;16", (60, 40), 0x8080), "PNG"),
    ]
    url = hand_made(tmp_path / "set", images)
    white = np.full((20, 60, 3), 255, dtype=np.uint8)
    for layout in ("NHWC", "NCHW"):
        with Loader(url, global_batch=6, transform="imagenet-val", size=32, layout=layout) as loader:
            got = by_label(loader)
            assert loader.bad == []
        assert len(got) == len(images)
        for label, data in enumerate(images):
            with Image.open(io.BytesIO(data)) as image:
                image = ImageOps.exif_transpose(image)
                upright = image.convert("RGB") if image.mode != "I;16" else Image.new("RGB", image.size, (128,) * 3)
            if label == 18:  # transparent above
                upright = Image.fromarray(np.vstack((white, np.asarray(upright)[20:])))
            short = min(upright.size)
            wide, high = (int(37 * side / short) for side in upright.size)
            left, top = round((wide - 32) / 2), round((high - 32) / 2)
            middle = upright.resize((wide, high), Image.Resampling.BILINEAR).crop((left, top, left + 32, top + 32))
            pixels = got[label] if layout == "NHWC" else got[label].transpose(1, 2, 0)
            assert np.abs(pixels.astype(int) - np.asarray(middle)).mean() <= 2, label
    train = by_label(Loader(url, global_batch=6, size=32))
    assert sorted(train) == list(range(len(images)))


# Bad samples


@pytest.fixture
def broken(pets: Path, tmp_path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """A copy of the set in which four images are overwritten; each one's shard, offset and length by its fault."""
    shutil.copytree(pets / "tar/train", tmp_path / "broken")
    one = find_one(str(tmp_path / "broken"))
    spots = {}
    for number, what in enumerate(("garbage", "cut", "zeros", "text")):
        path = tmp_path / "broken" / one.shards[number].name
        offset, length, _ = one.index(path.name)[number + 2].tolist()
        image = path.read_bytes()[offset : offset + length]
        bad = {
            "garbage": np.random.default_rng(1).bytes(length),
            "cut": image[: length * 2 // 3] + bytes(length - length * 2 // 3),
            "zeros": bytes(length),
            "text": b"not found".ljust(length),
        }[what]
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bad)
        spots[what] = (str(path), offset)
    return str(tmp_path / "broken"), spots


@pytest.mark.parametrize("transform", ["imagenet-train", "imagenet-val", lambda pixels, _: pixels[:8, :8]])
def test_bad_samples_are_left_out_counted_and_told(
    broken: tuple[str, dict[str, tuple[int, int]]], shards: str, transform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url, spots = broken
    options: dict[str, Any] = {"global_batch": 16, "transform": transform, "size": 24, "seed": 2}
    good = list(Loader(shards, **options))
    assert caplog.messages == []
    bad_spots = {spot for what, spot in spots.items() if what != "cut"}  # zeros where data was may still decode
    with Loader(url, max_bad=0.05, **options) as loader:
        got = list(loader)
        found = loader.bad
    assert bad_spots <= {(bad.shard, bad.offset) for bad in found} <= set(spots.values())
    assert [batch.cursor.consumed for batch in got] == [16, 32, 48, 64, 80, 0]
    assert [batch.cursor for batch in got[:-1]] == [
        batch.cursor._replace(plan=got[0].cursor.plan) for batch in good[:-1]
    ]
    assert sum(batch.count for batch in got) == 90 - len(found)
    positions = {bad.position for bad in found}
    for start, (one, other) in enumerate(zip(got, good, strict=True)):
        rows = [row for row in range(other.count) if start * 16 + row not in positions]
        cut = spots["cut"] in {(bad.shard, bad.offset) for bad in found}
        assert np.array_equal(one.labels, other.labels[rows])
        assert one.count == len(rows) == len(one.images)
        same = (one.images == other.images[rows]).reshape(len(rows), -1).all(axis=1)
        assert (~same).sum() <= (0 if cut else 1)
    (message,) = caplog.messages
    first = found[0]
    assert caplog.records[0].levelno == logging.WARNING
    assert message == (
        f"{url}: epoch 0 left out {len(found)} bad samples "
        f"(the first: {first.shard} at byte {first.offset:,}: {first.reason})"
    )
    for bad in found:
        data = Path(bad.shard).read_bytes()[bad.offset :]
        assert bad.epoch == 0
        assert bad.reason
        assert data[:2] != b"\xff\xd8" or (bad.shard, bad.offset) == spots["cut"]


def test_a_cut_image_and_an_empty_one_are_found_whatever_the_crop(tmp_path: Path) -> None:
    images = [saved(gradient(400, 300)) for _ in range(30)]
    images[7] = images[7][: len(images[7]) * 9 // 10]
    images[11] = b""
    images[17] = saved(gradient(400, 300), progressive=True)[:-500]
    images[23] = saved(gradient(400, 300), restart_marker_rows=1)[:-2_000]
    url = hand_made(tmp_path / "set", images)
    with Loader(url, global_batch=4, size=16, max_bad=1, seed=1) as loader:
        for epoch in range(10):
            labels = [label for batch in loader for label in batch.labels.tolist()]
            assert sorted(labels) == [label for label in range(30) if label not in (7, 11, 17, 23)], epoch


def test_a_bad_sample_is_fatal_by_default(
    broken: tuple[str, dict[str, tuple[int, int]]], caplog: pytest.LogCaptureFixture
) -> None:
    url, spots = broken
    loader = Loader(url, global_batch=16, size=24)
    with pytest.raises(DataFaultError) as caught:
        list(loader)
    first = loader.bad[0]
    assert (first.shard, first.offset) in spots.values()
    assert re.fullmatch(
        rf"{re.escape(url)}: [1-4] bad samples? \(the first: {re.escape(first.shard)} at byte {first.offset:,}: .+\)"
        r": more than max_bad=0\.001 allows; mend the dataset .*stoker data verify --deep.*, or raise max_bad",
        str(caught.value),
        re.DOTALL,
    )
    assert our_threads() == []


@pytest.mark.parametrize(("max_bad", "fatal"), [(3 / 90, False), (2.9 / 90, True), (0, True), (1, False)])
def test_max_bad_is_a_share_of_the_epoch(tmp_path: Path, max_bad: float, fatal: bool) -> None:
    images = [saved(gradient(20, 20)) for _ in range(90)]
    images[5] = images[50] = images[89] = b"bad"
    url = hand_made(tmp_path / "set", images, shard_samples=30)
    loader = Loader(url, global_batch=16, size=8, max_bad=max_bad)
    if fatal:
        with pytest.raises(DataFaultError):
            list(loader)
    else:
        for epoch in range(1, 4):  # each epoch counts anew
            assert sum(batch.count for batch in loader) == 87
            assert len(loader.bad) == 3 * epoch


def test_a_batch_of_bad_samples_only_is_empty(tmp_path: Path) -> None:
    url = hand_made(tmp_path / "set", [b"bad"] * 4)
    for transform, shape in (("imagenet-val", (0, 8, 8, 3)), (lambda pixels, _: pixels, None)):
        (batch,) = Loader(url, global_batch=4, transform=transform, size=8, max_bad=1)
        assert (batch.count, len(batch.images), len(batch.labels)) == (0, 0, 0)
        assert shape is None or batch.images.shape == shape


# How it ends


@pytest.fixture(params=["local", "http"])
def anywhere(request: pytest.FixtureRequest, pets: Path) -> Iterator[str]:
    if request.param == "local":
        yield f"{pets}/tar/train"
    else:
        with nginx(pets) as url:
            yield f"{url}/tar/train"


def test_the_state_is_of_what_was_taken(anywhere: str, shards: str) -> None:
    options: dict[str, Any] = {"global_batch": 8, "size": 16, "prefetch": 8}
    expected = values(Loader(shards, **options))
    with Loader(anywhere, **options) as loader:
        batches = iter(loader)
        assert loader.state_dict()["consumed"] == 0
        next(batches)
        second = next(batches)
        assert loader.state_dict() == second.cursor.state()
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (0, 16)
        assert len(loader) == 10
        state = loader.state_dict()
    with Loader(anywhere, **options) as loader:
        loader.load_state_dict(state)
        assert values(loader) == expected[2:]
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)
        assert len(loader) == 12


def test_what_was_left_by_break_goes_on(anywhere: str) -> None:
    with Loader(anywhere, global_batch=8, size=16) as loader:
        expected = values(loader)
        loader.load_state_dict(loader.plan.start().state())
        got = []
        for _ in range(4):
            for batch in loader:
                got.append(batch)
                if len(got) % 5 == 0:
                    break
            assert not [name for name in our_threads() if "decode" in name]
            if len(got) == 12:
                break
        assert values(got) == expected


def test_close_ends_everything_and_the_loader_can_be_used_again(anywhere: str) -> None:
    loader = Loader(anywhere, global_batch=8, size=16, prefetch=8)
    batches = iter(loader)
    next(batches)
    loader.close()
    assert left_behind() == []
    with pytest.raises(InputError, match="this iteration was ended"):
        next(batches)
    loader.close()
    assert sum(batch.count for batch in loader) == 82
    loader.close()
    assert left_behind() == []


def test_an_error_in_the_loop_ends_everything(anywhere: str) -> None:
    def train() -> None:
        with Loader(anywhere, global_batch=8, size=16, prefetch=8) as loader:
            for _ in loader:
                raise OwnError

    with pytest.raises(OwnError):
        train()
    assert left_behind() == []


def test_an_error_in_a_loop_without_with_ends_the_decoding(shards: str) -> None:
    def train() -> None:
        for _ in Loader(shards, global_batch=8, size=16, prefetch=8):
            raise OwnError

    with pytest.raises(OwnError):
        train()
    assert our_threads() == []


def test_an_iterator_that_is_forgotten_ends_everything(anywhere: str) -> None:
    batches = iter(Loader(anywhere, global_batch=8, size=16, prefetch=8))
    next(batches)
    assert our_threads() != []
    del batches
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("stoker-"):
            thread.join(10)
    assert left_behind() == []


def test_a_second_iteration_ends_the_first(shards: str) -> None:
    loader = Loader(shards, global_batch=8, size=16)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).cursor.consumed == 16
    with pytest.raises(InputError, match="this iteration was ended: another one began"):
        next(first)  # and does not look like the end of an epoch
    assert len(list(second)) == 10


SLOW = """
import sys, threading, time
from stoker import Loader

loader = Loader(sys.argv[1], global_batch=4, size=16, prefetch=8)
try:
    for batch in loader:
        print("batch", flush=True)
        while True:
            time.sleep(0.01)  # a signal that comes just before a sleep waits for its end
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate() if "decode" in thread.name], flush=True)
    raise
"""


def test_ctrl_c_leaves_nothing(anywhere: str) -> None:
    environ = os.environ | {"TMPDIR": tempfile.gettempdir()}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, anywhere], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "batch\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "[]\n"
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert left_behind() == []


def test_many_loaders_at_once(shards: str) -> None:
    expected = values(Loader(shards, global_batch=16, size=16))
    with ThreadPoolExecutor(4) as pool:
        loaders = [Loader(shards, global_batch=16, size=16) for _ in range(4)]
        assert all(got == expected for got in pool.map(values, loaders))


def test_a_batch_tells_which_samples_it_holds(shards: str) -> None:
    for sampling in ("exact", "join"):
        found = []
        for rank in range(2):
            with Loader(shards, global_batch=16, size=16, seat=(rank, 2), sampling=sampling) as loader:
                view = loader.plan.epoch(0, loader.seat)
                for batch in loader:
                    assert len(batch.positions) == batch.count
                    place = view.at(batch.positions)
                    found += zip(place.shards.tolist(), place.samples.tolist(), strict=True)
        assert len(found) == len(set(found)) == loader.plan.samples


# Settings


def test_every_bad_setting_at_once(shards: str) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, global_batch=8, transform="imagenet", size=0, layout="XYZ", prefetch=0, threads=0, max_bad=2)
    assert str(caught.value) == (
        f"{shards}: transform: 'imagenet' is none of imagenet-train, imagenet-val, small-train, digits-train, "
        "whole; give one of them, a function, or None; size: 0 is not from 1 to 4096; layout: 'XYZ' is none of NHWC, "
        "NCHW; prefetch: 0 is less than 1; threads: 0 is less than 1; max_bad: 2 is no share from 0 to 1"
    )


def test_settings_of_the_plan_are_told_with_the_others(shards: str) -> None:
    with pytest.raises(SpecError) as caught:
        Loader(shards, global_batch=8, size=0, sampling="random", seed=-1)
    assert {fault.path for fault in caught.value.faults} == {"size", "sampling", "seed"}


@pytest.mark.parametrize("seat", [(2, 2), (5, 2), (-1, 2), (0, 0)])
def test_a_seat_that_is_not_there_is_refused(shards: str, seat: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        Loader(shards, global_batch=8, seat=seat)


def test_more_than_there_is(shards: str) -> None:
    with pytest.raises(SpecError, match=r"train: global_batch: 91 is more than an epoch's 90 samples"):
        Loader(shards, global_batch=91)


def test_a_url_of_two_splits(tmp_path: Path) -> None:
    assert stoker("data", "convert", make_dataset(tmp_path / "pets"), tmp_path / "out") == 0
    with pytest.raises(InputError, match=r"out: there are 2 shard sets here: .*/train, .*/val; name one of them"):
        Loader(str(tmp_path / "out"), global_batch=2)


def test_a_url_where_nothing_lies(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere: there are no shards here"):
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


def test_memory_does_not_grow_with_the_set(tmp_path: Path) -> None:
    """All shards of this set stay mapped to its end, so that pages never given back would add up to all of it."""
    noise = np.random.default_rng(0).bytes(512 << 10)
    url = hand_made(tmp_path / "set", [noise] * 800, shard_samples=400)
    run = subprocess.run([sys.executable, "-c", EPOCH, url], capture_output=True, text=True, check=True)
    before, peak, read = map(int, run.stdout.split())
    assert read == 400
    assert peak - before < 250
