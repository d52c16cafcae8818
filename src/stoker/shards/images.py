"""Inspect, check, decode and re-encode images; headers are read without decoding pixels where possible."""

from __future__ import annotations

import io
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError, __version__

from stoker.shards.formats import CANONICAL_EXTENSIONS
from stoker.shards.sample import Buffer

PILLOW_VERSION = __version__

MAX_PIXELS = 178_956_970  # the limit of Pillow, and so of most training pipelines
MAX_BYTES = 64 << 20
EXTENSIONS = frozenset(f".{extension}" for extension in CANONICAL_EXTENSIONS)

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_END = b"IEND\xaeB`\x82"
_BMP_HEADERS = frozenset({12, 40, 52, 56, 64, 108, 124})
_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_ORIENTATION = 0x0112
_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_PIXEL_BYTES = 4  # Pillow pads the three bytes of an RGB pixel

# Pillow's own limit prints warnings from half of this size on, and is redundant: _open_image checks MAX_PIXELS.
Image.MAX_IMAGE_PIXELS = None


class BadImageError(ValueError):
    """The bytes are not an image that can be used for training; the message is the reason."""


class ImageInfo(NamedTuple):
    """The true format of an image, as an extension, and its size in pixels."""

    extension: str
    width: int
    height: int


class _MemoryBudget:
    """A memory budget shared by threads: each reserves what it needs, and waits until it is free."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._turn = threading.Lock()
        self._returned = threading.Condition()

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Reserve `amount` bytes; more than the total means exclusive use."""
        amount = min(amount, self.total)
        with self._turn, self._returned:  # in turn, otherwise many small requests would starve a large one
            self._returned.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._returned:
                self._free += amount
                self._returned.notify()


_decode_budget = _MemoryBudget(
    320_000_000
)  # 20 megapixels of WebP, 26 of other formats at worst, 70 of a PNG that is shrunk


def sniff(head: Buffer) -> str | None:
    """Return the format of an image from its first 16 bytes, as an extension, or None."""
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
    if start.startswith(b"BM") and int.from_bytes(start[14:16], "little") in _BMP_HEADERS:
        return "bmp"
    if start[:1] == b"P" and start[1:2] in b"123456" and start[2:3].isspace():
        return "ppm"
    return None


def inspect_image(data: Buffer) -> ImageInfo:
    """Read the header and look for the end; raise BadImageError for an image that no decoder can decode."""
    if len(data) == 0:
        raise BadImageError("the file is empty")
    if len(data) > MAX_BYTES:
        raise BadImageError(too_large_reason(len(data)))
    kind = sniff(data)
    if kind is None:
        raise BadImageError("not an image")
    # JPEG and PNG are parsed here: Pillow takes ten times as long and holds the GIL.
    try:
        if kind == "jpg":
            width, height = _read_jpeg_size(data)
        elif kind == "png":
            width, height = _read_png_size(data)
        else:
            with _translate_pillow_errors("no readable header"):
                width, height = _open_image(data).size
    except _NonconformingImageError as violation:
        width, height = _size_by_decoding(data, violation)
    check_size(width, height)
    return ImageInfo(kind, width, height)


def too_large_reason(size: int) -> str:
    """Return the reason why a file of `size` bytes is not read."""
    return f"{size >> 20} MiB is more than the limit of {MAX_BYTES >> 20} MiB"


def shrink(data: Buffer, max_side: int, quality: int) -> bytes:
    """Re-encode as an RGB JPEG whose longer side is `max_side`, rotated by its EXIF orientation.

    Transparency becomes white, 16 bits become 8, an RGB color profile is kept. Raise BadImageError for an image that
    cannot be decoded within the memory budget.
    """
    with _translate_pillow_errors("cannot be decoded"):
        image = _open_image(data)
        width, height = full = image.size
        image.draft("RGB", (max_side, max_side))
        memory = _estimate_memory(image, full, max_side)
        if memory > _decode_budget.total:
            raise BadImageError(
                f"shrinking {width}×{height} pixels needs {memory // 1_000_000} MB, more than the limit"
            )
        profile = image.info.get("icc_profile") or b""
        with _decode_budget.reserve(memory):
            if image.format == "WEBP":
                image = image.copy()  # releases the decoder and its canvases
            image = _flatten(image)
            image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
            image = ImageOps.exif_transpose(image)
            out = io.BytesIO()
            image.convert("RGB").save(
                out, "JPEG", quality=quality, icc_profile=profile if profile[16:20] == b"RGB " else None
            )
            del image
    return out.getvalue()


def read_orientation(data: Buffer) -> int:
    """Return the orientation of a JPEG from its EXIF, else from its XMP: 1 upright, 2–8 mirrored or rotated."""
    at, orientation = 2, 1
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        if data[at + 1] == 0xFF:
            at += 1  # fill bytes
            continue
        end = at + 2 + ((data[at + 2] << 8) | data[at + 3])
        if data[at + 1] == 0xE1:
            segment = bytes(data[at + 4 : end])
            if segment.startswith(b"Exif\x00\x00") and (value := _read_tiff_orientation(segment[6:])) is not None:
                return value if 1 <= value <= 8 else 1
            if segment.startswith(b"http://ns.adobe.com/xap/1.0/") and (match := _XMP_ORIENTATION.search(segment)):
                orientation = int(match[1])
        at = end
    return orientation


def _read_tiff_orientation(exif: bytes) -> int | None:
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4], "")
    if not order:
        return None
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, at)
        for offset in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(f"{order}HH", exif, offset)
            if tag == _ORIENTATION and kind in _INTEGERS:
                value: int
                (value,) = struct.unpack_from(order + _INTEGERS[kind], exif, offset + 8)
                return value
    except struct.error:  # truncated
        pass
    return None


def limit_rows(data: Buffer, rows: int) -> bytearray | None:
    """Return a copy of a JPEG whose header claims only `rows` rows, so that decoding stops there; None if impossible.

    Only for baseline and extended sequential JPEGs: progressive ones store all rows in several scans.
    """
    at, frame = 2, 0
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], (data[at + 2] << 8) | data[at + 3]
        if marker in (0xC0, 0xC1):
            frame = at + 5
            if rows >= (data[frame] << 8) | data[frame + 1]:
                return None
        elif marker == 0xDD or length < 2:  # decoders mistake restart markers for the end of the missing rows
            return None
        elif marker == 0xDA:
            if not frame:
                return None
            short = bytearray(data)
            struct.pack_into(">H", short, frame, rows)
            return short
        at += 2 + length
    return None


def read_upright_size(data: Buffer) -> tuple[int, int]:
    """Return the size of an image after rotation to upright; raise BadImageError if it cannot be read."""
    with _translate_pillow_errors("cannot be decoded"):
        image = _open_image(data)
        if image.format == "TIFF":  # Pillow rotates it while loading, and not every version reports that before
            height, width, _ = decode_rgb(data).shape
            return width, height
        turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def decode_rgb(data: Buffer) -> npt.NDArray[np.uint8]:
    """Decode an image of any format to upright RGB pixels; transparency becomes white, 16 bits become 8.

    An image that needs more than the memory budget is decoded alone.
    """
    with _translate_pillow_errors("cannot be decoded"):
        image = _open_image(data)
        flat = 2 * _PIXEL_BYTES * image.width * image.height  # flattened and rotated copies
        with _decode_budget.reserve(_estimate_memory(image) + flat):
            upright = ImageOps.exif_transpose(_flatten(image))
            return np.asarray(upright.convert("RGB"))


def resize_box(
    pixels: npt.NDArray[np.uint8], box: tuple[float, float, float, float], size: int
) -> npt.NDArray[np.uint8]:
    """Resize a box (left, top, width, height), which may have fractional edges, to a square, with antialiasing."""
    left, top, width, height = box
    right, bottom = min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0])
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, right, bottom)))


class _NonconformingImageError(BadImageError):
    """The image violates the specification of its format; decoders may still read it."""


@contextmanager
def _translate_pillow_errors(failure: str) -> Iterator[None]:
    """Translate any exception of Pillow's plugins into BadImageError."""
    try:
        yield
    except BadImageError:
        raise
    except UnidentifiedImageError as error:  # its message contains the address of an object
        raise BadImageError(f"{failure}: unknown image format") from error
    except Exception as error:
        raise BadImageError(f"{failure}: {str(error) or type(error).__name__}") from error


def _open_image(data: Buffer) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
    check_size(*image.size)
    return image


def check_size(width: int, height: int) -> None:
    """Raise BadImageError for a size that no reader would decode."""
    if width == 0 or height == 0:
        raise BadImageError(f"the image is {width}×{height} pixels")
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width}×{height} pixels exceed the limit of {MAX_PIXELS:,}")


def _estimate_memory(image: Image.Image, full: tuple[int, int] | None = None, max_side: int = 0) -> int:
    """Estimate the peak memory for decoding an image, of size `full` before draft mode, and for shrinking it."""
    pixels = image.width * image.height
    full_width, full_height = full or image.size
    loading = _PIXEL_BYTES * pixels
    if image.format == "WEBP":
        loading *= 4  # two canvases of libwebp, the bytes it returns, and the image
    if image.info.get("progressive"):
        loading += 6 * full_width * full_height  # 16-bit coefficients, independent of draft mode
    if not max_side:
        return loading
    # Resizing holds the image, the result of the first pass, and the final result.
    copies = 1 + 2 * min(1.0, max_side / max(image.size))
    if image.mode not in ("L", "RGB"):
        copies = max(copies, 2.5)  # for _flatten
    return max(loading, int(_PIXEL_BYTES * copies * pixels))


def _flatten(image: Image.Image) -> Image.Image:
    """Convert to L or RGB on a white background; return an image that needs no conversion unchanged."""
    if image.mode == "F":
        raise BadImageError("floating-point pixels: the value of white is not defined")
    if image.mode.startswith("I"):
        return _to_8_bits(image)
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        white.info = image.info
        return white
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grayscale to 8 bits; Pillow would clip it instead."""
    image = image.convert("I")
    low, high = image.getextrema()
    if not 0 <= cast(int, low) <= cast(int, high) <= 0xFFFF:
        raise BadImageError("32-bit pixels: the value of white is not defined")
    return image.point([(value + 128) // 257 for value in range(0x10000)], "L")


def _size_by_decoding(data: Buffer, violation: _NonconformingImageError) -> tuple[int, int]:
    """Return the size of a nonconforming image if Pillow can decode it within the budget; raise `violation` if not."""
    try:
        image = _open_image(data)
        if (memory := _estimate_memory(image)) > _decode_budget.total:
            raise violation
        with _decode_budget.reserve(memory):
            image.load()
            return image.size
    except Exception:  # Pillow's plugins may raise anything
        raise violation from None


def _read_jpeg_size(data: Buffer) -> tuple[int, int]:
    width = height = -1
    at, end = 2, len(data)
    while True:
        while at < end and data[at] == 0xFF and at + 1 < end and data[at + 1] == 0xFF:
            at += 1  # fill bytes
        if at + 4 > end:
            raise _NonconformingImageError("truncated inside the JPEG header")
        if data[at] != 0xFF or data[at + 1] == 0x00:
            raise _NonconformingImageError(f"no JPEG marker at byte {at}")
        marker = data[at + 1]
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        length = (data[at + 2] << 8) | data[at + 3]
        if length < 2:
            raise _NonconformingImageError(f"invalid length of the JPEG segment at byte {at}")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if at + 9 > end:
                raise _NonconformingImageError("truncated inside the JPEG header")
            height, width = struct.unpack_from(">HH", data, at + 5)
        at += 2 + length
        if marker == 0xDA:
            break
        if marker == 0xD9:
            raise _NonconformingImageError("the JPEG has no scan")
    if width < 0:
        raise _NonconformingImageError("the JPEG has no frame header")
    if (data[end - 2] != 0xFF or data[end - 1] != 0xD9) and bytes(data[at:]).rfind(b"\xff\xd9") < 0:
        raise BadImageError("truncated: no end-of-image marker")
    return width, height


def _read_png_size(data: Buffer) -> tuple[int, int]:
    if len(data) < 33 or bytes(data[12:16]) != b"IHDR":
        raise _NonconformingImageError("truncated inside the PNG header")
    width: int
    height: int
    width, height = struct.unpack_from(">II", data, 16)
    if bytes(data[-8:]) != PNG_END and PNG_END not in bytes(data):
        at = len(PNG_MAGIC)
        while at + 12 <= len(data):
            at += 12 + int.from_bytes(data[at : at + 4], "big")
        if at != len(data):
            raise BadImageError("truncated: no IEND chunk")
        raise _NonconformingImageError("no IEND chunk")
    return width, height
