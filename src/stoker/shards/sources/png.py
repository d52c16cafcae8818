"""Lossless PNG encoding for datasets that store raw pixels."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, __version__, features

PNG_RECIPE = f"PNG by Pillow {__version__}, zlib {features.version_codec('zlib')}"
"""Part of the plan's digest, because other versions may encode the same pixels differently."""


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode height × width (grayscale) or height × width × 3 (RGB); equal pixels give equal bytes."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", optimize=False, compress_level=6)
    return out.getvalue()
