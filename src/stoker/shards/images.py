"""What an image's bytes say about it, without decoding a pixel unless asked to."""

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

MAX_PIXELS = 178_956_970  # what Pillow, and so most readers of a training set, would decode at all
MAX_BYTES = 64 << 20
EXTENSIONS = frozenset(f".{extension}" for extension in CANONICAL_EXTENSIONS)

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_END = b"IEND\xaeB`\x82"
_BMP_HEADERS = frozenset({12, 40, 52, 56, 64, 108, 124})
_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_ORIENTATION = 0x0112
_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_PIXEL_BYTES = 4  # bytes: Pillow pads the three of an RGB pixel

# Pillow's own guard warns on stderr from half of this size on, and is no use where _open checks MAX_PIXELS itself.
Image.MAX_IMAGE_PIXELS = None


class BadImageError(ValueError):
    """These bytes are no image that can be trained on; the message is the reason."""


class ImageInfo(NamedTuple):
    """An image's true format, as an extension, and its size in pixels."""

    extension: str
    width: int
    height: int


class _MemoryBudget:
    """Memory that threads share: each takes what it needs, at most all of it, and waits until that is free."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._turn = threading.Lock()
        self._returned = threading.Condition()

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        """Hold so many bytes; more than there are means to be alone."""
        amount = min(amount, self.total)
        with self._turn, self._returned:  # in turn, or many small takers would starve a large one
            self._returned.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._returned:
                self._free += amount
                self._returned.notify()


_decode_budget = _MemoryBudget(320_000_000)  # 20 megapixels of WebP, 26 of others at worst, 70 of a PNG made small


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
    if start.startswith(b"BM") and int.from_bytes(start[14:16], "little") in _BMP_HEADERS:
        return "bmp"
    if start[:1] == b"P" and start[1:2] in b"123456" and start[2:3].isspace():
        return "ppm"
    return None


def inspect_image(data: Buffer) -> ImageInfo:
    """Read the header and look for the end; raise BadImageError for what no decoder would finish."""
    if len(data) == 0:
        raise BadImageError("the file is empty")
    if len(data) > MAX_BYTES:
        raise BadImageError(too_large_reason(len(data)))
    kind = sniff(data)
    if kind is None:
        raise BadImageError("these bytes are no image")
    # By hand for the two formats of nearly all datasets: Pillow takes ten times as long and holds the GIL.
    try:
        if kind == "jpg":
            width, height = _read_jpeg_size(data)
        elif kind == "png":
            width, height = _read_png_size(data)
        else:
            with _pillow_errors("no readable header"):
                width, height = _open_image(data).size
    except _NonconformingImageError as odd:
        width, height = _size_by_decoding(data, odd)
    check_size(width, height)
    return ImageInfo(kind, width, height)


def too_large_reason(size: int) -> str:
    """Say why a file of so many bytes is not even read."""
    return f"{size >> 20} MiB: larger than an image of a training set is"


def check_decodes(data: Buffer) -> None:
    """Decode every pixel and throw them away; raise BadImageError when that fails.

    An image that needs more than the budget is decoded all the same, alone: nothing smaller could check it.
    """
    with _pillow_errors("does not decode"):
        image = _open_image(data)
        with _decode_budget.reserve(_estimate_memory(image)):
            image.load()
            del image  # before others may take the memory


def shrink(data: Buffer, max_side: int, quality: int) -> bytes:
    """Re-encode as an RGB JPEG with the longer side at `max_side`, upright as the EXIF rotation says.

    Transparency becomes white, 16 bits become 8, an RGB colour profile stays; raises BadImageError for an image that
    cannot be decoded within the memory there is for it.
    """
    with _pillow_errors("does not decode"):
        image = _open_image(data)
        width, height = full = image.size
        image.draft("RGB", (max_side, max_side))
        memory = _estimate_memory(image, full, max_side)
        if memory > _decode_budget.total:
            raise BadImageError(f"{width}×{height} pixels take {memory // 1_000_000} MB to shrink: too many")
        profile = image.info.get("icc_profile") or b""
        with _decode_budget.reserve(memory):
            if image.format == "WEBP":
                image = image.copy()  # without the decoder, which holds on to its canvases
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
    """Tell how a JPEG's EXIF, or else its XMP, says its pixels are stored: 1 upright, 2–8 mirrored or turned."""
    at, said = 2, 1
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        if data[at + 1] == 0xFF:
            at += 1  # fill bytes
            continue
        end = at + 2 + ((data[at + 2] << 8) | data[at + 3])
        if data[at + 1] == 0xE1:
            segment = bytes(data[at + 4 : end])
            if segment.startswith(b"Exif\x00\x00") and (found := _read_tiff_orientation(segment[6:])) is not None:
                return found if 1 <= found <= 8 else 1
            if segment.startswith(b"http://ns.adobe.com/xap/1.0/") and (told := _XMP_ORIENTATION.search(segment)):
                said = int(told[1])
        at = end
    return said


def _read_tiff_orientation(exif: bytes) -> int | None:
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(exif[:4], "")
    if not order:
        return None
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (entries,) = struct.unpack_from(f"{order}H", exif, at)
        for place in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(f"{order}HH", exif, place)
            if tag == _ORIENTATION and kind in _INTEGERS:
                value: int
                (value,) = struct.unpack_from(order + _INTEGERS[kind], exif, place + 8)
                return value
    except struct.error:  # cut short: it says nothing
        pass
    return None


def limit_rows(data: Buffer, rows: int) -> bytearray | None:
    """Give a JPEG that claims to have only so many rows, so that its decoder stops there; None where that cannot be.

    Only for JPEGs of one pass: in others the rows come in several, and their decoder goes through all of the file.
    """
    at, frame = 2, 0
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], (data[at + 2] << 8) | data[at + 3]
        if marker in (0xC0, 0xC1):
            frame = at + 5
            if rows >= (data[frame] << 8) | data[frame + 1]:
                return None
        elif marker == 0xDD or length < 2:  # restarts look like the end of the rows that are left out
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
    """Tell the size of an image of any format once it stands upright; raise BadImageError if it has no header."""
    with _pillow_errors("no readable header"):
        image = _open_image(data)
        if image.format == "TIFF":  # Pillow turns it while it loads, and not every version tells so before
            height, width, _ = decode_rgb(data).shape
            return width, height
        turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


def decode_rgb(data: Buffer) -> npt.NDArray[np.uint8]:
    """Decode an image of any format into upright RGB pixels, white behind what is transparent, 16 bits made 8.

    An image that needs more than the budget is decoded alone.
    """
    with _pillow_errors("does not decode"):
        image = _open_image(data)
        flat = 2 * _PIXEL_BYTES * image.width * image.height  # made flat and upright, and copied out
        with _decode_budget.reserve(_estimate_memory(image) + flat):
            upright = ImageOps.exif_transpose(_flatten(image))
            return np.asarray(upright.convert("RGB"))


def resize_box(
    pixels: npt.NDArray[np.uint8], box: tuple[float, float, float, float], size: int
) -> npt.NDArray[np.uint8]:
    """Resize a box (left, top, width, height), whose edges may lie between pixels, to a square, antialiased."""
    left, top, width, height = box
    right, bottom = min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0])
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, right, bottom)))


class _NonconformingImageError(BadImageError):
    """Not as the format's specification has it; decoders may read it even so."""


@contextmanager
def _pillow_errors(failure: str) -> Iterator[None]:
    """Turn what Pillow's plugins raise, which may be anything, into BadImageError."""
    try:
        yield
    except BadImageError:
        raise
    except UnidentifiedImageError as error:  # whose text names an object in memory
        raise BadImageError(f"{failure}: no known image format") from error
    except Exception as error:
        raise BadImageError(f"{failure}: {error}") from error


def _open_image(data: Buffer) -> Image.Image:
    image = Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
    check_size(*image.size)
    return image


def check_size(width: int, height: int) -> None:
    """Refuse what no reader would decode."""
    if width == 0 or height == 0:
        raise BadImageError(f"the image is {width}×{height} pixels")
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width}×{height} pixels are more than {MAX_PIXELS:,} can be")


def _estimate_memory(image: Image.Image, full: tuple[int, int] | None = None, max_side: int = 0) -> int:
    """Estimate the peak of decoding an opened image, of `full` size before its draft, and shrinking it."""
    pixels = image.width * image.height
    full_width, full_height = full or image.size
    loading = _PIXEL_BYTES * pixels
    if image.format == "WEBP":
        loading *= 4  # libwebp's two canvases, the bytes it returns, and the image
    if image.info.get("progressive"):
        loading += 6 * full_width * full_height  # 16-bit coefficients, whatever the draft
    if not max_side:
        return loading
    # Resizing holds the image, its pass in one direction, and the result: three copies near the full size.
    copies = 1 + 2 * min(1.0, max_side / max(image.size))
    if image.mode not in ("L", "RGB"):
        copies = max(copies, 2.5)  # _flat
    return max(loading, int(_PIXEL_BYTES * copies * pixels))


def _flatten(image: Image.Image) -> Image.Image:
    """Decode as L or RGB, with white behind what is transparent; a plain image is given back as it is."""
    if image.mode == "F":
        raise BadImageError("floating-point pixels: it is not told which value is white")
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
    """Scale 16-bit grey to 8 bits, which Pillow would clip instead."""
    image = image.convert("I")
    low, high = image.getextrema()
    if not 0 <= cast(int, low) <= cast(int, high) <= 0xFFFF:
        raise BadImageError("32-bit pixels: it is not told which value is white")
    return image.point([(value + 128) // 257 for value in range(0x10000)], "L")


def _size_by_decoding(data: Buffer, odd: _NonconformingImageError) -> tuple[int, int]:
    """Let Pillow decide about an odd image, within the budget: the size if it decodes, the oddity raised if not."""
    try:
        image = _open_image(data)
        if (memory := _estimate_memory(image)) > _decode_budget.total:
            raise odd
        with _decode_budget.reserve(memory):
            image.load()
            return image.size
    except Exception:  # as in _pillow
        raise odd from None


def _read_jpeg_size(data: Buffer) -> tuple[int, int]:
    width = height = -1
    at, end = 2, len(data)
    while True:
        while at < end and data[at] == 0xFF and at + 1 < end and data[at + 1] == 0xFF:
            at += 1  # fill bytes
        if at + 4 > end:
            raise _NonconformingImageError("truncated inside the JPEG header")
        if data[at] != 0xFF or data[at + 1] == 0x00:
            raise _NonconformingImageError(f"not a JPEG marker at byte {at}")
        marker = data[at + 1]
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        length = (data[at + 2] << 8) | data[at + 3]
        if length < 2:
            raise _NonconformingImageError(f"a JPEG segment without length at byte {at}")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if at + 9 > end:
                raise _NonconformingImageError("truncated inside the JPEG header")
            height, width = struct.unpack_from(">HH", data, at + 5)
        at += 2 + length
        if marker == 0xDA:
            break
        if marker == 0xD9:
            raise _NonconformingImageError("a JPEG without a picture")
    if width < 0:
        raise _NonconformingImageError("a JPEG without a frame header")
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
