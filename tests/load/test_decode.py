"""Every kind of image through the decoder, against PIL and OpenCV; real ones where they lie beside the project."""

from __future__ import annotations

import io
import itertools
import struct
import tarfile

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from stoker.load.decode import Decoder, Pixels, to_planes
from stoker.load.transforms import Crop, draws, random_resized_crop
from stoker.shards.images import BadImageError
from tests.support.paths import SHARED
from tests.support.trees import image_bytes

SAMPLE = SHARED / "data" / "imagenet-sample-200.tar"
ORIENTATION = 0x0112


def picture(width: int, height: int) -> Image.Image:
    """A smooth picture in which no two corners are alike, and no turn or mirror gives itself."""
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    planes = (255 * (x + 0 * y), 255 * (0 * x + y), 255 * (0.5 + 0.5 * np.sin(5 * x + 9 * y * y)))
    return Image.fromarray(np.dstack(planes).astype(np.uint8))


def saved(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def turned(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    return exif


def filled(data: bytes, crop: Crop | None = None, flip: bool = False, size: int = 32, antialias: bool = True) -> Pixels:
    """What one image gives; without a crop all of it."""
    decoder = Decoder(antialias=antialias)
    header = decoder.look(memoryview(data))
    out = np.full((size, size, 3), 77, dtype=np.uint8)
    decoder.fill(memoryview(data), header, crop or Crop(0, 0, header.width, header.height), flip, out)
    return out


def by_pil(upright: Image.Image, crop: Crop | None = None, flip: bool = False, size: int = 32) -> Pixels:
    left, top, width, height = crop or Crop(0, 0, *upright.size)
    image = upright.convert("RGB").crop((left, top, left + width, top + height))
    image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(ImageOps.mirror(image) if flip else image)


def difference(one: Pixels, other: Pixels) -> float:
    """The mean absolute difference in grey levels."""
    return float(np.abs(one.astype(np.int64) - other).mean())


@pytest.fixture(scope="module")
def sample() -> list[bytes]:
    """The images of the ImageNet sample."""
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE.name} does not lie beside the project")
    with tarfile.open(SAMPLE) as tar:
        members = [tar.extractfile(member) for member in tar if member.isfile()]
        images = [file.read() for file in members if file]
    assert len(images) == 200
    return images


def test_val_matches_pil_on_every_image(sample: list[bytes]) -> None:
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
        assert difference(filled(data, crop, flip, 224), expected) <= 2, number


def test_train_stays_near_pil_and_is_opencvs_without_antialias(sample: list[bytes]) -> None:
    numbers = draws(0, 0, np.arange(len(sample), dtype=np.int64)).tolist()
    away, exact = [], 0
    for number, (data, drawn) in enumerate(zip(sample, numbers, strict=True)):
        with Image.open(io.BytesIO(data)) as image:
            image = ImageOps.exif_transpose(image).convert("RGB")
        crop, flip = random_resized_crop(*image.size, drawn)
        away.append(difference(filled(data, crop, flip, 224), by_pil(image, crop, flip, 224)))
        if min(crop.width, crop.height) >= 4 * 224:  # there the JPEG decoder itself shrinks
            continue
        left, top, width, height = map(int, crop)
        part = np.asarray(image)[top : top + height, left : left + width]
        plain = cv2.resize(part, (224, 224), interpolation=cv2.INTER_LINEAR)
        plain = plain[:, ::-1] if flip else plain
        assert np.array_equal(filled(data, crop, flip, 224, antialias=False), plain), number
        exact += 1
    assert np.mean(away) < 1.0
    assert max(away) < 4.0
    assert exact > 150


CROPS = [None, Crop(3, 41, 50, 20), Crop(70, 5, 17, 60), Crop(1.5, 2.25, 30.75, 41.125)]


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_all_turns_and_mirrors_with_crops_off_the_centre(turn: int, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(picture(101, 67), kind, exif=turned(turn), **options)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    assert upright.size == ((67, 101) if turn >= 5 else (101, 67))
    header = Decoder().look(data)
    assert (header.width, header.height) == upright.size
    for crop, flip in itertools.product(CROPS, (False, True)):
        if crop is not None and turn >= 5:
            crop = Crop(crop.top / 2, crop.left / 2, crop.height / 2, crop.width / 2)
            crop = crop if crop.left == 1.125 else Crop(*map(int, crop))
        if crop is None or crop == Crop(*map(int, crop)):
            expected = by_pil(upright, crop, flip)
        else:
            box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
            expected = np.asarray(upright.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR, box=box))
            expected = expected[:, ::-1] if flip else expected
        assert difference(filled(data, crop, flip), expected) < 1.5, (crop, flip)


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_large_turned_jpeg_that_the_decoder_shrinks(turn: int) -> None:
    data = saved(picture(1203, 905), exif=turned(turn))
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    width, height = upright.size
    for flip in (False, True):
        crop = Crop(101, 57, width - 211, height - 173)
        assert difference(filled(data, crop, flip), by_pil(upright, crop, flip)) < 1.5


@pytest.mark.parametrize("turn", [3, 6])
def test_an_orientation_that_pillow_reads_is_not_passed_over(turn: int) -> None:
    """As a LONG, which cameras write too, and in XMP alone; the converter's --max-side turns by both."""
    tiff = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHII", ORIENTATION, 4, 1, turn) + bytes(4)
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
    )
    for data in (saved(picture(101, 67), exif=tiff), saved(picture(101, 67), xmp=xmp % turn)):
        with Image.open(io.BytesIO(data)) as image:
            upright = ImageOps.exif_transpose(image)
        header = Decoder().look(data)
        assert (header.width, header.height) == upright.size
        assert difference(filled(data), by_pil(upright)) < 1.5


def palette(transparency: bool) -> bytes:
    image = Image.new("P", (40, 30), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (0, 0, 20, 30))
    return saved(image, "PNG", **({"transparency": 0} if transparency else {}))


def restarted() -> bytes:
    """A JPEG with a restart marker after every other row of blocks."""
    data = saved(picture(200, 150), restart_marker_rows=1)
    assert b"\xff\xd0" in data
    assert b"\xff\xdd" in data
    return data


def adobe_cmyk(progressive: bool = False) -> bytes:
    return saved(picture(200, 150).convert("CMYK"), progressive=progressive)


ALIKE = {
    "420": saved(picture(200, 150), subsampling="4:2:0"),
    "422": saved(picture(200, 150), subsampling="4:2:2"),
    "444": saved(picture(200, 150), subsampling="4:4:4"),
    "odd 420": saved(picture(201, 151), subsampling="4:2:0"),
    "progressive": saved(picture(200, 150), progressive=True),
    "restart markers": restarted(),
    "rgb": saved(picture(200, 150), keep_rgb=True),
    "cmyk": adobe_cmyk(),
    "progressive cmyk": adobe_cmyk(progressive=True),
    "grey": saved(picture(200, 150).convert("L")),
    "grey png": saved(picture(200, 150).convert("L"), "PNG"),
    "png": saved(picture(200, 150), "PNG"),
    "webp": saved(picture(200, 150), "WEBP", lossless=True),
    "bmp": saved(picture(200, 150), "BMP"),
    "gif": saved(picture(200, 150), "GIF"),
    "ppm": saved(picture(200, 150), "PPM"),
    "trailing bytes": saved(picture(200, 150)) + bytes(99),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("size", [16, 32, 224])
def test_every_kind_is_what_pil_makes_of_it(name: str, size: int) -> None:
    data = ALIKE[name]
    with Image.open(io.BytesIO(data)) as image:
        upright = image.convert("RGB")
    for crop, flip in ((None, False), (Crop(30, 20, 111, 97), True), (Crop(150, 140, 9, 10), False)):
        assert difference(filled(data, crop, flip, size), by_pil(upright, crop, flip, size)) < 1.5
    assert np.array_equal(Decoder().whole(memoryview(data)), np.asarray(upright))


@pytest.mark.parametrize(
    ("data", "left", "right"),
    [
        (palette(False), (255, 0, 0), (0, 0, 255)),
        (palette(True), (255, 255, 255), (0, 0, 255)),
        (saved(Image.new("I;16", (40, 30), 0x4040), "PNG"), (64,) * 3, (64,) * 3),
        (saved(Image.new("RGBA", (40, 30), (0, 0, 0, 128)), "PNG"), (127,) * 3, (127,) * 3),
        (saved(Image.new("LA", (40, 30), (0, 0)), "PNG"), (255,) * 3, (255,) * 3),
        (saved(Image.new("1", (40, 30), 1), "PNG"), (255,) * 3, (255,) * 3),
        (saved(Image.new("CMYK", (40, 30), (255, 0, 0, 0)), "TIFF"), (0, 255, 255), (0, 255, 255)),
    ],
    ids=["palette", "transparent palette", "16 bits", "rgba", "grey alpha", "1 bit", "cmyk tiff"],
)
@pytest.mark.parametrize("antialias", [True, False])
def test_flat_colours(data: bytes, left: tuple[int, int, int], right: tuple[int, int, int], antialias: bool) -> None:
    out = filled(data, Crop(0, 0, 40, 30), antialias=antialias)
    assert np.abs(out[:, :12].astype(int) - left).max() <= 1
    assert np.abs(out[:, -12:].astype(int) - right).max() <= 1
    mirrored = filled(data, Crop(0, 0, 40, 30), flip=True, antialias=antialias)
    assert np.array_equal(mirrored, out[:, ::-1])


def test_sixteen_bits_of_rgb() -> None:
    pixels = np.zeros((20, 20, 3), dtype=np.uint16)
    pixels[:, :, 2] = 0x8080
    done, encoded = cv2.imencode(".png", pixels)  # BGR
    assert done
    assert np.array_equal(filled(encoded.tobytes())[5, 5], [128, 0, 0])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("antialias", [True, False])
def test_one_pixel(kind: str, antialias: bool) -> None:
    from stoker.load.transforms import TRANSFORMS

    data = saved(Image.new("RGB", (1, 1), (200, 30, 60)), kind)
    for transform in TRANSFORMS.values():
        crop, flip = transform(224)(1, 1, draws(0, 0, np.array([5]))[0].tolist())
        out = filled(data, crop, flip, 224, antialias)
        assert (np.abs(out.astype(int) - (200, 30, 60)) <= 6).all()
    assert Decoder().whole(data).shape == (1, 1, 3)


@pytest.mark.parametrize(("width", "height"), [(1, 3000), (3000, 1), (2, 1), (9000, 17), (3, 3)])
@pytest.mark.parametrize("antialias", [True, False])
def test_long_and_narrow(width: int, height: int, antialias: bool) -> None:
    from stoker.load.transforms import TRANSFORMS

    for kind in ("JPEG", "PNG"):
        data = saved(Image.new("RGB", (width, height), (200, 30, 60)), kind)
        for transform, position in itertools.product(TRANSFORMS.values(), range(5)):
            crop, flip = transform(64)(width, height, draws(0, 0, np.array([position]))[0].tolist())
            out = filled(data, crop, flip, 64, antialias)
            assert (np.abs(out.astype(int) - (200, 30, 60)) <= 6).all()


WIDE = (5_000, 4_000)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"progressive": True, "exif": turned(6)}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("PNG", "RGB", {"compress_level": 1}),
        ("WEBP", "RGB", {"quality": 50, "method": 0}),
    ],
    ids=["jpeg", "progressive", "progressive turned", "grey", "cmyk", "progressive cmyk", "png", "webp"],
)
def test_twenty_megapixels(kind: str, mode: str, options: dict[str, object]) -> None:
    image = Image.new("RGB", WIDE, (200, 30, 60))
    image.paste((20, 130, 220), (0, 0, 2_000, 2_000))  # one corner of the stored picture
    data = saved(image.convert(mode), kind, **options)
    with Image.open(io.BytesIO(data)) as stored:
        corner, rest = (stored.convert("RGB").getpixel(at) for at in ((500, 500), (4_500, 3_500)))
    whole = Decoder().whole(data)
    upright = whole.shape[1::-1]
    assert upright == (WIDE[::-1] if "exif" in options else WIDE)
    out = filled(data, Crop(100, 100, 3_800, 3_800), size=224)
    near, far = (out[20, -20], out[-20, 20]) if "exif" in options else (out[20, 20], out[-20, -20])
    assert np.abs(near.astype(int) - corner).max() <= 3
    assert np.abs(far.astype(int) - rest).max() <= 3


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:4:4"])
@pytest.mark.parametrize("size", [32, 100, 224])
def test_shrunk_by_the_decoder_is_close_to_shrunk_afterwards(subsampling: str, size: int) -> None:
    image = picture(2_403, 1_805)
    noise = np.random.default_rng(1).integers(-20, 20, (1_805, 2_403, 1))
    image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    data = saved(image, subsampling=subsampling)
    with Image.open(io.BytesIO(data)) as stored:
        upright = stored.convert("RGB")
    for crop in (None, Crop(333, 111, 1_234, 1_501), Crop(1_501, 3, 901, 1_800)):
        assert difference(filled(data, crop, size=size), by_pil(upright, crop, size=size)) < 1.5
        assert difference(filled(data, crop, size=size, antialias=False), by_pil(upright, crop, size=size)) < 8


@pytest.mark.parametrize(
    "options",
    [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}, {"subsampling": "4:4:4"}],
    ids=["plain", "progressive", "restart rows", "restart blocks", "444"],
)
def test_a_jpeg_cut_short_is_bad_wherever_the_crop_lies(options: dict[str, object]) -> None:
    data = saved(picture(400, 300), **options)
    decoder, out = Decoder(), np.empty((32, 32, 3), dtype=np.uint8)
    for length in range(0, len(data) - 60, 97):
        cut = data[:length]
        for crop in (Crop(0, 0, 40, 20), Crop(300, 250, 90, 40)):
            with pytest.raises(BadImageError):
                decoder.fill(cut, decoder.look(cut), crop, False, out)
        with pytest.raises(BadImageError):
            decoder.whole(cut)


def test_a_large_jpeg_cut_short_is_bad_when_the_decoder_shrinks_it() -> None:
    data = saved(picture(2_000, 1_500))
    decoder, out = Decoder(), np.empty((32, 32, 3), dtype=np.uint8)
    for share in (0.3, 0.7, 0.99):
        cut = data[: int(len(data) * share)]
        with pytest.raises(BadImageError):
            decoder.fill(cut, decoder.look(cut), Crop(0, 0, 1_900, 300), False, out)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_other_formats_cut_short_are_bad(kind: str) -> None:
    data = saved(picture(60, 40), kind)
    decoder, out = Decoder(), np.empty((8, 8, 3), dtype=np.uint8)
    for share in (0.05, 0.5, 0.9):
        cut = data[: int(len(data) * share)]
        with pytest.raises(BadImageError):
            decoder.fill(cut, decoder.look(cut), Crop(0, 0, 10, 10), False, out)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff", b"\xff\xd8\xff" + b"x" * 500, b"hello, world", bytes(4096)])
def test_what_is_no_image_is_bad(data: bytes) -> None:
    for look in (Decoder().look, Decoder().whole):
        with pytest.raises(BadImageError):
            look(memoryview(data))


def test_a_jpeg_of_too_many_pixels_is_bad() -> None:
    data = bytearray(image_bytes(1))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(BadImageError, match="more than"):
        Decoder().look(bytes(data))


def test_a_bad_image_does_no_harm_to_the_next() -> None:
    decoder, good = Decoder(), saved(picture(200, 150))
    expected = filled(good, Crop(10, 10, 90, 90))
    for bad in (good[:2_000], b"", saved(picture(300, 300), progressive=True)[:5_000]):
        with pytest.raises(BadImageError):
            decoder.fill(bad, decoder.look(bad), Crop(0, 0, 100, 100), False, np.empty((32, 32, 3), dtype=np.uint8))
        out = np.empty((32, 32, 3), dtype=np.uint8)
        decoder.fill(good, decoder.look(good), Crop(10, 10, 90, 90), False, out)
        assert np.array_equal(out, expected)


def test_a_decoder_keeps_nothing_of_the_image_before() -> None:
    sizes = [(200, 150), (30, 20), (900, 700), (31, 900), (200, 150)]
    decoder = Decoder()
    for width, height in sizes:
        data, out = saved(picture(width, height)), np.empty((32, 32, 3), dtype=np.uint8)
        decoder.fill(data, decoder.look(data), Crop(0, 0, width, height), False, out)
        assert np.array_equal(out, filled(data))


def test_whole_pixels_belong_to_the_caller() -> None:
    """A function may work in place, whatever the format was."""
    decoder = Decoder()
    for data in (ALIKE["420"], ALIKE["png"], ALIKE["cmyk"], saved(picture(20, 10), exif=turned(6))):
        pixels = decoder.whole(data)
        before = pixels.copy()
        assert pixels.flags.writeable
        decoder.whole(ALIKE["444"])
        assert np.array_equal(pixels, before)


def test_rows_are_written_where_they_lie() -> None:
    room = np.full((3, 32, 32, 3), 7, dtype=np.uint8)
    data = saved(picture(200, 150), exif=turned(6))
    for flip in (False, True):
        decoder = Decoder()
        decoder.fill(data, decoder.look(data), Crop(5, 6, 70, 80), flip, room[1])
        assert np.array_equal(room[1], filled(data, Crop(5, 6, 70, 80), flip))
    assert (room[0] == 7).all()
    assert (room[2] == 7).all()


def test_planes_are_the_pixels_transposed() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    room = np.zeros((2, 3, 16, 16), dtype=np.uint8)
    to_planes(pixels, room[1])
    assert np.array_equal(room[1], pixels.transpose(2, 0, 1))
    assert (room[0] == 0).all()
