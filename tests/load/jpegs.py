"""JPEGs for the tests of the native decoder: plain, unsupported and damaged ones."""

from __future__ import annotations

import io
import struct
import tarfile

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image

from stoker.load import native
from tests.support.paths import SHARED

SAMPLE = SHARED / "data" / "imagenet-sample-200.tar"
needs_native = pytest.mark.skipif(bool(native.why_unavailable()), reason=f"stoker-native {native.why_unavailable()}")


def picture(width: int, height: int) -> Image.Image:
    """A picture with gradients, noise and sharp edges, so that differences of filters show."""
    x, y = np.arange(width), np.arange(height)[:, None]
    noise = np.random.default_rng(width * 1000 + height).integers(0, 40, (height, width, 3))
    planes = np.dstack([2 * x + 0 * y, 0 * x + 3 * y, (x // 7 + y // 5) % 2 * 200]) % 216 + noise
    return Image.fromarray(planes.astype(np.uint8))


def encode_jpeg(image: Image.Image, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **{"quality": 90, **options})
    return out.getvalue()


def sample_images() -> list[bytes]:
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE.name} not found")
    with tarfile.open(SAMPLE) as tar:
        return [file.read() for member in tar if (file := tar.extractfile(member))]


SUBSAMPLINGS = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:2:0": {"subsampling": "4:2:0"},
    "restarts": {"restart_marker_rows": 1},
    "rgb": {"keep_rgb": True},
}


def encode_subsampled(image: Image.Image, subsampling: str) -> bytes:
    """Encode a JPEG with a chroma subsampling that Pillow does not support."""
    data: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90, colorsubsampling=subsampling)
    return data


def encode_441(image: Image.Image, *, progressive: bool = False) -> bytes:
    """Encode a JPEG with 4:4:1 subsampling, which no encoder here offers, from a 4:1:1 one.

    Both have MCUs of four luma blocks, side by side in 4:1:1 and on top of each other in 4:4:1, and one block of each
    chroma. So the image is rearranged, encoded, and given its true sampling factors and size. A progressive JPEG stores
    the blocks of a component by rows, which is the same order only for an image of one MCU per row.
    """
    width, height = image.size
    assert height % 32 == 0
    assert width == 8 or (width % 8 == 0 and not progressive)
    planes = np.asarray(image.convert("YCbCr"))
    luma = planes[..., 0].reshape(height // 32, 4, 8, width // 8, 8).transpose(0, 2, 3, 1, 4)
    chroma = planes[..., 1:].reshape(height // 4, 4, width, 2).mean(axis=1).repeat(4, axis=1)
    wide = np.dstack((luma.reshape(height // 4, 4 * width), chroma)).astype(np.uint8)
    options = {
        cv2.IMWRITE_JPEG_QUALITY: 95,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR: cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
        cv2.IMWRITE_JPEG_PROGRESSIVE: int(progressive),
    }
    bgr = np.asarray(Image.fromarray(wide, "YCbCr").convert("RGB"))[..., ::-1]
    data = bytearray(cv2.imencode(".jpg", bgr, [number for pair in options.items() for number in pair])[1].tobytes())
    frame = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    struct.pack_into(">HH", data, frame + 5, height, width)
    assert data[frame + 11] == 0x41
    data[frame + 11] = 0x14
    return bytes(data)


def make_jpeg(kind: str, image: Image.Image, **options: object) -> bytes:
    if kind == "gray":
        return encode_jpeg(image.convert("L"), **options)
    return encode_subsampled(image, "440") if kind == "4:4:0" else encode_jpeg(image, **SUBSAMPLINGS[kind], **options)


def edit_jpeg(marker: int, at: int, *values: int) -> bytes:
    """A JPEG with restart markers, with some bytes of a segment replaced."""
    data = bytearray(encode_jpeg(picture(60, 50), restart_marker_rows=1))
    start = data.index(bytes([0xFF, marker])) + 4 + at
    data[start : start + len(values)] = bytes(values)
    return bytes(data)


def with_restarts() -> bytes:
    return encode_jpeg(picture(60, 50), restart_marker_rows=1)


BROKEN_SCANS = {
    "components in another order": edit_jpeg(0xDA, 1, 1, 0x00, 3, 0x11, 2, 0x11),
    "DC table number out of range": edit_jpeg(0xDA, 2, 0x50),
    "AC table number out of range": edit_jpeg(0xDA, 2, 0x0F),
    "AC table missing": edit_jpeg(0xDA, 2, 0x03),
    "quantization table number out of range": edit_jpeg(0xC0, 8, 9),
    "spectral selection": edit_jpeg(0xDA, 8, 62),
    "successive approximation": edit_jpeg(0xDA, 9, 1),
    "too many codes of a length": edit_jpeg(0xC4, 1, 3),
    "code of all ones": edit_jpeg(0xC4, 1, 2),
    "restart markers out of order": with_restarts().replace(b"\xff\xd1", b"\xff\xd3"),
    "restart marker missing": with_restarts().replace(b"\xff\xd1", b""),
}


def long_run() -> bytes:
    """Blocks with a DC of zero and four runs of sixteen zeros, one more than the 63 ACs of a block."""
    small = encode_jpeg(Image.new("L", (60, 50)))
    bits = 56 * ("00" + 4 * "11111111001")
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    return small[: small.index(b"\xff\xda") + 10] + scan + b"\xff\xd9"


def twelve_bits() -> bytes:
    data = bytearray(encode_jpeg(picture(60, 50)))
    data[data.index(b"\xff\xc0") + 4] = 12
    return bytes(data)


def with_size(width: int, height: int) -> bytes:
    """A JPEG whose header has the wrong size."""
    data = bytearray(encode_jpeg(picture(60, 50)))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def arithmetic() -> bytes:
    return encode_jpeg(picture(60, 50)).replace(b"\xff\xc0", b"\xff\xc9", 1)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode_jpeg(picture(60, 50), exif=exif)


def png() -> bytes:
    out = io.BytesIO()
    picture(60, 50).save(out, "PNG")
    return out.getvalue()


def without_segments(marker: int, data: bytes) -> bytes:
    """The same JPEG without the segments of a marker."""
    at, out = 2, bytearray(data[:2])
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] != marker:
            out += data[at:end]
        at = end
    return bytes(out + data[at:])


def with_thumbnail(cut: int) -> bytes:
    """A truncated JPEG with a complete thumbnail in its header."""
    data, small = encode_jpeg(picture(90, 80)), encode_jpeg(picture(8, 8))
    segment = b"\xff\xec" + struct.pack(">H", len(small) + 2) + small
    return (data[:2] + segment + data[2:])[:-cut]


def hidden_size() -> bytes:
    """Two frames: the first behind a marker without a length, which a naive parser takes for a segment."""
    small = encode_jpeg(picture(60, 50))
    frame = small[small.index(b"\xff\xc0") :][:19]
    return b"\xff\xd8\xff\x01" + struct.pack(">H", len(frame) + 2) + frame + encode_jpeg(picture(120, 110))[2:]


def gray_jpeg(factors: int, damaged_at: int | None = None) -> bytes:
    """A grayscale JPEG whose only component has these sampling factors, which have no meaning then."""
    data = bytearray(encode_jpeg(picture(60, 64).convert("L")))
    data[data.index(b"\xff\xc0") + 11] = factors
    if damaged_at is not None:
        scan = data.index(b"\xff\xda") + 10
        data[scan + damaged_at : scan + damaged_at + 2] = b"\xff\xd9"
    return bytes(data)


UNSUPPORTED = {
    "progressive": encode_jpeg(picture(60, 50), progressive=True),
    "cmyk": encode_jpeg(picture(60, 50).convert("CMYK")),
    "4:1:1": encode_subsampled(picture(64, 50), "411"),
    "no quantization tables": without_segments(0xDB, encode_jpeg(picture(60, 50))),
    **{f"truncated by {cut} bytes, with a thumbnail": with_thumbnail(cut) for cut in (20, 400, 900)},
    "size behind a marker without length": hidden_size(),
    "12 bits": twelve_bits(),
    "arithmetic": arithmetic(),
    "rotated": rotated(),
    "png": png(),
    "truncated": encode_jpeg(picture(60, 50))[:-300],
    "no end marker": encode_jpeg(picture(60, 50))[:-2],
    "truncated header": encode_jpeg(picture(60, 50))[:100],
    "no rows": with_size(60, 0),
    "no columns": with_size(0, 50),
    "too many rows": with_size(60, 400),
    "huge": with_size(65500, 65500),
    "wide": with_size(65500, 2000),
    "empty": b"",
    "two bytes": b"\xff\xd8",
    "only markers": b"\xff\xd8\xff\xd9",
    "fill bytes": b"\xff\xd8" + b"\xff" * 5000,
    "segment beyond the end": b"\xff\xd8\xff\xe0\xff\xff",
    "text": b"no image at all, but longer than sixteen bytes",
}
