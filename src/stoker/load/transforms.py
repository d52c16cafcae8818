"""The built-in transforms: choose the crop of an image and whether to flip it, before any pixel is decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stoker.core.permutations import seed_key, splitmix64

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SCALE = (0.08, 1.0)
SMALL_SCALE = (0.6, 1.0)
RATIO = (3 / 4, 4 / 3)
_LOG_RATIO = (math.log(RATIO[0]), math.log(RATIO[1]))
MAX_ATTEMPTS = 10
NUMBERS_PER_SAMPLE = 2 * MAX_ATTEMPTS + 3
"""Random numbers per sample: area and aspect ratio of each attempt, x and y of the crop, and the flip."""
_STRIDE = 32  # counters reserved per position; more than NUMBERS_PER_SAMPLE
VAL_RESIZE_RATIO = 256 / 224
MAX_SIZE = 4096


class Crop(NamedTuple):
    """A part of an upright image in pixels; its edges may lie between pixels where resizing comes before cropping."""

    left: float
    top: float
    width: float
    height: float


class Transform(Protocol):
    """Function from the size of an image and uniform random numbers in [0, 1) to a crop."""

    def __call__(self, width: int, height: int, numbers: list[float]) -> tuple[Crop, bool]:
        """Return the crop and whether to flip it horizontally."""
        ...


def random_numbers(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the random numbers of samples: they depend on the positions only, not on the world size or on restarts."""
    counters = np.multiply.outer(positions.astype(np.uint64), np.array([_STRIDE], dtype=np.uint64))
    words = splitmix64(
        counters + np.arange(NUMBERS_PER_SAMPLE, dtype=np.uint64) + np.uint64(seed_key("augment", seed, epoch))
    )
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_resized_crop(
    width: int, height: int, numbers: list[float], *, scale: tuple[float, float] = SCALE, flip: bool = True
) -> tuple[Crop, bool]:
    """Crop 8–100% of the area at an aspect ratio of 3:4 to 4:3 and flip with probability 0.5, as torchvision does."""
    area, flipped = width * height, flip and numbers[-1] < 0.5
    low, high = _LOG_RATIO
    for attempt in range(MAX_ATTEMPTS):
        target_area = area * (scale[0] + (scale[1] - scale[0]) * numbers[2 * attempt])
        ratio = math.exp(low + (high - low) * numbers[2 * attempt + 1])
        w, h = round(math.sqrt(target_area * ratio)), round(math.sqrt(target_area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(numbers[-3] * (width - w + 1)), int(numbers[-2] * (height - h + 1))
            return Crop(left, top, w, h), flipped
    # A long, narrow image: crop as much of its center as the aspect ratio allows.
    w, h = width, height
    if width < height * RATIO[0]:
        h = max(1, round(width / RATIO[0]))
    elif width > height * RATIO[1]:
        w = max(1, round(height * RATIO[1]))
    return Crop((width - w) // 2, (height - h) // 2, w, h), flipped


class CenterCrop:
    """Resize the shorter side to 256/224 of the output size, then crop the center: the usual ImageNet validation."""

    def __init__(self, size: int) -> None:
        self._size, self._short = size, round(size * VAL_RESIZE_RATIO)

    def __call__(self, width: int, height: int, numbers: list[float]) -> tuple[Crop, bool]:  # noqa: ARG002
        """Return the part of the image that becomes the center of the resized image."""
        size, short = self._size, min(width, height)
        # Truncate the longer side and round the center to whole pixels, as torchvision does.
        wide, high = (int(self._short * side / short) for side in (width, height))
        left, top = round((wide - size) / 2), round((high - size) / 2)
        x, y = width / wide, height / high
        return Crop(left * x, top * y, size * x, size * y), False


def whole_image(width: int, height: int, numbers: list[float]) -> tuple[Crop, bool]:  # noqa: ARG001
    """Return the whole image, whatever its aspect ratio: small images have no margin to crop."""
    return Crop(0, 0, width, height), False


TRANSFORMS: dict[str, Callable[[int], Transform]] = {
    "imagenet-train": lambda _: random_resized_crop,
    "imagenet-val": CenterCrop,
    "small-train": lambda _: partial(random_resized_crop, scale=SMALL_SCALE),
    "digits-train": lambda _: partial(random_resized_crop, scale=SMALL_SCALE, flip=False),
    "whole": lambda _: whole_image,
}
"""By name: functions from the output size in pixels to the transform."""
