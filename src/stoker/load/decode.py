"""The general image decoder: decode, crop and resize images with simplejpeg and OpenCV, which release the GIL.

Images that simplejpeg does not support are decoded by Pillow. A decoder may raise anything (simplejpeg raises KeyError
for a subsampling that it does not know): the next one is tried then, and the failure of the last is a BadImageError.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from stoker.load.transforms import Crop
from stoker.shards import images
from stoker.shards.images import BadImageError
from stoker.shards.sample import Buffer

Pixels = npt.NDArray[np.uint8]

# The loader's threads already use all cores; threads of OpenCV would only compete with them.
cv2.setNumThreads(0)

RESIZE_HEADROOM = 2.0
"""Scaled JPEG decoding leaves at least this shrink factor to the resize, for quality."""
MAX_BLUR_FACTOR = 8.0
"""Larger shrink factors are reduced by area averaging first: so wide a blur takes minutes and is coarse."""
EXTRA_ROWS = 4
"""Rows decoded below a crop: upsampling the chroma of its last row reads the rows below it."""
MAX_KEPT_BYTES = 16 << 20
_CHECK_SIZE = 8
_COLOR_SPACES = ("YCbCr", "Gray", "RGB")
_UNREAD_DATA = re.compile(r"extraneous bytes before marker 0xd9")


class Header(NamedTuple):
    """The upright size of an image; `orientation` is that of EXIF, None if only Pillow can decode the image."""

    width: int
    height: int
    orientation: int | None


class DecodeTask(NamedTuple):
    """What to decode into a row of a batch."""

    row: int
    data: Buffer
    header: Header
    crop: Crop
    flip: bool


class Decoder:
    """Decoder of one thread: reads the header of an image, then decodes a crop of it."""

    def __init__(self, *, antialias: bool = True) -> None:
        self._antialias = antialias
        self._decoded, self._blurred = _ScratchBuffer(), _ScratchBuffer()
        self._unflipped, self._reduced = _ScratchBuffer(), _ScratchBuffer()

    def read_header(self, data: Buffer) -> Header:
        """Read the header of an image; raise BadImageError if the image cannot be decoded."""
        if images.sniff(data) == "jpg":
            try:
                height, width, color_space, _ = simplejpeg.decode_jpeg_header(data)
            except Exception:
                return self._read_header_pillow(data)
            images.check_size(width, height)
            if color_space in _COLOR_SPACES:
                orientation = images.read_orientation(data)
                if orientation >= 5:
                    width, height = height, width
                return Header(width, height, orientation)
        return self._read_header_pillow(data)

    def fill(self, data: Buffer, header: Header, crop: Crop, flip: bool, out: Pixels) -> None:
        """Decode a crop of the upright image into `out`, a square of RGB pixels; raise BadImageError if damaged."""
        with _translate_errors():
            self._fill(data, header, crop, flip, out)

    def decode_whole(self, data: Buffer) -> Pixels:
        """Return the pixels of a whole image, upright, in new memory."""
        header = self.read_header(data)
        if header.orientation == 1:
            with suppress(Exception):  # unsupported or damaged: Pillow decides which
                pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB")
                return pixels
        with _translate_errors():
            return np.array(images.decode_rgb(data))  # Pillow's array is read-only

    def _fill(self, data: Buffer, header: Header, crop: Crop, flip: bool, out: Pixels) -> None:
        if header.orientation is None:
            self._fill_pillow(data, header, crop, flip, out)
            return
        stored = _stored_crop(crop, header)
        pixels, eighths = self._decode_jpeg(data, header, stored, out.shape[0])
        if pixels is None:  # unsupported or damaged: Pillow decides which
            self._fill_pillow(data, header, crop, flip, out)
            return
        if eighths != 8:
            stored = Crop(*(side * eighths / 8 for side in stored))
        if header.orientation == 1:
            self._resize(pixels, stored, flip, out)
            return
        small = np.empty_like(out)
        self._resize(pixels, stored, False, small)
        upright = _upright_view(small, header.orientation)
        out[:] = upright[:, ::-1] if flip else upright

    def _read_header_pillow(self, data: Buffer) -> Header:
        width, height = images.read_upright_size(data)
        return Header(width, height, None)

    def _fill_pillow(self, data: Buffer, header: Header, crop: Crop, flip: bool, out: Pixels) -> None:
        pixels = images.decode_rgb(data)
        if pixels.shape != (header.height, header.width, 3):
            raise BadImageError("header and pixels disagree on the size or orientation")
        self._resize(pixels, crop, flip, out)

    def _decode_jpeg(self, data: Buffer, header: Header, stored: Crop, size: int) -> tuple[Pixels | None, int]:
        """Decode the stored image down to the last row of the crop; return the pixels and their scale in eighths.

        The decoder scales images that would be shrunk a lot anyway. The pixels are None if the decoder complained.
        """
        width, height = header.width, header.height
        if header.orientation is not None and header.orientation >= 5:
            width, height = height, width
        shrink = min(stored.width, stored.height) / (size * RESIZE_HEADROOM)
        eighths = math.ceil(8 / shrink) if shrink >= 2 else 8
        rows = math.ceil(stored.top + stored.height) + EXTRA_ROWS
        if eighths != 8 or stored.height != int(stored.height):  # Pillow's filter reads below the crop
            rows += math.ceil(stored.height / size) + EXTRA_ROWS
        truncated = images.limit_rows(data, rows)
        if truncated is not None:
            pixels, complaint = self._decode_scaled(truncated, width, rows, eighths)
            if not complaint or _UNREAD_DATA.search(complaint):  # the rows below the crop
                return pixels, eighths
        pixels, complaint = self._decode_scaled(data, width, height, eighths)
        return (None if complaint else pixels), eighths

    def _decode_scaled(self, data: Buffer, width: int, height: int, eighths: int) -> tuple[Pixels, str]:
        """Decode a JPEG into scratch memory; return the pixels and the complaint of the decoder, if any."""
        shape = (-(-height * eighths // 8), -(-width * eighths // 8), 3)
        out = self._decoded.array(shape)
        try:
            simplejpeg.decode_jpeg(data, "RGB", min_height=shape[0], min_width=shape[1], buffer=out)
        except Exception as error:
            return out, str(error) or type(error).__name__
        return out, ""

    def _resize(self, pixels: Pixels, crop: Crop, flip: bool, out: Pixels) -> None:
        size = out.shape[0]
        target = self._unflipped.array(out.shape) if flip else out
        if self._antialias and any(side != int(side) for side in crop):
            target[:] = images.resize_box(pixels, crop, size)
        else:
            left, top = min(round(crop.left), pixels.shape[1] - 1), min(round(crop.top), pixels.shape[0] - 1)
            width, height = max(1, round(crop.width)), max(1, round(crop.height))
            part = pixels[top : top + height, left : left + width]
            if self._antialias:
                part = self._reduce(part, size)
                part = self._blur(part, part.shape[1] / size, part.shape[0] / size)
            cv2.resize(part, (size, size), dst=target, interpolation=cv2.INTER_LINEAR)
        if flip:
            cv2.flip(target, 1, dst=out)

    def _reduce(self, pixels: Pixels, size: int) -> Pixels:
        """Shrink sides that exceed `size` by more than MAX_BLUR_FACTOR to half of that."""
        height, width = (
            round(size * MAX_BLUR_FACTOR / 2) if side > size * MAX_BLUR_FACTOR else side for side in pixels.shape[:2]
        )
        if (height, width) == pixels.shape[:2]:
            return pixels
        out = self._reduced.array((height, width, 3))
        cv2.resize(pixels, (width, height), dst=out, interpolation=cv2.INTER_AREA)
        return out

    def _blur(self, pixels: Pixels, x: float, y: float) -> Pixels:
        """Blur an image that will shrink by x and y, so that bilinear sampling comes close to Pillow's filter.

        Pillow's triangle filter, as wide as the shrink factor s, has a variance of s²/6, bilinear sampling one of 1/6.
        The blur adds the difference, and a fifth more because sampling at the exact center of a pixel adds nothing.
        """
        (taps_x, sigma_x), (taps_y, sigma_y) = _blur_kernel(x), _blur_kernel(y)
        if taps_x == taps_y == 1:
            return pixels
        out = self._blurred.array(pixels.shape)
        border = cv2.BORDER_REPLICATE
        cv2.GaussianBlur(pixels, (taps_x, taps_y), sigmaX=sigma_x, dst=out, sigmaY=sigma_y, borderType=border)
        return out


class DecodeCheck:
    """Check that images can be decoded by the general decoder, from several threads."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self, data: Buffer) -> None:
        """Decode all of an image, as built-in and user transforms do; raise BadImageError if that fails.

        The native decoder leaves what it does not support to the general decoder, so it has no faults of its own.
        """
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder(antialias=False)
        decoder: Decoder = self._local.decoder
        header = decoder.read_header(data)
        # So small that large images are scaled while they are decoded: all of the file is read in any case.
        out = np.empty((_CHECK_SIZE, _CHECK_SIZE, 3), dtype=np.uint8)
        decoder.fill(data, header, Crop(0, 0, header.width, header.height), False, out)
        if header.orientation not in (None, 1):
            decoder.decode_whole(data)


class _ScratchBuffer:
    """Memory that one thread reuses for each image, unless it is very large."""

    def __init__(self) -> None:
        self._memory = np.empty(1 << 20, dtype=np.uint8)

    def array(self, shape: tuple[int, ...]) -> Pixels:
        """Return an uninitialized array of this shape."""
        size = math.prod(shape)
        if size > MAX_KEPT_BYTES:
            return np.empty(shape, dtype=np.uint8)
        if size > self._memory.nbytes:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory[:size].reshape(shape)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise BadImageError for whatever a decoder raised: one image must not end an epoch."""
    try:
        yield
    except BadImageError:
        raise
    except Exception as error:
        raise BadImageError(f"cannot be decoded: {str(error) or type(error).__name__}") from error


def hwc_to_chw(pixels: Pixels, out: Pixels) -> None:
    """Copy height × width × 3 into 3 × height × width."""
    cv2.split(pixels, list(out))


def _blur_kernel(shrink: float) -> tuple[int, float]:
    """Return taps and sigma of a Gaussian of variance (s² - 1) / 5."""
    variance = (shrink * shrink - 1) / 5
    if variance < 0.004:  # changes less than one gray level
        return 1, 1.0
    if variance <= 0.5:  # three taps, the outer ones with a weight of half the variance
        outer = variance / 2
        return 3, math.sqrt(-0.5 / math.log(outer / (1 - 2 * outer)))
    return 2 * math.ceil(3 * math.sqrt(variance)) + 1, math.sqrt(variance)


def _stored_crop(crop: Crop, header: Header) -> Crop:
    """Convert a crop of the upright image to one of the image as it is stored."""
    left, top, width, height = crop
    right, bottom = header.width - left - width, header.height - top - height
    return {
        1: crop,
        2: Crop(right, top, width, height),
        3: Crop(right, bottom, width, height),
        4: Crop(left, bottom, width, height),
        5: Crop(top, left, height, width),
        6: Crop(top, right, height, width),
        7: Crop(bottom, right, height, width),
        8: Crop(bottom, left, height, width),
    }[header.orientation or 1]


def _upright_view(pixels: Pixels, orientation: int) -> Pixels:
    """Return a view of stored pixels with the EXIF orientation applied."""
    if orientation in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if orientation in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels.transpose(1, 0, 2) if orientation >= 5 else pixels
