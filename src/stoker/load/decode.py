"""Images into rows of a batch: the one seam to whatever decodes. Here simplejpeg and OpenCV, both outside the GIL."""

from __future__ import annotations

import math
import re
from contextlib import suppress
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

# Threads of ours hold the cores already; OpenCV's own would only fight them.
cv2.setNumThreads(0)

GAP = 2.0
"""The JPEG decoder itself shrinks what would be shrunk further by this factor or more afterwards."""
MOST_BLURRED = 8.0
"""What shrinks further than this is first shrunk by areas: a blur so wide takes minutes, and is coarse."""
ROWS_BELOW = 4
"""Rows decoded below a crop: where colours are stored at half the height, those of its last row take in the next."""
KEPT_BYTES = 16 << 20
_PLAIN = ("YCbCr", "Gray", "RGB")
_LEFT_OVER = re.compile(r"extraneous bytes before marker 0xd9")


class Header(NamedTuple):
    """An image's upright size; `turn` is how its pixels are stored, None when only the general decoder reads it."""

    width: int
    height: int
    turn: int | None


class Task(NamedTuple):
    """What a row of a batch will be made of."""

    row: int
    data: Buffer
    header: Header
    crop: Crop
    flip: bool


class Decoder:
    """One thread's decoder: looks at a header, then fills a row with the part of the image that was chosen."""

    def __init__(self, *, antialias: bool = True) -> None:
        self._antialias = antialias
        self._hard, self._soft, self._square, self._areas = _Kept(), _Kept(), _Kept(), _Kept()

    def look(self, data: Buffer) -> Header:
        """Read an image's header; raise BadImageError for what cannot be decoded."""
        if images.sniff(data) == "jpg":
            try:
                height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            except ValueError:
                return self._look_general(data)
            images.check_size(width, height)
            if colours in _PLAIN:
                turn = images.orientation(data)
                return Header(height, width, turn) if turn >= 5 else Header(width, height, turn)
        return self._look_general(data)

    def fill(self, data: Buffer, header: Header, crop: Crop, flip: bool, out: Pixels) -> None:
        """Fill `out`, a square of RGB pixels, with the crop of the upright image; raise BadImageError if it cannot."""
        if header.turn is None:
            self._fill_general(data, header, crop, flip, out)
            return
        stored = _stored(crop, header)
        pixels, eighths = self._decode_jpeg(data, header, stored, out.shape[0])
        if pixels is None:  # odd, or damaged: Pillow decides which
            self._fill_general(data, header, crop, flip, out)
            return
        if eighths != 8:
            stored = Crop(*(side * eighths / 8 for side in stored))
        if header.turn == 1:
            self._resize(pixels, stored, flip, out)
            return
        small = np.empty_like(out)
        self._resize(pixels, stored, False, small)
        turned = _turned(small, header.turn)
        out[:] = turned[:, ::-1] if flip else turned

    def whole(self, data: Buffer) -> Pixels:
        """Decode a whole image, upright, into pixels of its own."""
        header = self.look(data)
        if header.turn == 1:
            with suppress(ValueError):  # odd, or damaged: Pillow decides which
                pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB")
                return pixels
        return np.array(images.pixels(data))  # Pillow's own cannot be written to

    def _look_general(self, data: Buffer) -> Header:
        width, height = images.upright_size(data)
        return Header(width, height, None)

    def _fill_general(self, data: Buffer, header: Header, crop: Crop, flip: bool, out: Pixels) -> None:
        pixels = images.pixels(data)
        if pixels.shape != (header.height, header.width, 3):
            raise BadImageError("its header and its pixels do not agree on its size or how it is turned")
        self._resize(pixels, crop, flip, out)

    def _decode_jpeg(self, data: Buffer, header: Header, stored: Crop, size: int) -> tuple[Pixels | None, int]:
        """Decode the image as it is stored down to the crop's last row, and tell by how many eighths it is shrunk.

        The decoder itself shrinks an image of which little is needed. None if it does not like what it decodes.
        """
        width, height = header.width, header.height
        if header.turn is not None and header.turn >= 5:
            width, height = height, width
        shrink = min(stored.width, stored.height) / (size * GAP)
        eighths = math.ceil(8 / shrink) if shrink >= 2 else 8
        rows = math.ceil(stored.top + stored.height) + ROWS_BELOW
        if eighths != 8 or stored.height != int(stored.height):  # Pillow's filter looks below a crop
            rows += math.ceil(stored.height / size) + ROWS_BELOW
        short = images.shortened(data, rows)
        if short is not None:
            pixels, said = self._decode_whole(short, width, rows, eighths)
            if not said or _LEFT_OVER.search(said):  # the rows that were not asked for
                return pixels, eighths
        pixels, said = self._decode_whole(data, width, height, eighths)
        return (None if said else pixels), eighths

    def _decode_whole(self, data: Buffer, width: int, height: int, eighths: int) -> tuple[Pixels, str]:
        """Decode a JPEG into memory that is kept, and tell what the decoder said about it."""
        shape = (-(-height * eighths // 8), -(-width * eighths // 8), 3)
        out = self._hard.room(shape)
        try:
            simplejpeg.decode_jpeg(data, "RGB", min_height=shape[0], min_width=shape[1], buffer=out)
        except ValueError as error:
            return out, str(error)
        return out, ""

    def _resize(self, pixels: Pixels, crop: Crop, flip: bool, out: Pixels) -> None:
        size = out.shape[0]
        target = self._square.room(out.shape) if flip else out
        if self._antialias and any(side != int(side) for side in crop):
            target[:] = images.resized(pixels, crop, size)
        else:
            left, top = min(round(crop.left), pixels.shape[1] - 1), min(round(crop.top), pixels.shape[0] - 1)
            width, height = max(1, round(crop.width)), max(1, round(crop.height))
            part = pixels[top : top + height, left : left + width]
            if self._antialias:
                part = self._by_areas(part, size)
                part = self._blurred(part, part.shape[1] / size, part.shape[0] / size)
            cv2.resize(part, (size, size), dst=target, interpolation=cv2.INTER_LINEAR)
        if flip:
            cv2.flip(target, 1, dst=out)

    def _by_areas(self, pixels: Pixels, size: int) -> Pixels:
        """Shrink sides that are far too long for `size`, to half of what a blur may be given."""
        height, width = (
            round(size * MOST_BLURRED / 2) if side > size * MOST_BLURRED else side for side in pixels.shape[:2]
        )
        if (height, width) == pixels.shape[:2]:
            return pixels
        out = self._areas.room((height, width, 3))
        cv2.resize(pixels, (width, height), dst=out, interpolation=cv2.INTER_AREA)
        return out

    def _blurred(self, pixels: Pixels, x: float, y: float) -> Pixels:
        """Blur what will shrink by x and y, so that bilinear sampling then spreads about as wide as PIL's triangle.

        A triangle as wide as the shrinking has a variance of s²/6, bilinear sampling one of 1/6; the difference is
        blurred in, a fifth more of it because sampling at a pixel's very middle adds nothing.
        """
        (taps_x, sigma_x), (taps_y, sigma_y) = _gauss(x), _gauss(y)
        if taps_x == taps_y == 1:
            return pixels
        out = self._soft.room(pixels.shape)
        border = cv2.BORDER_REPLICATE
        cv2.GaussianBlur(pixels, (taps_x, taps_y), sigmaX=sigma_x, dst=out, sigmaY=sigma_y, borderType=border)
        return out


class _Kept:
    """Memory that one thread uses again for each image; what is very large is not kept."""

    def __init__(self) -> None:
        self._memory = np.empty(1 << 20, dtype=np.uint8)

    def room(self, shape: tuple[int, ...]) -> Pixels:
        size = math.prod(shape)
        if size > KEPT_BYTES:
            return np.empty(shape, dtype=np.uint8)
        if size > self._memory.nbytes:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory[:size].reshape(shape)


def to_planes(pixels: Pixels, out: Pixels) -> None:
    """Copy height × width × 3 into 3 × height × width."""
    cv2.split(pixels, list(out))


def _gauss(shrink: float) -> tuple[int, float]:
    """Give taps and sigma of a blur with variance (s² - 1) / 5."""
    variance = (shrink * shrink - 1) / 5
    if variance < 0.004:  # less than a grey level
        return 1, 1.0
    if variance <= 0.5:  # three taps, whose outer ones weigh half the variance
        side = variance / 2
        return 3, math.sqrt(-0.5 / math.log(side / (1 - 2 * side)))
    return 2 * math.ceil(3 * math.sqrt(variance)) + 1, math.sqrt(variance)


def _stored(crop: Crop, header: Header) -> Crop:
    """Find a crop of the upright image in the image as it is stored."""
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
    }[header.turn or 1]


def _turned(pixels: Pixels, turn: int) -> Pixels:
    """Give stored pixels upright, as a view."""
    if turn in (3, 4, 6, 7):
        pixels = pixels[::-1]
    if turn in (2, 3, 7, 8):
        pixels = pixels[:, ::-1]
    return pixels.transpose(1, 0, 2) if turn >= 5 else pixels
