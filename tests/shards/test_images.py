import io
import struct
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from stoker.load.decode import DecodeCheck
from stoker.shards import images
from stoker.shards.formats import CANONICAL_EXTENSIONS
from stoker.shards.images import EXTENSIONS, MAX_BYTES, BadImageError, inspect_image, shrink, sniff
from tests.support.trees import image_bytes

check_decodes = DecodeCheck()


@pytest.mark.parametrize(
    ("kind", "extension"),
    [
        ("JPEG", "jpg"),
        ("PNG", "png"),
        ("WEBP", "webp"),
        ("BMP", "bmp"),
        ("GIF", "gif"),
        ("TIFF", "tif"),
        ("PPM", "ppm"),
    ],
)
def test_size_of_every_format(kind: str, extension: str) -> None:
    data = image_bytes(5, kind, (31, 17))
    assert sniff(data) == extension
    assert inspect_image(memoryview(data)) == (extension, 31, 17)
    check_decodes(memoryview(data))


def test_progressive_jpeg_and_trailing_bytes() -> None:
    out = io.BytesIO()
    Image.new("CMYK", (40, 30)).save(out, "JPEG", progressive=True)
    assert inspect_image(out.getvalue()) == ("jpg", 40, 30)
    assert inspect_image(image_bytes(1) + b"\0" * 100) == ("jpg", 24, 18)  # trailing bytes are ignored


def inspect_and_decode(data: bytes) -> None:
    inspect_image(data)
    check_decodes(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_every_truncation_is_detected(kind: str) -> None:
    data = image_bytes(3, kind)
    whole_without_iend = len(data) - 12 if kind == "PNG" else -1
    for length in range(0, len(data) - 1, 7):
        if length == whole_without_iend:
            continue
        with pytest.raises(BadImageError):
            inspect_and_decode(data[:length])


def test_end_of_a_thumbnail_is_not_the_end_of_the_image() -> None:
    thumbnail = image_bytes(1, size=(8, 8))
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    picture = image_bytes(2)
    whole = picture[:2] + segment + picture[2:]
    assert inspect_image(whole) == ("jpg", 24, 18)
    with pytest.raises(BadImageError, match="truncated"):
        inspect_image(whole[:-20])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, world, this is text", "not an image"),
        (b"\xff\xd8\xff\xd9", "truncated"),
        (b"\xff\xd8\xff\xe0\x00\x00" + b"x" * 20, "length of the JPEG segment at byte 2"),
        (b"\xff\xd8\xff\xe0\x00\x04ab\xff\xd9\x00\x02", "no scan"),
        (b"\xff\xd8\xff\xda\x00\x04ab" + b"\xff\xd9", "no frame header"),
        (b"\xff\xd8\xff\xe0\x00\x04abcd" + b"x" * 9, "JPEG marker at byte 8"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 4, "truncated"),
        (b"RIFF\0\0\0\0WEBPgarbage", "no readable header"),
    ],
)
def test_reasons_of_bad_images(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        inspect_image(data)


def test_empty_and_oversized_images() -> None:
    png = bytearray(image_bytes(1, "PNG"))
    png[16:24] = (0).to_bytes(4, "big") + (5).to_bytes(4, "big")
    with pytest.raises(BadImageError, match="0×5"):
        inspect_image(bytes(png))
    png[16:24] = (60_000).to_bytes(4, "big") * 2
    with pytest.raises(BadImageError, match="60000×60000"):
        inspect_image(bytes(png))


def test_shrink_keeps_the_aspect_ratio_and_applies_rotation() -> None:
    assert inspect_image(shrink(image_bytes(1, size=(400, 300)), 100, 90)) == ("jpg", 100, 75)
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.new("RGB", (400, 300)).save(out, "JPEG", exif=exif)
    assert inspect_image(shrink(out.getvalue(), 100, 90)) == ("jpg", 75, 100)
    with pytest.raises(BadImageError):
        shrink(b"\xff\xd8\xff no", 10, 90)


def save_image(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def shrink_to_pixel(image: Image.Image, kind: str = "PNG", **options: object) -> tuple[int, ...]:
    """Return the middle pixel after shrinking to half the size."""
    data = shrink(save_image(image, kind, **options), 16, 95)
    with Image.open(io.BytesIO(data)) as small:
        assert (small.format, small.mode, small.size) == ("JPEG", "RGB", (16, 16))
        pixel = small.getpixel((8, 8))
    assert isinstance(pixel, tuple)
    return pixel


def palette(index: int) -> Image.Image:
    image = Image.new("P", (32, 32), index)
    image.putpalette([255, 0, 0, 0, 0, 255])
    return image


@pytest.mark.parametrize(
    ("image", "kind", "options", "expected"),
    [
        (Image.new("RGB", (32, 32), (200, 30, 60)), "PNG", {}, (200, 30, 60)),
        (Image.new("L", (32, 32), 90), "PNG", {}, (90, 90, 90)),
        (Image.new("1", (32, 32), 1), "PNG", {}, (255, 255, 255)),
        (Image.new("I;16", (32, 32), 0x4040), "PNG", {}, (64, 64, 64)),
        (Image.new("I;16", (32, 32), 0xC0C0), "TIFF", {}, (192, 192, 192)),
        (Image.new("I", (32, 32), 0x8080), "TIFF", {}, (128, 128, 128)),
        (Image.new("I;16", (32, 32), 0x4040), "PNG", {"transparency": 7}, (64, 64, 64)),
        (Image.new("RGBA", (32, 32), (0, 0, 0, 0)), "PNG", {}, (255, 255, 255)),
        (Image.new("RGBA", (32, 32), (0, 0, 0, 128)), "PNG", {}, (127, 127, 127)),
        (Image.new("RGBA", (32, 32), (0, 0, 0, 0)), "WEBP", {"lossless": True}, (255, 255, 255)),
        (Image.new("RGB", (32, 32), (200, 30, 60)), "WEBP", {"lossless": True}, (200, 30, 60)),
        (Image.new("LA", (32, 32), (0, 128)), "PNG", {}, (127, 127, 127)),
        (Image.new("RGB", (32, 32), (1, 2, 3)), "PNG", {"transparency": (1, 2, 3)}, (255, 255, 255)),
        (palette(1), "PNG", {}, (0, 0, 255)),
        (palette(1), "PNG", {"transparency": 1}, (255, 255, 255)),
        (palette(0), "GIF", {"transparency": 0}, (255, 255, 255)),
        (Image.new("CMYK", (32, 32), (255, 0, 0, 0)), "TIFF", {}, (0, 255, 255)),
    ],
)
def test_shrink_keeps_colors(
    image: Image.Image, kind: str, options: dict[str, object], expected: tuple[int, int, int]
) -> None:
    pixel = shrink_to_pixel(image, kind, **options)
    assert all(abs(a - b) <= 2 for a, b in zip(pixel, expected, strict=True)), pixel


@pytest.mark.parametrize(("mode", "value"), [("F", 0.5), ("I", 70_000)])
def test_pixels_without_a_defined_white_are_rejected(mode: str, value: float) -> None:
    with pytest.raises(BadImageError, match="white"):
        shrink(save_image(Image.new(mode, (32, 32), value), "TIFF"), 16, 90)


def test_shrink_keeps_an_rgb_profile_and_drops_exif() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for space, kept in ((b"RGB ", True), (b"CMYK", False)):
        profile = b"\0" * 16 + space + b"\0" * 108
        data = save_image(Image.new("RGB", (40, 30)), "PNG", icc_profile=profile, exif=exif)
        with Image.open(io.BytesIO(shrink(data, 20, 90))) as small:
            assert small.size == (15, 20)
            assert small.info.get("icc_profile") == (profile if kept else None)
            assert not small.getexif()


def make_png(width: int, height: int) -> bytes:
    """Encode a black grayscale PNG without holding its pixels in memory."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    packer, row = zlib.compressobj(1), bytes(width + 1)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_huge_images_are_accepted_but_not_shrunk() -> None:
    data = make_png(10_000, 9_500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert inspect_image(data) == ("png", 10_000, 9_500)
        check_decodes(data)
        with pytest.raises(BadImageError, match=r"10000×9500 pixels .* \d+ MB"):
            shrink(data, 256, 90)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_twenty_megapixels_fit_into_the_memory_budget(kind: str) -> None:
    image = Image.new("RGB", (5, 4))
    image.format = kind
    image._size = (5_000, 4_000)  # type: ignore[attr-defined]
    image.info["progressive"] = kind == "JPEG"
    for max_side in (256, 4_999):
        assert images._estimate_memory(image, image.size, max_side) <= images._decode_budget.total


def test_memory_budget_is_never_exceeded_and_oversized_requests_run_alone() -> None:
    budget = images._MemoryBudget(100)
    lock, held, peak = threading.Lock(), 0, 0

    def work(amount: int) -> None:
        nonlocal held, peak
        with budget.reserve(amount):
            with lock:
                held += min(amount, 100)
                peak = max(peak, held)
            threading.Event().wait(0.001)
            with lock:
                held -= min(amount, 100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [30, 1_000, 60, 100, 10] * 10))
    assert held == 0
    assert 60 <= peak <= 100


def test_decoding_reserves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    budget = images._MemoryBudget(1 << 20)
    reserve = budget.reserve
    monkeypatch.setattr(budget, "reserve", lambda amount: reserved.append(amount) or reserve(amount))
    monkeypatch.setattr(images, "_decode_budget", budget)
    check_decodes(image_bytes(1, "PNG", (100, 50)))
    shrink(image_bytes(1, "PNG", (100, 50)), 10, 90)
    assert reserved[0] == 3 * 4 * 100 * 50
    assert reserved[1] > 4 * 100 * 50
    with pytest.raises(BadImageError):
        check_decodes(image_bytes(1, "PNG")[:-30])
    assert budget._free == budget.total


def test_file_above_the_size_limit_is_rejected() -> None:
    with pytest.raises(BadImageError, match=r"\b64 MiB\b"):
        inspect_image(memoryview(bytes(MAX_BYTES + 1)))


def insert_after_first_segment(stray: bytes) -> bytes:
    data = image_bytes(4)
    offset = 4 + int.from_bytes(data[4:6], "big")
    return data[:offset] + stray + data[offset:]


def bmp_with_reserved_bytes() -> bytes:
    data = bytearray(image_bytes(4, "BMP"))
    data[6:10] = b"abcd"
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "extension"),
    [
        (insert_after_first_segment(b"stray"), "jpg"),
        (insert_after_first_segment(b"\xff\x00"), "jpg"),
        (image_bytes(4, "PNG")[:-12], "png"),
        (bmp_with_reserved_bytes(), "bmp"),
    ],
)
def test_nonconforming_images_that_decode_are_accepted(data: bytes, extension: str) -> None:
    assert inspect_image(data) == (extension, 24, 18)
    check_decodes(data)


@pytest.mark.parametrize("stray", [b"stray", b"\xff\x00"])
def test_truncated_nonconforming_image_is_rejected(stray: bytes) -> None:
    with pytest.raises(BadImageError, match=r"JPEG marker at byte \d+"):
        inspect_image(insert_after_first_segment(stray)[:-100])


def test_text_is_not_detected_as_bmp() -> None:
    assert sniff(b"BMW, Audi, Opel and so on") is None


def test_extensions_are_those_of_the_formats() -> None:
    assert {f".{extension}" for extension in CANONICAL_EXTENSIONS} == EXTENSIONS
