"""The demo's dataset: scikit-learn's handwritten digits as JPEG files in class folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from stoker.errors import MissingExtraError

SIDE = 32
VAL_EVERY = 5
"""Every fifth image belongs to the validation split."""


def import_loader() -> Callable[[], Any]:
    """Return the function that loads the digits; raise MissingExtraError if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "demo", purpose="the demo's dataset") from error
    return cast("Callable[[], Any]", load_digits)


def write_digits(folder: Path) -> tuple[int, int]:
    """Write `train/<digit>/NNNN.jpg` and `val/<digit>/NNNN.jpg`; return how many there are of each."""
    digits = import_loader()()
    counts = {"train": 0, "val": 0}
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if number % VAL_EVERY == 0 else "train"
        path = folder / split / str(label) / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        gray = 255 - np.rint(pixels * (255 / 16)).astype(np.uint8)
        Image.fromarray(gray).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path, quality=95)
        counts[split] += 1
    return counts["train"], counts["val"]
