"""The native decoder beside the general one: the same pixels, nothing lost, no crash; with and without it."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker import Loader
from stoker.errors import SpecError
from stoker.load import native
from stoker.load.buffers import Buffers
from stoker.load.collate import PixelRows
from stoker.load.decode import MOST_BLURRED, Decoder, Header, Pixels, Task
from stoker.load.native import NativeDecoder
from stoker.load.transforms import TRANSFORMS, CenterCrop, Crop, draws, random_resized_crop
from stoker.shards.images import BadImageError, resized
from tests.support.paths import NATIVE, SHARED
from tests.support.trees import make_tree, stoker

SAMPLE = SHARED / "data" / "imagenet-sample-200.tar"

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not on the PATH")
needs_native = pytest.mark.skipif(bool(native.problem()), reason=f"stoker-native {native.problem()}")


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images of two classes, as shards."""
    root = tmp_path_factory.mktemp("native")
    make_tree(root / "pets", {"ant": 15, "bee": 15})
    assert stoker("data", "convert", root / "pets", root / "shards", "--shard-samples", 8) == 0
    return root / "shards" / "train"


def picture(width: int, height: int) -> Image.Image:
    """Smooth, with a little noise and sharp edges, so that every filter shows."""
    x, y = np.arange(width), np.arange(height)[:, None]
    noise = np.random.default_rng(width * 1000 + height).integers(0, 40, (height, width, 3))
    planes = np.dstack([2 * x + 0 * y, 0 * x + 3 * y, (x // 7 + y // 5) % 2 * 200]) % 216 + noise
    return Image.fromarray(planes.astype(np.uint8))


def saved(image: Image.Image, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **{"quality": 90, **options})
    return out.getvalue()


def both(data: bytes, crop: Crop, flip: bool, size: int, antialias: bool) -> tuple[Pixels, Pixels]:
    """What the general decoder gives, and what the native one does."""
    header = Decoder().look(data)
    general, natively = (np.full((size, size, 3), 77, dtype=np.uint8) for _ in range(2))
    Decoder(antialias=antialias).fill(data, header, crop, flip, general)
    left = NativeDecoder(antialias=antialias).fill([Task(0, data, header, crop, flip)], natively[None])
    assert left == []
    return general, natively


def decibels(one: Pixels, other: Pixels) -> float:
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


def sample_images() -> list[bytes]:
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE.name} does not lie beside the project")
    with tarfile.open(SAMPLE) as tar:
        return [file.read() for member in tar if (file := tar.extractfile(member))]


@needs_native
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("transform", ["imagenet-train", "imagenet-val", "small-train", "whole"])
def test_real_images_come_out_as_they_do_by_the_general_decoder(transform: str, antialias: bool) -> None:
    images = sample_images()
    numbers = draws(3, 1, np.arange(len(images), dtype=np.int64)).tolist()
    found = []
    for data, drawn in zip(images, numbers, strict=True):
        header = Decoder().look(data)
        if header.turn != 1:
            continue
        crop, flip = TRANSFORMS[transform](224)(header.width, header.height, drawn)
        found.append(decibels(*both(data, crop, flip, 224, antialias)))
    assert len(found) > 150
    assert min(found) >= 45
    assert np.median(found) >= 50


KINDS = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:2:0": {"subsampling": "4:2:0"},
    "restarts": {"restart_marker_rows": 1},
    "rgb": {"keep_rgb": True},
}


def encoded(image: Image.Image, colours: str) -> bytes:
    """A JPEG with colours as Pillow does not store them."""
    data: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90, colorsubsampling=colours)
    return data


def jpeg_of(kind: str, image: Image.Image, **options: object) -> bytes:
    if kind == "grey":
        return saved(image.convert("L"), **options)
    return encoded(image, "440") if kind == "4:4:0" else saved(image, **KINDS[kind], **options)


@needs_native
@pytest.mark.parametrize("kind", [*KINDS, "grey", "4:4:0"])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_crop_of_any_plain_jpeg(kind: str, data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 120))
    jpeg = jpeg_of(kind, picture(width, height))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    crop = Crop(left, top, data.draw(st.integers(1, width - left)), data.draw(st.integers(1, height - top)))
    if data.draw(st.booleans()):  # between pixels
        crop = Crop(crop.left + 0.25, crop.top + 0.5, crop.width - 0.375, crop.height - 0.625)
    least = math.ceil(max(crop.width, crop.height) / MOST_BLURRED)
    size, flip, antialias = data.draw(st.integers(least, 70)), data.draw(st.booleans()), data.draw(st.booleans())
    general, natively = both(jpeg, crop, flip, size, antialias)
    assert np.abs(general.astype(int) - natively).max() <= 3


@needs_native
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 3000), st.integers(1, 40), st.booleans(), st.integers(8, 40))
def test_long_and_narrow_images(length: int, width: int, upright: bool, size: int) -> None:
    """What shrinks more than eight times along one side, the general decoder shrinks by areas first."""
    sides = (width, length) if upright else (length, width)
    data, crop = saved(picture(*sides), quality=100, subsampling="4:4:4"), Crop(0, 0, *sides)
    task, out = Task(0, data, Header(*sides, 1), crop, False), np.zeros((1, size, size, 3), dtype=np.uint8)
    left = NativeDecoder().fill([task], out)
    general = np.zeros((size, size, 3), dtype=np.uint8)
    Decoder().fill(data, Decoder().look(data), crop, False, general)
    if not left:
        assert decibels(general, out[0]) >= 45
    else:
        assert max(sides) > MOST_BLURRED * size
        pillow = resized(simplejpeg.decode_jpeg(data), crop, size)
        assert np.abs(general.astype(int) - pillow).mean() <= 4


@needs_native
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [9, 32, 101])
def test_a_large_jpeg_that_libjpeg_itself_shrinks(size: int, antialias: bool) -> None:
    data = saved(picture(1203, 905))
    for crop in (Crop(0, 0, 1203, 905), Crop(101, 57, 911, 731), Crop(400.5, 3.25, 801.5, 900.75)):
        general, natively = both(data, crop, True, size, antialias)
        assert decibels(general, natively) >= 45, crop


def by_libjpeg_too(task: Task, size: int, antialias: bool) -> tuple[bool, bool]:
    """Whether our own decoding, and libjpeg's, take an image; if both do, the same bytes come out."""
    rows = [np.zeros((1, size, size, 3), dtype=np.uint8) for _ in range(2)]
    left = [NativeDecoder(antialias=antialias, simd=simd).fill([task], rows[simd]) for simd in (True, False)]
    if left == [[], []]:
        assert np.array_equal(*rows)
    return not left[0], not left[1]


@needs_native
@pytest.mark.parametrize("kind", [*KINDS, "grey", "4:4:0"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_our_own_decoding_gives_the_same_bytes_as_libjpegs(kind: str, data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    size = data.draw(st.integers(math.ceil(max(width, height) / MOST_BLURRED), 67))
    quality, optimize = data.draw(st.sampled_from([1, 40, 90, 100])), data.draw(st.booleans())
    jpeg = jpeg_of(kind, picture(width, height), quality=quality, optimize=optimize)
    numbers = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=23, max_size=23))
    crop, flip = random_resized_crop(width, height, numbers)
    antialias = data.draw(st.booleans())
    for one in (crop, CenterCrop(size)(width, height, [])[0]):
        assert by_libjpeg_too(Task(0, jpeg, Header(width, height, 1), one, flip), size, antialias) == (True, True)


@needs_native
def test_real_images_come_out_as_they_do_by_libjpeg() -> None:
    for number, data in enumerate(sample_images()):
        header = Decoder().look(data)
        crop, flip = random_resized_crop(header.width, header.height, draws(5, number, np.arange(1)).tolist()[0])
        if header.turn == 1:
            assert by_libjpeg_too(Task(0, data, header, crop, flip), 224, bool(number % 2)) == (True, True)


@needs_native
@pytest.mark.parametrize("of", [1, 16, 64])
@pytest.mark.parametrize("image", [picture(60, 50), picture(60, 1).resize((60, 50))], ids=["picture", "stripes"])
def test_numbers_beyond_16_bits_wrap_around_as_libjpegs_do(image: Image.Image, of: int) -> None:
    """Stripes have only a first row of coefficients, for which libjpeg takes a way of its own."""
    data = bytearray(saved(image, quality=100, subsampling="4:4:4"))
    for table in (match.end() for match in re.finditer(rb"\xff\xdb..", data, re.DOTALL)):
        data[table + 1 : table + 1 + of] = bytes([255]) * of
    task = Task(0, bytes(data), Header(60, 50, 1), Crop(0, 0, 60, 50), False)
    assert by_libjpeg_too(task, 60, False) == (True, True)


def edited(marker: int, at: int, *values: int) -> bytes:
    """A JPEG with restarts, of which some bytes behind a marker and its length are others."""
    data = bytearray(saved(picture(60, 50), restart_marker_rows=1))
    start = data.index(bytes([0xFF, marker])) + 4 + at
    data[start : start + len(values)] = bytes(values)
    return bytes(data)


def with_restarts() -> bytes:
    return saved(picture(60, 50), restart_marker_rows=1)


SCANS = {
    "colours coded in another order": edited(0xDA, 1, 1, 0x00, 3, 0x11, 2, 0x11),
    "a DC table that is none": edited(0xDA, 2, 0x50),
    "an AC table that is none": edited(0xDA, 2, 0x0F),
    "an AC table that is not there": edited(0xDA, 2, 0x03),
    "a quantisation table that is none": edited(0xC0, 8, 9),
    "a part of the coefficients": edited(0xDA, 8, 62),
    "only the upper bits": edited(0xDA, 9, 1),
    "too many codes of a length": edited(0xC4, 1, 3),
    "a code of ones": edited(0xC4, 1, 2),
    "restarts out of order": with_restarts().replace(b"\xff\xd1", b"\xff\xd3"),
    "a restart that is not there": with_restarts().replace(b"\xff\xd1", b""),
}


@needs_native
@pytest.mark.parametrize("kind", SCANS)
def test_a_scan_that_libjpeg_refuses_is_refused(kind: str) -> None:
    task = Task(0, SCANS[kind], Header(60, 50, 1), Crop(0, 0, 60, 50), False)
    assert by_libjpeg_too(task, 32, False) == (False, False)


def long_run() -> bytes:
    """Blocks with a DC of nothing and four times sixteen zeros, where there is room for 63."""
    small = saved(Image.new("L", (60, 50)))
    bits = 56 * ("00" + 4 * "11111111001")
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return small[: small.index(b"\xff\xda") + 10] + scan + b"\xff\xd9"


@needs_native
@pytest.mark.parametrize("data", [long_run(), with_restarts().replace(b"\xff\xd1", b"\0\xff\xd1")])
def test_damage_that_libjpeg_is_silent_about_is_left_to_the_general_decoder(data: bytes) -> None:
    """It also shows that our own decoding is at work here, not libjpeg's."""
    import stoker_native  # type: ignore[import-not-found, unused-ignore]

    task = Task(0, data, Header(60, 50, 1), Crop(0, 0, 60, 50), False)
    assert by_libjpeg_too(task, 32, False) == (not stoker_native.SIMD, True)


def twelve_bits() -> bytes:
    data = bytearray(saved(picture(60, 50)))
    data[data.index(b"\xff\xc0") + 4] = 12
    return bytes(data)


def sized(width: int, height: int) -> bytes:
    """A JPEG that claims another size than its pixels have."""
    data = bytearray(saved(picture(60, 50)))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def arithmetic() -> bytes:
    return saved(picture(60, 50)).replace(b"\xff\xc0", b"\xff\xc9", 1)


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture(60, 50), exif=exif)


def png() -> bytes:
    out = io.BytesIO()
    picture(60, 50).save(out, "PNG")
    return out.getvalue()


def without(marker: int, data: bytes) -> bytes:
    """The same JPEG without the segments of a kind."""
    at, out = 2, bytearray(data[:2])
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] != marker:
            out += data[at:end]
        at = end
    return bytes(out + data[at:])


def with_thumbnail(cut: int) -> bytes:
    """A JPEG that was cut short, with a whole one in its header."""
    data, small = saved(picture(90, 80)), saved(picture(8, 8))
    segment = b"\xff\xec" + struct.pack(">H", len(small) + 2) + small
    return (data[:2] + segment + data[2:])[:-cut]


def hidden_size() -> bytes:
    """Two frames: the first behind a marker that has no length, which a careless walk would take for a segment."""
    small = saved(picture(60, 50))
    frame = small[small.index(b"\xff\xc0") :][:19]
    return b"\xff\xd8\xff\x01" + struct.pack(">H", len(frame) + 2) + frame + saved(picture(120, 110))[2:]


def grey(factors: int, damaged_at: int | None = None) -> bytes:
    """A grey JPEG whose only component claims to be stored at so many times the size, which means nothing."""
    data = bytearray(saved(picture(60, 64).convert("L")))
    data[data.index(b"\xff\xc0") + 11] = factors
    if damaged_at is not None:
        scan = data.index(b"\xff\xda") + 10
        data[scan + damaged_at : scan + damaged_at + 2] = b"\xff\xd9"
    return bytes(data)


@needs_native
@pytest.mark.parametrize("factors", [0x11, 0x21, 0x12, 0x22, 0x14, 0x44])
def test_a_grey_jpeg_with_odd_factors_is_decoded_as_by_libjpeg(factors: int) -> None:
    for crop in (Crop(0, 0, 60, 64), Crop(7, 9, 40, 8)):
        task = Task(0, grey(factors), Header(60, 64, 1), crop, False)
        assert by_libjpeg_too(task, 32, False) == (True, True)
        cut = task._replace(data=grey(factors, 65))
        ours, libjpegs = by_libjpeg_too(cut, 32, False)
        assert libjpegs or not ours


ODD = {
    "progressive": saved(picture(60, 50), progressive=True),
    "cmyk": saved(picture(60, 50).convert("CMYK")),
    "4:1:1": encoded(picture(64, 50), "411"),
    "no quantisation tables": without(0xDB, saved(picture(60, 50))),
    **{f"cut short by {cut}, with a thumbnail": with_thumbnail(cut) for cut in (20, 400, 900)},
    "a size behind a marker without length": hidden_size(),
    "12 bits": twelve_bits(),
    "arithmetic": arithmetic(),
    "turned": turned(),
    "png": png(),
    "cut short": saved(picture(60, 50))[:-300],
    "without its end": saved(picture(60, 50))[:-2],
    "cut in the header": saved(picture(60, 50))[:100],
    "no rows": sized(60, 0),
    "no columns": sized(0, 50),
    "more rows than there are": sized(60, 400),
    "huge": sized(65500, 65500),
    "wide": sized(65500, 2000),
    "empty": b"",
    "two bytes": b"\xff\xd8",
    "markers alone": b"\xff\xd8\xff\xd9",
    "fill bytes": b"\xff\xd8" + b"\xff" * 5000,
    "a segment beyond the end": b"\xff\xd8\xff\xe0\xff\xff",
    "text": b"no image at all, but longer than sixteen bytes",
}


def rows_of(images: Sequence[bytes], *, natively: bool, planes: bool = False) -> tuple[Pixels, list[tuple[int, str]]]:
    """A batch and its bad rows; every position draws the same crop in both ways."""
    rows = PixelRows(
        TRANSFORMS["imagenet-train"](40),
        size=40,
        planes=planes,
        antialias=True,
        seed=0,
        buffers=Buffers(),
        native=natively,
    )
    room = rows.room(len(images))
    room[:] = 0
    filled = rows.fill(room, 0, images, 0, np.arange(len(images), dtype=np.int64))
    return room, filled.bad


@needs_native
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("kind", ODD)
def test_what_it_does_not_decode_is_decoded_or_refused_as_without_it(kind: str, planes: bool) -> None:
    fine = saved(picture(80, 70))
    images = [fine, ODD[kind], fine]
    odd = Header(60, 50, 1)
    with suppress(BadImageError):
        odd = Decoder().look(ODD[kind])
    box = Crop(0, 0, odd.width, odd.height)
    task, out = Task(0, ODD[kind], odd, box, False), np.zeros((1, 8, 8, 3), dtype=np.uint8)
    decoder = NativeDecoder()
    assert decoder.look([ODD[kind]]) == [None] or decoder.fill([task], out) == [task]
    (general, bad), (natively, also_bad) = (rows_of(images, natively=on, planes=planes) for on in (False, True))
    assert also_bad == bad
    good = [row for row in range(3) if row not in dict(bad)]
    assert 0 in good
    assert 2 in good
    assert np.abs(general[good].astype(int) - natively[good]).max() <= 3


@needs_native
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_bytes_come_back_as_a_value(data: st.DataObject) -> None:
    """And the image after it is decoded as by a new decoder."""
    jpeg = bytearray(saved(picture(50, 40), subsampling=data.draw(st.sampled_from(["4:4:4", "4:2:0"]))))
    for _ in range(data.draw(st.integers(1, 6))):
        jpeg[data.draw(st.integers(0, len(jpeg) - 1))] = data.draw(st.integers(0, 255))
    image = bytes(jpeg[: len(jpeg) - data.draw(st.sampled_from([0, 0, 0, 1, 200]))])
    decoder, out = NativeDecoder(), np.zeros((2, 20, 20, 3), dtype=np.uint8)
    fine = saved(picture(30, 30))
    tasks = [
        Task(0, image, Header(50, 40, 1), Crop(3, 2, 40, 30), False),
        Task(1, fine, Header(30, 30, 1), Crop(0, 0, 30, 30), False),
    ]
    decoder.look([image])
    left = decoder.fill(tasks, out)
    assert [task.row for task in left] in ([], [0])
    alone = np.zeros((1, 20, 20, 3), dtype=np.uint8)
    assert NativeDecoder().fill([tasks[1]._replace(row=0)], alone) == []
    assert np.array_equal(out[1], alone[0])


@needs_native
@pytest.mark.parametrize("marker", [0xC4, 0xDB])
def test_an_image_without_tables_never_gets_those_of_the_one_before(marker: int) -> None:
    """Without Huffman tables the standard ones are meant, as in a film's frames; without the others it is damaged."""
    bare, before = without(marker, saved(picture(64, 48))), saved(picture(64, 48), quality=20, optimize=True)
    task = Task(0, bare, Header(64, 48, 1), Crop(0, 0, 64, 48), False)
    alone, after = (np.zeros((1, 32, 32, 3), dtype=np.uint8) for _ in range(2))
    left = NativeDecoder().fill([task], alone)
    decoder = NativeDecoder()
    assert decoder.fill([task._replace(data=before)], after) == []
    after[:] = 0
    assert decoder.fill([task], after) == left
    assert np.array_equal(alone, after)
    assert (left == []) == (marker == 0xC4)


@needs_native
def test_an_image_of_another_size_than_its_header_told_is_refused() -> None:
    task = Task(0, saved(picture(60, 50)), Header(61, 50, 1), Crop(0, 0, 9, 9), False)
    assert NativeDecoder().fill([task], np.zeros((1, 8, 8, 3), dtype=np.uint8)) == [task]


@needs_native
def test_boxes_that_leave_the_image_are_refused() -> None:
    data, out = saved(picture(60, 50)), np.zeros((1, 8, 8, 3), dtype=np.uint8)
    nan, far = float("nan"), float("inf")
    for box in [
        (-1, 0, 9, 9),
        (0, 0, 61, 9),
        (0, 45, 9, 9),
        (0, 0, 0, 9),
        (nan, 0, 9, 9),
        (0, 0, far, 9),
        (0, 0, 9, nan),
    ]:
        task = Task(0, data, Header(60, 50, 1), Crop(*box), False)
        assert NativeDecoder().fill([task], out) == [task], box
    assert not out.any()


@needs_native
def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    import stoker_native  # type: ignore[import-not-found, unused-ignore]

    decoder, data = stoker_native.Decoder(), saved(picture(60, 50))
    box, out = np.array([[0, 0, 60, 50, 60, 50]], dtype=np.float64), np.zeros((1, 8, 8, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="boxes is 48 bytes, and should be 96"):
        decoder.fill([data, data], box, b"\0\0", out, 8, True)
    with pytest.raises(ValueError, match="flips is 2 bytes"):
        decoder.fill([data], box, b"\0\0", out, 8, True)
    with pytest.raises(ValueError, match="out is 192 bytes, and should be 243"):
        decoder.fill([data], box, b"\0", out, 9, True)
    with pytest.raises(ValueError, match="side of 0"):
        decoder.fill([data], box, b"\0", out, 0, True)
    with pytest.raises(TypeError):
        decoder.fill((data,), box, b"\0", out, 8, True)
    with pytest.raises(TypeError):
        decoder.fill([3], box, b"\0", out, 8, True)
    with pytest.raises((BufferError, TypeError, ValueError)):
        decoder.fill([data], box, b"\0", out.tobytes(), 8, True)
    assert not out.any()
    assert decoder.fill([data], box, b"\0", out, 8, True) == b"\0"
    assert out.any()


@needs_native
def test_a_decoder_that_two_threads_use_says_so() -> None:
    import stoker_native  # type: ignore[import-not-found, unused-ignore]

    decoder = stoker_native.Decoder()
    images = [saved(picture(600, 500))] * 64
    boxes = np.tile(np.array([[0, 0, 600, 500, 600, 500]], dtype=np.float64), (64, 1))
    out = np.empty((64, 224, 224, 3), dtype=np.uint8)
    done: list[bytes] = []

    def fill(count: int) -> None:
        while not said:  # until one call meets another
            try:
                done.append(decoder.fill(images[:count], boxes[:count], bytes(count), out[:count], 224, True))
            except RuntimeError as error:
                said.add(str(error))

    said: set[str] = set()
    thread = threading.Thread(target=fill, args=(64,))
    thread.start()
    fill(0)
    thread.join()
    assert said == {"a decoder serves one thread at a time"}
    assert set(done) <= {bytes(64), b""}
    assert decoder.fill(images, boxes, bytes(64), out, 224, True) == bytes(64)


@needs_native
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_the_loader_gives_the_same_batches_with_either(pets: Path, layout: str) -> None:
    batches = {}
    for decoder in ("native", "python"):
        with Loader(pets, global_batch=7, size=48, layout=layout, decoder=decoder, seat=(0, 1)) as loader:
            batches[decoder] = list(loader)
    for one, other in zip(batches["native"], batches["python"], strict=True):
        assert one.labels.tolist() == other.labels.tolist()
        assert one.images.shape == other.images.shape
        assert np.abs(one.images.astype(int) - other.images).max() <= 3


def test_an_unknown_decoder_is_a_fault_like_others(pets: Path) -> None:
    with pytest.raises(SpecError, match="decoder: 'gpu' is none of auto, native, python"):
        Loader(pets, global_batch=4, decoder="gpu", seat=(0, 1))


HIDDEN = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "stoker_native" else found(name, *more)
"""
LOADS = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from stoker import Loader
from stoker.errors import MissingError
for _ in range(2):
    with Loader(sys.argv[1], global_batch=8, size=32, seat=(0, 1)) as loader:
        print(sum(batch.count for batch in loader))
try:
    Loader(sys.argv[1], global_batch=8, decoder="native", seat=(0, 1))
except MissingError as error:
    print(error)
"""


def test_without_it_the_loader_says_once_which_decoder_it_uses(pets: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN + LOADS, pets], capture_output=True, text=True, check=True)
    said, first, second, missing = done.stdout.splitlines()
    assert said == "images are decoded by simplejpeg and OpenCV: the native decoder is not installed"
    assert int(first) == int(second) > 0
    assert missing == f"the native decoder is not installed; {native.HINT}"


LOADS_IN_WORKERS = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from torch.utils.data import DataLoader
from stoker.load.torch import Dataset
for _ in range(2):
    dataset = Dataset(sys.argv[1], global_batch=8, size=32, seat=(0, 1))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[2])
    print(sum(batch.count for batch in loader))
"""


def beside(folder: Path, module: str) -> dict[str, str]:
    """An environment in which this is stoker_native."""
    (folder / "stoker_native.py").write_text(module)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes_do_not_say_it_again(pets: Path, tmp_path: Path, start: str) -> None:
    command = [sys.executable, "-c", LOADS_IN_WORKERS, str(pets), start]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=beside(tmp_path, "API = 99"))
    said, first, second = done.stdout.splitlines()
    assert "images are decoded by simplejpeg and OpenCV" in said
    assert "images are decoded" not in done.stderr  # to where a process writes that has set up no logging
    assert int(first) == int(second) > 0


@pytest.mark.parametrize(
    ("module", "why"),
    [("API = 99", "is of another version"), ("", "is of another version"), ("import no_such", "cannot be loaded")],
)
def test_one_that_does_not_fit_is_told_and_not_used(pets: Path, tmp_path: Path, module: str, why: str) -> None:
    command = [sys.executable, "-c", LOADS, str(pets)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=beside(tmp_path, module))
    said, first, _, missing = done.stdout.splitlines()
    assert why in said
    assert int(first) > 0
    assert why in missing


def test_without_avx2_it_is_not_used_unless_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "problem", lambda: "")
    monkeypatch.setattr(native, "_loaded", lambda: SimpleNamespace(SIMD=0))
    native._say_once.cache_clear()
    assert native.chosen("native") == "native"
    assert native.chosen("auto") == "python"
    assert native.chosen("auto") == "python"
    (record,) = caplog.records
    assert record.getMessage().endswith("the native decoder is slow on this processor, which has no AVX2")


@needs_native
def test_what_was_decoded_natively_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path / "plain", {"ant": 6})
    folder = tmp_path / "plain/ant"
    for number in range(3):
        (folder / f"odd-{number}.jpg").write_bytes(ODD["progressive"])
    assert stoker("data", "convert", tmp_path / "plain", tmp_path / "shards") == 0
    for decoder, wanted in (("native", 6), ("python", 0)):
        with Loader(tmp_path / "shards/train", global_batch=4, size=32, decoder=decoder, seat=(0, 1)) as loader:
            assert sum(batch.count for batch in loader) == 9
            assert (loader.times.natively, loader.times.images) == (wanted, 9)
    bench = ("data", "bench", tmp_path / "shards/train", "--batch", "9", "--size", "32", "--seconds", "0.2")
    capsys.readouterr()
    assert stoker(*bench, "--decoder", "native", "--json") == 0
    assert json.loads(capsys.readouterr().out)["natively"] == pytest.approx(6 / 9)
    for decoder, told in (("native", True), ("python", False)):
        assert stoker(*bench, "--decoder", decoder) == 0
        assert ("33% of the images are decoded by simplejpeg" in " ".join(capsys.readouterr().err.split())) is told


def test_it_serves_only_the_named_transforms(pets: Path) -> None:
    for transform in (None, lambda pixels, _: pixels):
        with pytest.raises(SpecError, match="serves only the transforms that are named"):
            Loader(pets, global_batch=4, decoder="native", transform=transform, seat=(0, 1))


@needs_native
def test_with_it_the_loader_says_so_once(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    native._say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            Loader(pets, global_batch=8, seat=(0, 1)).close()
    assert [record.getMessage() for record in caplog.records] == ["images are decoded by stoker-native"]


def corpus(folder: Path) -> list[Path]:
    """Inputs for the fuzzer's entry point: every kind of image, with different crops, whole and damaged."""
    random = np.random.default_rng(7)
    plain = [saved(picture(w, h), **KINDS[kind]) for w, h in ((1, 1), (33, 17), (70, 90)) for kind in KINDS]
    files = []
    plain += [jpeg_of(kind, picture(50, 40), quality=20) for kind in ("grey", "4:4:0")]
    plain += [grey(factors, at) for factors in (0x22, 0x14) for at in (None, 65)]
    for number, data in enumerate([*plain, *ODD.values(), *SCANS.values(), long_run()]):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), 3) if data else ():
            damaged[at] = random.integers(0, 256)
        for name, image in (("whole", data), ("damaged", bytes(damaged))):
            path = folder / f"{name}-{number}"
            path.write_bytes(random.bytes(6) + bytes([random.integers(0, 2)]) + image)
            files.append(path)
    return files


OPTIMISED = ("-O3", "-ffp-contract=off")
"""As meson.build has it."""


def built(folder: Path, compiler: str, *flags: str) -> Path:
    """The fuzzer's entry point as a program."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not on the PATH")
    if not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("libjpeg-turbo's headers are not installed")
    program = folder / "entry"
    sources = [
        NATIVE / "fuzz" / "fuzz_crop.c",
        *(NATIVE / "src" / f"{name}.c" for name in ("crop", "baseline", "resize")),
    ]
    command = [compiler, "-g", *OPTIMISED, *flags, *map(str, sources), "-o", str(program), "-ljpeg", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@needs_valgrind
def test_valgrind_finds_nothing(tmp_path: Path) -> None:
    program, files = built(tmp_path, "cc", "-DREPLAY"), corpus(tmp_path)
    command = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite", program]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{len(files)} files\n"


MODULE = """
import struct, sys
import stoker_native
decoder = stoker_native.Decoder()
for path in sys.argv[1:]:
    data = open(path, "rb").read()[7:]
    (looked,) = stoker_native.look([data])
    width, height, _ = looked or (64, 64, False)
    boxes = struct.pack("12d", 1, 0, width - 1, height, width, height, 0, 0, width, height, width, height)
    decoder.fill([data, None], boxes, bytes(2), bytearray(2 * 3 * 30 * 30), 30, True)
boxes, out = bytes(48), bytearray(300)
for bad in (
    (3,), ([3], boxes, b"0", out, 10, True), ([b""], b"", b"0", out, 10, True), ([b""], boxes, b"", out, 10, True),
    ([b""], boxes, b"0", b"", 10, True), ([b""], boxes, b"0", out, 0, True), (b"", boxes, b"0", out, 10, True),
):
    try:
        decoder.fill(*bad)
    except (TypeError, ValueError, BufferError):
        continue
    sys.exit(f"{bad} was taken")
try:
    stoker_native.look([b"", 3])
except TypeError:
    print("done")
"""


@needs_native
@needs_valgrind
def test_valgrind_finds_nothing_in_the_module(tmp_path: Path) -> None:
    command = ["valgrind", "-q", sys.executable, "-c", MODULE, *corpus(tmp_path)]
    environment = os.environ | {"PYTHONMALLOC": "malloc"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-4000:]
    assert "stoker_native" not in done.stderr  # of itself, the interpreter has some to tell


def test_the_compilers_sanitizers_find_nothing(tmp_path: Path) -> None:
    flags = ("-DREPLAY", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program, files = built(tmp_path, "cc", *flags), corpus(tmp_path)
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_libfuzzer_finds_nothing(tmp_path: Path) -> None:
    program = built(tmp_path, "clang", "-fsanitize=address,undefined,fuzzer")
    seeds, found = tmp_path / "seeds", tmp_path / "found"
    seeds.mkdir()
    found.mkdir()
    corpus(seeds)
    options = [
        f"-max_total_time={os.environ.get('STOKER_FUZZ_S', '60')}",
        "-max_len=6000",
        "-timeout=20",
        "-rss_limit_mb=0",  # what this process holds would count
        "-malloc_limit_mb=256",
        f"-artifact_prefix={tmp_path}/",
        f"-seed={os.getpid()}",
    ]
    done = subprocess.run([program, *options, found, seeds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
