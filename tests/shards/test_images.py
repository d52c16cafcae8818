import io

import pytest
from PIL import Image

from stoker.shards.images import BadImageError, decode, probe, shrink, sniff
from trees import image_bytes


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
def test_every_format_tells_its_size(kind: str, extension: str) -> None:
    data = image_bytes(5, kind, (31, 17))
    assert sniff(data) == extension
    assert probe(memoryview(data)) == (extension, 31, 17)
    decode(memoryview(data))


def test_progressive_and_odd_jpegs() -> None:
    out = io.BytesIO()
    Image.new("CMYK", (40, 30)).save(out, "JPEG", progressive=True)
    assert probe(out.getvalue()) == ("jpg", 40, 30)
    assert probe(image_bytes(1) + b"\0" * 100) == ("jpg", 24, 18)  # trailing bytes do no harm


def probe_and_decode(data: bytes) -> None:
    probe(data)
    decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_every_truncation_is_found_by_probe_or_decode(kind: str) -> None:
    data = image_bytes(3, kind)
    for length in range(0, len(data) - 1, 7):
        with pytest.raises(BadImageError):
            probe_and_decode(data[:length])


def test_a_thumbnails_end_is_not_the_pictures_end() -> None:
    thumbnail = image_bytes(1, size=(8, 8))
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    picture = image_bytes(2)
    whole = picture[:2] + segment + picture[2:]
    assert probe(whole) == ("jpg", 24, 18)
    with pytest.raises(BadImageError, match="no end-of-image"):
        probe(whole[:-20])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"hello, world, this is text", "no image"),
        (b"\xff\xd8\xff\xd9", "truncated"),
        (b"\xff\xd8\xff\xe0\x00\x00" + b"x" * 20, "without length"),
        (b"\xff\xd8\xff\xe0\x00\x04ab\xff\xd9\x00\x02", "without a picture"),
        (b"\xff\xd8\xff\xda\x00\x04ab" + b"\xff\xd9", "without a frame"),
        (b"\xff\xd8\xff\xe0\x00\x04abcd" + b"x" * 9, "not a JPEG marker"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 4, "truncated"),
        (b"RIFF\0\0\0\0WEBPgarbage", "no readable header"),
    ],
)
def test_reasons(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=reason):
        probe(data)


def test_no_pixels_and_too_many() -> None:
    png = bytearray(image_bytes(1, "PNG"))
    png[16:24] = (0).to_bytes(4, "big") + (5).to_bytes(4, "big")
    with pytest.raises(BadImageError, match="0×5"):
        probe(bytes(png))
    png[16:24] = (60_000).to_bytes(4, "big") * 2
    with pytest.raises(BadImageError, match="more than"):
        probe(bytes(png))


def test_shrinking_keeps_the_shape_and_stands_upright() -> None:
    assert probe(shrink(image_bytes(1, size=(400, 300)), 100, 90)) == ("jpg", 100, 75)
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (400, 300)).save(out, "JPEG", exif=exif)
    assert probe(shrink(out.getvalue(), 100, 90)) == ("jpg", 75, 100)
    with pytest.raises(BadImageError):
        shrink(b"\xff\xd8\xff no", 10, 90)
