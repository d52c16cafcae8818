"""Lossless PNG for datasets that store bare pixels."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, __version__, features

PNG_RECIPE = f"PNG by Pillow {__version__}, zlib {features.version_codec('zlib')}"
"""Other versions may pack the same pixels into other bytes."""


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode height × width (grey) or height × width × 3 (RGB); the same pixels give the same bytes."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", optimize=False, compress_level=6)
    return out.getvalue()
