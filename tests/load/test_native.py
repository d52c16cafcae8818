"""The native decoder compared with the general decoder and with libjpeg: same pixels, no crash on bad input."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
import simplejpeg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker.load.buffers import BufferPool
from stoker.load.collate import PixelCollator
from stoker.load.decode import MAX_BLUR_FACTOR, Decoder, DecodeTask, Header, Pixels
from stoker.load.native import NativeDecoder
from stoker.load.transforms import TRANSFORMS, CenterCrop, Crop, random_numbers, random_resized_crop
from stoker.shards.images import BadImageError, resize_box
from tests.load.jpegs import (
    BROKEN_SCANS,
    SUBSAMPLINGS,
    UNSUPPORTED,
    encode_jpeg,
    gray_jpeg,
    long_run,
    make_jpeg,
    needs_native,
    picture,
    sample_images,
    with_restarts,
    without_segments,
)


def decode_with_both(data: bytes, crop: Crop, flip: bool, size: int, antialias: bool) -> tuple[Pixels, Pixels]:
    """Decode with the general and with the native decoder."""
    header = Decoder().read_header(data)
    general, native = (np.full((size, size, 3), 77, dtype=np.uint8) for _ in range(2))
    Decoder(antialias=antialias).fill(data, header, crop, flip, general)
    unsupported = NativeDecoder(antialias=antialias).fill([DecodeTask(0, data, header, crop, flip)], native[None])
    assert unsupported == []
    return general, native


def psnr(one: Pixels, other: Pixels) -> float:
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


@needs_native
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("transform", ["imagenet-train", "imagenet-val", "small-train", "whole"])
def test_real_images_are_close_to_the_general_decoder(transform: str, antialias: bool) -> None:
    images = sample_images()
    numbers = random_numbers(3, 1, np.arange(len(images), dtype=np.int64)).tolist()
    values = []
    for data, sample_numbers in zip(images, numbers, strict=True):
        header = Decoder().read_header(data)
        if header.orientation != 1:
            continue
        crop, flip = TRANSFORMS[transform](224)(header.width, header.height, sample_numbers)
        values.append(psnr(*decode_with_both(data, crop, flip, 224, antialias)))
    assert len(values) > 150
    assert min(values) >= 45
    assert np.median(values) >= 50


@needs_native
@pytest.mark.parametrize("kind", [*SUBSAMPLINGS, "gray", "4:4:0"])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_crop_of_any_baseline_jpeg(kind: str, data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 120))
    jpeg = make_jpeg(kind, picture(width, height))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    crop = Crop(left, top, data.draw(st.integers(1, width - left)), data.draw(st.integers(1, height - top)))
    if data.draw(st.booleans()):  # between pixels
        crop = Crop(crop.left + 0.25, crop.top + 0.5, crop.width - 0.375, crop.height - 0.625)
    least = math.ceil(max(crop.width, crop.height) / MAX_BLUR_FACTOR)
    size, flip, antialias = data.draw(st.integers(least, 70)), data.draw(st.booleans()), data.draw(st.booleans())
    general, native = decode_with_both(jpeg, crop, flip, size, antialias)
    assert np.abs(general.astype(int) - native).max() <= 3


@needs_native
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 3000), st.integers(1, 40), st.booleans(), st.integers(8, 40))
def test_long_and_narrow_images(length: int, width: int, upright: bool, size: int) -> None:
    """Beyond a shrink factor of eight along one side, the general decoder averages areas first."""
    sides = (width, length) if upright else (length, width)
    data, crop = encode_jpeg(picture(*sides), quality=100, subsampling="4:4:4"), Crop(0, 0, *sides)
    task, out = DecodeTask(0, data, Header(*sides, 1), crop, False), np.zeros((1, size, size, 3), dtype=np.uint8)
    left = NativeDecoder().fill([task], out)
    general = np.zeros((size, size, 3), dtype=np.uint8)
    Decoder().fill(data, Decoder().read_header(data), crop, False, general)
    if not left:
        assert psnr(general, out[0]) >= 45
    else:
        assert max(sides) > MAX_BLUR_FACTOR * size
        pillow = resize_box(simplejpeg.decode_jpeg(data), crop, size)
        assert np.abs(general.astype(int) - pillow).mean() <= 4


@needs_native
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [9, 32, 101])
def test_large_jpeg_with_scaled_decoding(size: int, antialias: bool) -> None:
    data = encode_jpeg(picture(1203, 905))
    for crop in (Crop(0, 0, 1203, 905), Crop(101, 57, 911, 731), Crop(400.5, 3.25, 801.5, 900.75)):
        general, native = decode_with_both(data, crop, True, size, antialias)
        assert psnr(general, native) >= 45, crop


def compare_with_libjpeg(task: DecodeTask, size: int, antialias: bool) -> tuple[bool, bool]:
    """Return whether our baseline decoder and libjpeg support an image; if both do, compare the bytes."""
    rows = [np.zeros((1, size, size, 3), dtype=np.uint8) for _ in range(2)]
    left = [NativeDecoder(antialias=antialias, simd=simd).fill([task], rows[simd]) for simd in (True, False)]
    if left == [[], []]:
        assert np.array_equal(*rows)
    return not left[0], not left[1]


@needs_native
@pytest.mark.parametrize("kind", [*SUBSAMPLINGS, "gray", "4:4:0"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_baseline_decoder_is_bit_identical_to_libjpeg(kind: str, data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    size = data.draw(st.integers(math.ceil(max(width, height) / MAX_BLUR_FACTOR), 67))
    quality, optimize = data.draw(st.sampled_from([1, 40, 90, 100])), data.draw(st.booleans())
    jpeg = make_jpeg(kind, picture(width, height), quality=quality, optimize=optimize)
    numbers = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=23, max_size=23))
    crop, flip = random_resized_crop(width, height, numbers)
    antialias = data.draw(st.booleans())
    for one in (crop, CenterCrop(size)(width, height, [])[0]):
        assert compare_with_libjpeg(DecodeTask(0, jpeg, Header(width, height, 1), one, flip), size, antialias) == (
            True,
            True,
        )


@needs_native
def test_real_images_are_bit_identical_to_libjpeg() -> None:
    for number, data in enumerate(sample_images()):
        header = Decoder().read_header(data)
        crop, flip = random_resized_crop(
            header.width, header.height, random_numbers(5, number, np.arange(1)).tolist()[0]
        )
        if header.orientation == 1:
            assert compare_with_libjpeg(DecodeTask(0, data, header, crop, flip), 224, bool(number % 2)) == (True, True)


@needs_native
@pytest.mark.parametrize("of", [1, 16, 64])
@pytest.mark.parametrize("image", [picture(60, 50), picture(60, 1).resize((60, 50))], ids=["picture", "stripes"])
def test_coefficients_beyond_16_bits_wrap_around_as_in_libjpeg(image: Image.Image, of: int) -> None:
    """Stripes have coefficients in the first row only, for which libjpeg has a shortcut."""
    data = bytearray(encode_jpeg(image, quality=100, subsampling="4:4:4"))
    for table in (match.end() for match in re.finditer(rb"\xff\xdb..", data, re.DOTALL)):
        data[table + 1 : table + 1 + of] = bytes([255]) * of
    task = DecodeTask(0, bytes(data), Header(60, 50, 1), Crop(0, 0, 60, 50), False)
    assert compare_with_libjpeg(task, 60, False) == (True, True)


@needs_native
@pytest.mark.parametrize("kind", BROKEN_SCANS)
def test_scans_that_libjpeg_rejects_are_rejected(kind: str) -> None:
    task = DecodeTask(0, BROKEN_SCANS[kind], Header(60, 50, 1), Crop(0, 0, 60, 50), False)
    assert compare_with_libjpeg(task, 32, False) == (False, False)


@needs_native
@pytest.mark.parametrize("data", [long_run(), with_restarts().replace(b"\xff\xd1", b"\0\xff\xd1")])
def test_damage_that_libjpeg_does_not_report_is_left_to_the_general_decoder(data: bytes) -> None:
    """This also shows that our baseline decoder is in use, not libjpeg."""
    import stoker_native  # type: ignore[import-not-found, unused-ignore]

    task = DecodeTask(0, data, Header(60, 50, 1), Crop(0, 0, 60, 50), False)
    assert compare_with_libjpeg(task, 32, False) == (not stoker_native.SIMD, True)


@needs_native
@pytest.mark.parametrize("factors", [0x11, 0x21, 0x12, 0x22, 0x14, 0x44])
def test_grayscale_jpeg_with_unusual_sampling_factors_matches_libjpeg(factors: int) -> None:
    for crop in (Crop(0, 0, 60, 64), Crop(7, 9, 40, 8)):
        task = DecodeTask(0, gray_jpeg(factors), Header(60, 64, 1), crop, False)
        assert compare_with_libjpeg(task, 32, False) == (True, True)
        cut = task._replace(data=gray_jpeg(factors, 65))
        ours, libjpeg = compare_with_libjpeg(cut, 32, False)
        assert libjpeg or not ours


def collate(
    images: Sequence[bytes], *, native: bool, channels_first: bool = False
) -> tuple[Pixels, list[tuple[int, str]]]:
    """Return a batch and its bad rows; crops are the same with either decoder."""
    collator = PixelCollator(
        TRANSFORMS["imagenet-train"](40),
        size=40,
        channels_first=channels_first,
        antialias=True,
        seed=0,
        buffers=BufferPool(),
        native=native,
    )
    rows = collator.allocate(len(images))
    rows[:] = 0
    result = collator.fill(rows, 0, images, 0, np.arange(len(images), dtype=np.int64))
    return rows, result.bad


@needs_native
@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_images_are_handled_as_without_the_native_decoder(kind: str, channels_first: bool) -> None:
    good_image = encode_jpeg(picture(80, 70))
    images = [good_image, UNSUPPORTED[kind], good_image]
    header = Header(60, 50, 1)
    with suppress(BadImageError):
        header = Decoder().read_header(UNSUPPORTED[kind])
    box = Crop(0, 0, header.width, header.height)
    task, out = DecodeTask(0, UNSUPPORTED[kind], header, box, False), np.zeros((1, 8, 8, 3), dtype=np.uint8)
    decoder = NativeDecoder()
    assert decoder.read_headers([UNSUPPORTED[kind]]) == [None] or decoder.fill([task], out) == [task]
    (general, bad), (native, also_bad) = (
        collate(images, native=use_native, channels_first=channels_first) for use_native in (False, True)
    )
    assert also_bad == bad
    good = [row for row in range(3) if row not in dict(bad)]
    assert 0 in good
    assert 2 in good
    assert np.abs(general[good].astype(int) - native[good]).max() <= 3


@needs_native
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_images_are_returned_as_unsupported(data: st.DataObject) -> None:
    """The next image is decoded as by a new decoder."""
    jpeg = bytearray(encode_jpeg(picture(50, 40), subsampling=data.draw(st.sampled_from(["4:4:4", "4:2:0"]))))
    for _ in range(data.draw(st.integers(1, 6))):
        jpeg[data.draw(st.integers(0, len(jpeg) - 1))] = data.draw(st.integers(0, 255))
    image = bytes(jpeg[: len(jpeg) - data.draw(st.sampled_from([0, 0, 0, 1, 200]))])
    decoder, out = NativeDecoder(), np.zeros((2, 20, 20, 3), dtype=np.uint8)
    good_image = encode_jpeg(picture(30, 30))
    tasks = [
        DecodeTask(0, image, Header(50, 40, 1), Crop(3, 2, 40, 30), False),
        DecodeTask(1, good_image, Header(30, 30, 1), Crop(0, 0, 30, 30), False),
    ]
    decoder.read_headers([image])
    unsupported = decoder.fill(tasks, out)
    assert [task.row for task in unsupported] in ([], [0])
    alone = np.zeros((1, 20, 20, 3), dtype=np.uint8)
    assert NativeDecoder().fill([tasks[1]._replace(row=0)], alone) == []
    assert np.array_equal(out[1], alone[0])


@needs_native
@pytest.mark.parametrize("marker", [0xC4, 0xDB])
def test_an_image_without_tables_does_not_inherit_those_of_the_previous_image(marker: int) -> None:
    """Without Huffman tables the standard ones apply, as in Motion JPEG; without quantization tables it is damaged."""
    bare, before = (
        without_segments(marker, encode_jpeg(picture(64, 48))),
        encode_jpeg(picture(64, 48), quality=20, optimize=True),
    )
    task = DecodeTask(0, bare, Header(64, 48, 1), Crop(0, 0, 64, 48), False)
    alone, after = (np.zeros((1, 32, 32, 3), dtype=np.uint8) for _ in range(2))
    left = NativeDecoder().fill([task], alone)
    decoder = NativeDecoder()
    assert decoder.fill([task._replace(data=before)], after) == []
    after[:] = 0
    assert decoder.fill([task], after) == left
    assert np.array_equal(alone, after)
    assert (left == []) == (marker == 0xC4)


@needs_native
def test_an_image_whose_size_differs_from_the_header_is_rejected() -> None:
    task = DecodeTask(0, encode_jpeg(picture(60, 50)), Header(61, 50, 1), Crop(0, 0, 9, 9), False)
    assert NativeDecoder().fill([task], np.zeros((1, 8, 8, 3), dtype=np.uint8)) == [task]


@needs_native
def test_boxes_outside_the_image_are_rejected() -> None:
    data, out = encode_jpeg(picture(60, 50)), np.zeros((1, 8, 8, 3), dtype=np.uint8)
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
        task = DecodeTask(0, data, Header(60, 50, 1), Crop(*box), False)
        assert NativeDecoder().fill([task], out) == [task], box
    assert not out.any()


@needs_native
def test_invalid_arguments_are_rejected_before_anything_is_written() -> None:
    import stoker_native  # type: ignore[import-not-found, unused-ignore]

    decoder, data = stoker_native.Decoder(), encode_jpeg(picture(60, 50))
    box, out = np.array([[0, 0, 60, 50, 60, 50]], dtype=np.float64), np.zeros((1, 8, 8, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"boxes .*\b48\b.*\b96\b"):
        decoder.fill([data, data], box, b"\0\0", out, 8, True)
    with pytest.raises(ValueError, match=r"flips .*\b2\b.*\b1\b"):
        decoder.fill([data], box, b"\0\0", out, 8, True)
    with pytest.raises(ValueError, match=r"out .*\b192\b.*\b243\b"):
        decoder.fill([data], box, b"\0", out, 9, True)
    with pytest.raises(ValueError, match=r"side .*\b0\b"):
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
def test_concurrent_use_of_a_decoder_is_an_error() -> None:
    import stoker_native  # type: ignore[import-not-found, unused-ignore]

    decoder = stoker_native.Decoder()
    images = [encode_jpeg(picture(600, 500))] * 64
    boxes = np.tile(np.array([[0, 0, 600, 500, 600, 500]], dtype=np.float64), (64, 1))
    out = np.empty((64, 224, 224, 3), dtype=np.uint8)
    done: list[bytes] = []

    def fill(count: int) -> None:
        while not errors:  # until two calls overlap
            try:
                done.append(decoder.fill(images[:count], boxes[:count], bytes(count), out[:count], 224, True))
            except RuntimeError as error:
                errors.append(error)

    errors: list[RuntimeError] = []
    thread = threading.Thread(target=fill, args=(64,))
    thread.start()
    fill(0)
    thread.join()
    assert {str(error) for error in errors} == {"decoder is in use by another thread"}
    assert set(done) <= {bytes(64), b""}
    assert decoder.fill(images, boxes, bytes(64), out, 224, True) == bytes(64)
