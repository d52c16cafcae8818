"""What an image's bytes say about it, without decoding a pixel unless asked to."""

from __future__ import annotations

import io
import struct
from typing import NamedTuple

from PIL import Image

from stoker.shards.sample import Buffer

MAX_PIXELS = 178_956_970  # Pillow refuses to decode more

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_END = b"IEND\xaeB`\x82"
PILLOW_KINDS = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "BMP": "bmp",
    "GIF": "gif",
    "TIFF": "tif",
    "PPM": "ppm",
}
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)


class BadImageError(ValueError):
    """These bytes are no image that can be trained on; the message is the reason."""


class ImageInfo(NamedTuple):
    """An image's true format, as an extension, and its size in pixels."""

    kind: str
    width: int
    height: int


def sniff(head: Buffer) -> str | None:
    """Tell an image's format from its first 16 bytes, or None for anything else."""
    start = bytes(head[:16])
    if start.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if start.startswith(PNG_MAGIC):
        return "png"
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "webp"
    if start.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if start.startswith((b"II*\0", b"MM\0*")):
        return "tif"
    if start.startswith(b"BM") and start[6:10] == b"\0\0\0\0":
        return "bmp"
    if start[:1] == b"P" and start[1:2] in b"123456" and start[2:3].isspace():
        return "ppm"
    return None


def probe(data: Buffer) -> ImageInfo:
    """Read the header and look for the end; raise BadImageError for what no decoder would finish."""
    if len(data) == 0:
        raise BadImageError("the file is empty")
    kind = sniff(data)
    if kind is None:
        raise BadImageError("these bytes are no image")
    # By hand for the two formats of nearly all datasets: Pillow takes ten times as long and holds the GIL.
    if kind == "jpg":
        info = _probe_jpeg(data)
    elif kind == "png":
        info = _probe_png(data)
    else:
        info = _probe_with_pillow(data)
    if info.width == 0 or info.height == 0:
        raise BadImageError(f"the image is {info.width}×{info.height} pixels")
    if info.width * info.height > MAX_PIXELS:
        raise BadImageError(f"{info.width}×{info.height} pixels are more than {MAX_PIXELS:,} can be")
    return info


def decode(data: Buffer) -> None:
    """Decode every pixel and throw them away; raise BadImageError when that fails."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except Exception as error:  # Pillow's plugins raise whatever their format led them to
        raise BadImageError(f"does not decode: {error}") from error


def shrink(data: Buffer, max_side: int, quality: int) -> bytes:
    """Re-encode as JPEG with the longer side at `max_side`, upright as the EXIF rotation says."""
    from PIL import ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            image.draft("RGB", (max_side, max_side))
            upright = ImageOps.exif_transpose(image)
            upright.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
            out = io.BytesIO()
            upright.convert("RGB").save(out, "JPEG", quality=quality)
    except Exception as error:  # as in decode
        raise BadImageError(f"does not decode: {error}") from error
    return out.getvalue()


def _probe_jpeg(data: Buffer) -> ImageInfo:
    width = height = -1
    at, end = 2, len(data)
    while True:
        while at < end and data[at] == 0xFF and at + 1 < end and data[at + 1] == 0xFF:
            at += 1  # fill bytes
        if at + 4 > end:
            raise BadImageError("truncated inside the JPEG header")
        if data[at] != 0xFF:
            raise BadImageError(f"not a JPEG marker at byte {at}")
        marker = data[at + 1]
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        length = (data[at + 2] << 8) | data[at + 3]
        if length < 2:
            raise BadImageError(f"a JPEG segment without length at byte {at}")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if at + 9 > end:
                raise BadImageError("truncated inside the JPEG header")
            height, width = struct.unpack_from(">HH", data, at + 5)
        at += 2 + length
        if marker == 0xDA:
            break
        if marker == 0xD9:
            raise BadImageError("a JPEG without a picture")
    if width < 0:
        raise BadImageError("a JPEG without a frame header")
    if (data[end - 2] != 0xFF or data[end - 1] != 0xD9) and bytes(data[at:]).rfind(b"\xff\xd9") < 0:
        raise BadImageError("truncated: no end-of-image marker")
    return ImageInfo("jpg", width, height)


def _probe_png(data: Buffer) -> ImageInfo:
    if len(data) < 33 or bytes(data[12:16]) != b"IHDR":
        raise BadImageError("truncated inside the PNG header")
    width, height = struct.unpack_from(">II", data, 16)
    if bytes(data[-8:]) != PNG_END and PNG_END not in bytes(data):
        raise BadImageError("truncated: no IEND chunk")
    return ImageInfo("png", width, height)


def _probe_with_pillow(data: Buffer) -> ImageInfo:
    try:
        with Image.open(io.BytesIO(data)) as image:
            kind = PILLOW_KINDS.get(image.format or "")
            width, height = image.size
    except Exception as error:  # as in decode
        raise BadImageError(f"no readable header: {error}") from error
    if kind is None:
        raise BadImageError(f"{image.format} images are not supported")
    return ImageInfo(kind, width, height)
