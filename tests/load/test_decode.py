"""The general decoder on every kind of image, compared with Pillow and OpenCV; on real images if available."""

from __future__ import annotations

import io
import itertools
import struct
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from stoker import Loader
from stoker.load import native
from stoker.load.decode import DecodeCheck, Decoder, Pixels, hwc_to_chw
from stoker.load.transforms import Crop, random_numbers, random_resized_crop
from stoker.shards.images import MAX_PIXELS, BadImageError
from tests.load.jpegs import encode_441, needs_native
from tests.support.loaders import write_shards
from tests.support.paths import SHARED
from tests.support.trees import image_bytes

SAMPLE = SHARED / "data" / "imagenet-sample-200.tar"
ORIENTATION = 0x0112


def picture(width: int, height: int) -> Image.Image:
    """A smooth picture without symmetry: every rotation and flip of it is different."""
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    planes = (255 * (x + 0 * y), 255 * (0 * x + y), 255 * (0.5 + 0.5 * np.sin(5 * x + 9 * y * y)))
    return Image.fromarray(np.dstack(planes).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def exif_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def decode(data: bytes, crop: Crop | None = None, flip: bool = False, size: int = 32, antialias: bool = True) -> Pixels:
    """Decode a crop of an image, by default all of it."""
    decoder = Decoder(antialias=antialias)
    header = decoder.read_header(memoryview(data))
    out = np.full((size, size, 3), 77, dtype=np.uint8)
    decoder.fill(memoryview(data), header, crop or Crop(0, 0, header.width, header.height), flip, out)
    return out


def by_pillow(upright: Image.Image, crop: Crop | None = None, flip: bool = False, size: int = 32) -> Pixels:
    left, top, width, height = crop or Crop(0, 0, *upright.size)
    image = upright.convert("RGB").crop((left, top, left + width, top + height))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(ImageOps.mirror(image) if flip else image)


def difference(one: Pixels, other: Pixels) -> float:
    """The mean absolute difference in gray levels."""
    return float(np.abs(one.astype(np.int64) - other).mean())


@pytest.fixture(scope="module")
def sample() -> list[bytes]:
    """The images of the ImageNet sample."""
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE.name} not found")
    with tarfile.open(SAMPLE) as tar:
        members = [tar.extractfile(member) for member in tar if member.isfile()]
        images = [file.read() for file in members if file]
    assert len(images) == 200
    return images


def test_validation_crop_matches_pillow(sample: list[bytes]) -> None:
    from stoker.load.transforms import CenterCrop

    center = CenterCrop(224)
    for number, data in enumerate(sample):
        with Image.open(io.BytesIO(data)) as image:
            image = ImageOps.exif_transpose(image).convert("RGB")
        short = min(image.size)
        wide, high = (int(256 * side / short) for side in image.size)
        left, top = round((wide - 224) / 2), round((high - 224) / 2)
        resized = image.resize((wide, high), Image.Resampling.BILINEAR)
        expected = np.asarray(resized.crop((left, top, left + 224, top + 224)))
        crop, flip = center(*image.size, [])
        assert difference(decode(data, crop, flip, 224), expected) <= 2, number


def test_training_crop_is_close_to_pillow_and_equals_opencv_without_antialias(sample: list[bytes]) -> None:
    numbers = random_numbers(0, 0, np.arange(len(sample), dtype=np.int64)).tolist()
    differences, exact = [], 0
    for number, (data, sample_numbers) in enumerate(zip(sample, numbers, strict=True)):
        with Image.open(io.BytesIO(data)) as image:
            image = ImageOps.exif_transpose(image).convert("RGB")
        crop, flip = random_resized_crop(*image.size, sample_numbers)
        differences.append(difference(decode(data, crop, flip, 224), by_pillow(image, crop, flip, 224)))
        if min(crop.width, crop.height) >= 4 * 224:  # scaled by the JPEG decoder
            continue
        left, top, width, height = map(int, crop)
        part = np.asarray(image)[top : top + height, left : left + width]
        plain = cv2.resize(part, (224, 224), interpolation=cv2.INTER_LINEAR)
        plain = plain[:, ::-1] if flip else plain
        assert np.array_equal(decode(data, crop, flip, 224, antialias=False), plain), number
        exact += 1
    assert np.mean(differences) < 1.0
    assert max(differences) < 4.0
    assert exact > 150


CROPS = [None, Crop(3, 41, 50, 20), Crop(70, 5, 17, 60), Crop(1.5, 2.25, 30.75, 41.125)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_all_orientations_and_flips_with_off_center_crops(orientation: int, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(picture(101, 67), kind, exif=exif_orientation(orientation), **options)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    assert upright.size == ((67, 101) if orientation >= 5 else (101, 67))
    header = Decoder().read_header(data)
    assert (header.width, header.height) == upright.size
    for crop, flip in itertools.product(CROPS, (False, True)):
        if crop is not None and orientation >= 5:
            crop = Crop(crop.top / 2, crop.left / 2, crop.height / 2, crop.width / 2)
            crop = crop if crop.left == 1.125 else Crop(*map(int, crop))
        if crop is None or crop == Crop(*map(int, crop)):
            expected = by_pillow(upright, crop, flip)
        else:
            box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
            expected = np.asarray(upright.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR, box=box))
            expected = expected[:, ::-1] if flip else expected
        assert difference(decode(data, crop, flip), expected) < 1.5, (crop, flip)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_large_rotated_jpeg_with_scaled_decoding(orientation: int) -> None:
    data = encode(picture(1203, 905), exif=exif_orientation(orientation))
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    width, height = upright.size
    for flip in (False, True):
        crop = Crop(101, 57, width - 211, height - 173)
        assert difference(decode(data, crop, flip), by_pillow(upright, crop, flip)) < 1.5


@pytest.mark.parametrize("orientation", [3, 6])
def test_orientations_that_pillow_reads_are_applied(orientation: int) -> None:
    """Stored as a LONG, as some cameras do, and only in XMP; `data convert --max-side` applies both."""
    tiff = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHII", ORIENTATION, 4, 1, orientation) + bytes(4)
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
    )
    for data in (encode(picture(101, 67), exif=tiff), encode(picture(101, 67), xmp=xmp % orientation)):
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
        header = Decoder().read_header(data)
        assert (header.width, header.height) == upright.size
        assert difference(decode(data), by_pillow(upright)) < 1.5


def palette(transparency: bool) -> bytes:
    image = Image.new("P", (40, 30), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (0, 0, 20, 30))
    return encode(image, "PNG", **({"transparency": 0} if transparency else {}))


def restarted() -> bytes:
    """A JPEG with restart markers."""
    data = encode(picture(200, 150), restart_marker_rows=1)
    assert b"\xff\xd0" in data
    assert b"\xff\xdd" in data
    return data


def adobe_cmyk(progressive: bool = False) -> bytes:
    return encode(picture(200, 150).convert("CMYK"), progressive=progressive)


FORMATS_LIKE_PILLOW = {
    "420": encode(picture(200, 150), subsampling="4:2:0"),
    "422": encode(picture(200, 150), subsampling="4:2:2"),
    "444": encode(picture(200, 150), subsampling="4:4:4"),
    "420 with odd size": encode(picture(201, 151), subsampling="4:2:0"),
    "progressive": encode(picture(200, 150), progressive=True),
    "restart markers": restarted(),
    "rgb": encode(picture(200, 150), keep_rgb=True),
    "cmyk": adobe_cmyk(),
    "progressive cmyk": adobe_cmyk(progressive=True),
    "gray": encode(picture(200, 150).convert("L")),
    "gray png": encode(picture(200, 150).convert("L"), "PNG"),
    "png": encode(picture(200, 150), "PNG"),
    "webp": encode(picture(200, 150), "WEBP", lossless=True),
    "bmp": encode(picture(200, 150), "BMP"),
    "gif": encode(picture(200, 150), "GIF"),
    "ppm": encode(picture(200, 150), "PPM"),
    "trailing bytes": encode(picture(200, 150)) + bytes(99),
}


@pytest.mark.parametrize("name", FORMATS_LIKE_PILLOW)
@pytest.mark.parametrize("size", [16, 32, 224])
def test_every_format_matches_pillow(name: str, size: int) -> None:
    data = FORMATS_LIKE_PILLOW[name]
    with Image.open(io.BytesIO(data)) as image:
        upright = image.convert("RGB")
    for crop, flip in ((None, False), (Crop(30, 20, 111, 97), True), (Crop(150, 140, 9, 10), False)):
        assert difference(decode(data, crop, flip, size), by_pillow(upright, crop, flip, size)) < 1.5
    assert np.array_equal(Decoder().decode_whole(memoryview(data)), np.asarray(upright))


@pytest.mark.parametrize(
    ("data", "left", "right"),
    [
        (palette(False), (255, 0, 0), (0, 0, 255)),
        (palette(True), (255, 255, 255), (0, 0, 255)),
        (encode(Image.new("I;16", (40, 30), 0x4040), "PNG"), (64,) * 3, (64,) * 3),
        (encode(Image.new("RGBA", (40, 30), (0, 0, 0, 128)), "PNG"), (127,) * 3, (127,) * 3),
        (encode(Image.new("LA", (40, 30), (0, 0)), "PNG"), (255,) * 3, (255,) * 3),
        (encode(Image.new("1", (40, 30), 1), "PNG"), (255,) * 3, (255,) * 3),
        (encode(Image.new("CMYK", (40, 30), (255, 0, 0, 0)), "TIFF"), (0, 255, 255), (0, 255, 255)),
    ],
    ids=["palette", "transparent palette", "16 bits", "rgba", "gray alpha", "1 bit", "cmyk tiff"],
)
@pytest.mark.parametrize("antialias", [True, False])
def test_uniform_colors(data: bytes, left: tuple[int, int, int], right: tuple[int, int, int], antialias: bool) -> None:
    out = decode(data, Crop(0, 0, 40, 30), antialias=antialias)
    assert np.abs(out[:, :12].astype(int) - left).max() <= 1
    assert np.abs(out[:, -12:].astype(int) - right).max() <= 1
    flipped = decode(data, Crop(0, 0, 40, 30), flip=True, antialias=antialias)
    assert np.array_equal(flipped, out[:, ::-1])


def test_16_bit_rgb() -> None:
    pixels = np.zeros((20, 20, 3), dtype=np.uint16)
    pixels[:, :, 2] = 0x8080
    done, encoded = cv2.imencode(".png", pixels)  # BGR
    assert done
    assert np.array_equal(decode(encoded.tobytes())[5, 5], [128, 0, 0])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("antialias", [True, False])
def test_images_of_one_pixel(kind: str, antialias: bool) -> None:
    from stoker.load.transforms import TRANSFORMS

    data = encode(Image.new("RGB", (1, 1), (200, 30, 60)), kind)
    for transform in TRANSFORMS.values():
        crop, flip = transform(224)(1, 1, random_numbers(0, 0, np.array([5]))[0].tolist())
        out = decode(data, crop, flip, 224, antialias)
        assert (np.abs(out.astype(int) - (200, 30, 60)) <= 6).all()
    assert Decoder().decode_whole(data).shape == (1, 1, 3)


@pytest.mark.parametrize(("width", "height"), [(1, 3000), (3000, 1), (2, 1), (9000, 17), (3, 3)])
@pytest.mark.parametrize("antialias", [True, False])
def test_long_and_narrow_images(width: int, height: int, antialias: bool) -> None:
    from stoker.load.transforms import TRANSFORMS

    for kind in ("JPEG", "PNG"):
        data = encode(Image.new("RGB", (width, height), (200, 30, 60)), kind)
        for transform, position in itertools.product(TRANSFORMS.values(), range(5)):
            crop, flip = transform(64)(width, height, random_numbers(0, 0, np.array([position]))[0].tolist())
            out = decode(data, crop, flip, 64, antialias)
            assert (np.abs(out.astype(int) - (200, 30, 60)) <= 6).all()


WIDE = (5_000, 4_000)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"progressive": True, "exif": exif_orientation(6)}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("PNG", "RGB", {"compress_level": 1}),
        ("WEBP", "RGB", {"quality": 50, "method": 0}),
    ],
    ids=["jpeg", "progressive", "progressive rotated", "gray", "cmyk", "progressive cmyk", "png", "webp"],
)
def test_images_of_20_megapixels(kind: str, mode: str, options: dict[str, object]) -> None:
    image = Image.new("RGB", WIDE, (200, 30, 60))
    image.paste((20, 130, 220), (0, 0, 2_000, 2_000))  # one corner of the stored image
    data = encode(image.convert(mode), kind, **options)
    with Image.open(io.BytesIO(data)) as stored:
        corner, rest = (stored.convert("RGB").getpixel(at) for at in ((500, 500), (4_500, 3_500)))
    whole = Decoder().decode_whole(data)
    upright = whole.shape[1::-1]
    assert upright == (WIDE[::-1] if "exif" in options else WIDE)
    out = decode(data, Crop(100, 100, 3_800, 3_800), size=224)
    near, far = (out[20, -20], out[-20, 20]) if "exif" in options else (out[20, 20], out[-20, -20])
    assert np.abs(near.astype(int) - corner).max() <= 3
    assert np.abs(far.astype(int) - rest).max() <= 3


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:4:4"])
@pytest.mark.parametrize("size", [32, 100, 224])
def test_scaled_decoding_is_close_to_resizing_afterwards(subsampling: str, size: int) -> None:
    image = picture(2_403, 1_805)
    noise = np.random.default_rng(1).integers(-20, 20, (1_805, 2_403, 1))
    image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    data = encode(image, subsampling=subsampling)
    with Image.open(io.BytesIO(data)) as stored:
        upright = stored.convert("RGB")
    for crop in (None, Crop(333, 111, 1_234, 1_501), Crop(1_501, 3, 901, 1_800)):
        assert difference(decode(data, crop, size=size), by_pillow(upright, crop, size=size)) < 1.5
        assert difference(decode(data, crop, size=size, antialias=False), by_pillow(upright, crop, size=size)) < 8


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}, {"subsampling": "4:4:4"}],
    ids=["plain", "progressive", "restart rows", "restart blocks", "444"],
)
def test_truncated_jpeg_is_bad_wherever_the_crop_is(options: dict[str, object]) -> None:
    data = encode(picture(400, 300), **options)
    decoder, out = Decoder(), np.empty((32, 32, 3), dtype=np.uint8)
    for length in range(0, len(data) - 60, 97):
        cut = data[:length]
        for crop in (Crop(0, 0, 40, 20), Crop(300, 250, 90, 40)):
            with pytest.raises(BadImageError):
                decoder.fill(cut, decoder.read_header(cut), crop, False, out)
        with pytest.raises(BadImageError):
            decoder.decode_whole(cut)


def test_large_truncated_jpeg_is_bad_with_scaled_decoding() -> None:
    data = encode(picture(2_000, 1_500))
    decoder, out = Decoder(), np.empty((32, 32, 3), dtype=np.uint8)
    for share in (0.3, 0.7, 0.99):
        cut = data[: int(len(data) * share)]
        with pytest.raises(BadImageError):
            decoder.fill(cut, decoder.read_header(cut), Crop(0, 0, 1_900, 300), False, out)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_other_truncated_formats_are_bad(kind: str) -> None:
    data = encode(picture(60, 40), kind)
    decoder, out = Decoder(), np.empty((8, 8, 3), dtype=np.uint8)
    for share in (0.05, 0.5, 0.9):
        cut = data[: int(len(data) * share)]
        with pytest.raises(BadImageError):
            decoder.fill(cut, decoder.read_header(cut), Crop(0, 0, 10, 10), False, out)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff" + b"x" * 500, b"hello, world", bytes(4096)])
def test_data_that_is_no_image_is_bad(data: bytes) -> None:
    for read in (Decoder().read_header, Decoder().decode_whole):
        with pytest.raises(BadImageError):
            read(memoryview(data))


def test_jpeg_with_too_many_pixels_is_bad() -> None:
    data = bytearray(image_bytes(1))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(BadImageError, match=f"60000×60000.*{MAX_PIXELS:,}"):
        Decoder().read_header(bytes(data))


def test_a_bad_image_does_not_affect_the_next() -> None:
    decoder, good = Decoder(), encode(picture(200, 150))
    expected = decode(good, Crop(10, 10, 90, 90))
    for bad in (good[:2_000], b"", encode(picture(300, 300), progressive=True)[:5_000]):
        with pytest.raises(BadImageError):
            decoder.fill(
                bad, decoder.read_header(bad), Crop(0, 0, 100, 100), False, np.empty((32, 32, 3), dtype=np.uint8)
            )
        out = np.empty((32, 32, 3), dtype=np.uint8)
        decoder.fill(good, decoder.read_header(good), Crop(10, 10, 90, 90), False, out)
        assert np.array_equal(out, expected)


def test_decoder_does_not_leak_pixels_of_the_previous_image() -> None:
    sizes = [(200, 150), (30, 20), (900, 700), (31, 900), (200, 150)]
    decoder = Decoder()
    for width, height in sizes:
        data, out = encode(picture(width, height)), np.empty((32, 32, 3), dtype=np.uint8)
        decoder.fill(data, decoder.read_header(data), Crop(0, 0, width, height), False, out)
        assert np.array_equal(out, decode(data))


def test_whole_images_are_writable_and_owned_by_the_caller() -> None:
    """A user transform may work in place, whatever the image format is."""
    decoder = Decoder()
    for data in (
        FORMATS_LIKE_PILLOW["420"],
        FORMATS_LIKE_PILLOW["png"],
        FORMATS_LIKE_PILLOW["cmyk"],
        encode(picture(20, 10), exif=exif_orientation(6)),
    ):
        pixels = decoder.decode_whole(data)
        before = pixels.copy()
        assert pixels.flags.writeable
        decoder.decode_whole(FORMATS_LIKE_PILLOW["444"])
        assert np.array_equal(pixels, before)


def test_only_the_row_of_the_image_is_written() -> None:
    rows = np.full((3, 32, 32, 3), 7, dtype=np.uint8)
    data = encode(picture(200, 150), exif=exif_orientation(6))
    for flip in (False, True):
        decoder = Decoder()
        decoder.fill(data, decoder.read_header(data), Crop(5, 6, 70, 80), flip, rows[1])
        assert np.array_equal(rows[1], decode(data, Crop(5, 6, 70, 80), flip))
    assert (rows[0] == 7).all()
    assert (rows[2] == 7).all()


def test_hwc_to_chw_transposes() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    rows = np.zeros((2, 3, 16, 16), dtype=np.uint8)
    hwc_to_chw(pixels, rows[1])
    assert np.array_equal(rows[1], pixels.transpose(2, 0, 1))
    assert (rows[0] == 0).all()


JPEGS_441 = {
    "baseline": (picture(64, 96), encode_441(picture(64, 96))),
    "progressive": (picture(8, 128), encode_441(picture(8, 128), progressive=True)),
}


@pytest.mark.parametrize("kind", JPEGS_441)
def test_jpeg_whose_subsampling_simplejpeg_does_not_know(kind: str) -> None:
    image, data = JPEGS_441[kind]
    with pytest.raises(KeyError):
        simplejpeg.decode_jpeg_header(data)
    assert difference(decode(data), by_pillow(image)) < 4
    assert difference(Decoder().decode_whole(data), np.asarray(image)) < 6
    DecodeCheck()(data)


@pytest.mark.parametrize("decoder", ["python", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("kind", JPEGS_441)
def test_such_a_jpeg_is_a_sample_like_any_other(kind: str, decoder: str, tmp_path: Path) -> None:
    image, data = JPEGS_441[kind]
    url = write_shards(tmp_path / "set", [encode(image, subsampling="4:4:4"), data])
    with Loader(url, global_batch=2, transform="whole", size=32, decoder=decoder, max_bad=0) as loader:
        (batch,) = loader
        assert loader.bad == []
    one, other = (batch.images[batch.labels == label][0] for label in (0, 1))
    assert difference(one, other) < 6


@pytest.mark.parametrize("failure", [KeyError(6), MemoryError(), RuntimeError("of the library"), cv2.error("resize")])
def test_whatever_a_decoder_raises_is_a_fallback_or_a_bad_sample(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = picture(60, 40)
    expected = decode(encode(image))

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(simplejpeg, "decode_jpeg", fail)
    assert difference(decode(encode(image)), expected) < 1
    monkeypatch.setattr(simplejpeg, "decode_jpeg_header", fail)
    assert difference(decode(encode(image)), expected) < 1
    assert Decoder().decode_whole(encode(image)).shape == (40, 60, 3)
    monkeypatch.setattr("stoker.shards.images.Image.open", fail)
    url = write_shards(tmp_path / "set", [encode(image)] * 4)
    for transform in ("whole", lambda pixels, _: pixels):
        with Loader(url, global_batch=4, transform=transform, decoder="python", max_bad=1) as loader:
            assert [batch.count for batch in loader] == [0]
            reasons = {bad.reason for bad in loader.bad}
        assert len(reasons) == 1
        assert (str(failure) or "MemoryError") in reasons.pop()


def test_failure_to_resize_is_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cv2, "resize", lambda *_, **__: 1 // 0)
    with pytest.raises(BadImageError, match="division"):
        decode(encode(picture(60, 40)), Crop(0, 0, 40, 40))


def test_interrupting_the_decoder_is_not_a_bad_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simplejpeg, "decode_jpeg", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(encode(picture(60, 40)))


@needs_native
@pytest.mark.parametrize("method", ["read_headers", "fill"])
def test_images_are_decoded_by_the_general_decoder_if_the_native_one_fails(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing:
        API, SIMD = native.API, 1

        def read_headers(self, images: list[bytes]) -> list[tuple[int, int, bool]]:
            if method == "read_headers":
                raise MemoryError
            return [(60, 40, False) for _ in images]

        def Decoder(self, *, simd: bool) -> Failing:  # noqa: N802
            return self

        def fill(self, *_: object) -> bytes:
            raise MemoryError

    monkeypatch.setattr(native, "import_native", Failing)
    url = write_shards(tmp_path / "set", [encode(picture(60, 40))] * 4)
    with Loader(url, global_batch=4, transform="whole", size=32, decoder="native", max_bad=0) as loader:
        (batch,) = loader
        assert loader.times.native_images == 0
    assert difference(batch.images[0], decode(encode(picture(60, 40)))) == 0
