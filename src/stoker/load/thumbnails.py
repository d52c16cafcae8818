"""Thumbnails of samples, also of damaged ones: as much of a JPEG as can be decoded."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import simplejpeg

from stoker.load.decode import Pixels
from stoker.shards import images
from stoker.shards.images import BadImageError
from stoker.shards.sample import Buffer

QUALITY = 80


class Thumbnail(NamedTuple):
    """A JPEG, and the fault of the image if it shows only the part that can be decoded."""

    jpeg: bytes
    fault: str


def make_thumbnail(data: Buffer, side: int) -> Thumbnail:
    """Return an image whose longer side is at most `side`; raise BadImageError if nothing of it can be decoded."""
    try:
        return Thumbnail(images.shrink(data, side, QUALITY), "")
    except BadImageError as error:
        fault = error
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        images.check_size(width, height)
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=side, min_width=side, strict=False)
    except Exception:  # the decoder may raise anything: the first fault is the better one
        raise fault from None
    scale = min(1.0, side / max(pixels.shape[:2]))
    size = [max(1, round(length * scale)) for length in (pixels.shape[1], pixels.shape[0])]
    return Thumbnail(simplejpeg.encode_jpeg(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)), str(fault))
