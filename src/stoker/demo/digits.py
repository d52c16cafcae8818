"""A small dataset of real images: scikit-learn's handwritten digits, as JPEG files in class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from stoker.errors import MissingExtraError

SIDE = 32
VAL_EVERY = 5
"""Every fifth is for validation."""


def write_digits(folder: Path) -> tuple[int, int]:
    """Write `train/<digit>/NNNN.jpg` and `val/<digit>/NNNN.jpg`; tell how many there are of each."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo", purpose="the demo's dataset") from error
    found = load_digits()
    counts = {"train": 0, "val": 0}
    for number, (pixels, digit) in enumerate(zip(found.images, found.target, strict=True)):
        split = "val" if number % VAL_EVERY == 0 else "train"
        path = folder / split / str(digit) / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        ink = 255 - np.rint(pixels * (255 / 16)).astype(np.uint8)
        Image.fromarray(ink).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=95)
        counts[split] += 1
    return counts["train"], counts["val"]
