"""What a model sees of an image: which part of it, and whether mirrored. The size is known, no pixel is decoded yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stoker.core.permutations import key, mix

SCALE = (0.08, 1.0)
SMALL_SCALE = (0.6, 1.0)
RATIO = (3 / 4, 4 / 3)
_LOG_RATIO = (math.log(RATIO[0]), math.log(RATIO[1]))
ATTEMPTS = 10
DRAWS = 2 * ATTEMPTS + 3
"""Random numbers for one sample: area and shape for each attempt, the place of the crop, and the mirror."""
_STRIDE = 32  # counters set apart for each position; more than DRAWS
VAL_MARGIN = 256 / 224
MAX_SIZE = 4096


class Crop(NamedTuple):
    """A part of an upright image, in pixels; where resizing comes before cropping its edges lie between pixels."""

    left: float
    top: float
    width: float
    height: float


class Transform(Protocol):
    """Chooses what of an image of this size is seen, given uniform random numbers from 0 to 1."""

    def __call__(self, width: int, height: int, draws: list[float]) -> tuple[Crop, bool]:
        """Return the crop, and whether it is mirrored."""
        ...


def draws(seed: int, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Draw the random numbers of samples by their positions alone: the same in any world and after any restart."""
    counters = np.multiply.outer(positions.astype(np.uint64), np.array([_STRIDE], dtype=np.uint64))
    words = mix(counters + np.arange(DRAWS, dtype=np.uint64) + np.uint64(key("augment", seed, epoch)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_resized_crop(
    width: int, height: int, draws: list[float], *, scale: tuple[float, float] = SCALE, mirror: bool = True
) -> tuple[Crop, bool]:
    """Crop 8–100 % of the area at a ratio of 3:4 to 4:3, and mirror half the time, as torchvision draws it."""
    area, mirrored = width * height, mirror and draws[-1] < 0.5
    low, high = _LOG_RATIO
    for attempt in range(ATTEMPTS):
        wanted = area * (scale[0] + (scale[1] - scale[0]) * draws[2 * attempt])
        ratio = math.exp(low + (high - low) * draws[2 * attempt + 1])
        w, h = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[-3] * (width - w + 1)), int(draws[-2] * (height - h + 1))
            return Crop(left, top, w, h), mirrored
    # A long, narrow image: as much of its middle as the ratio allows.
    w, h = width, height
    if width < height * RATIO[0]:
        h = max(1, round(width / RATIO[0]))
    elif width > height * RATIO[1]:
        w = max(1, round(height * RATIO[1]))
    return Crop((width - w) // 2, (height - h) // 2, w, h), mirrored


class CenterCrop:
    """Resize the shorter side to 256/224 of the output, then take the middle: what ImageNet is validated with."""

    def __init__(self, size: int) -> None:
        self._size, self._short = size, round(size * VAL_MARGIN)

    def __call__(self, width: int, height: int, draws: list[float]) -> tuple[Crop, bool]:  # noqa: ARG002
        """Return the part of the image that the middle of the resized one is made of."""
        size, short = self._size, min(width, height)
        # The longer side is cut to whole pixels, and the middle rounded to them, as torchvision does.
        wide, high = (int(self._short * side / short) for side in (width, height))
        left, top = round((wide - size) / 2), round((high - size) / 2)
        x, y = width / wide, height / high
        return Crop(left * x, top * y, size * x, size * y), False


def whole(width: int, height: int, draws: list[float]) -> tuple[Crop, bool]:  # noqa: ARG001
    """Take the whole image, whatever its shape: small images have nothing to spare at their edges."""
    return Crop(0, 0, width, height), False


TRANSFORMS: dict[str, Callable[[int], Transform]] = {
    "imagenet-train": lambda _: random_resized_crop,
    "imagenet-val": CenterCrop,
    "small-train": lambda _: partial(random_resized_crop, scale=SMALL_SCALE),
    "digits-train": lambda _: partial(random_resized_crop, scale=SMALL_SCALE, mirror=False),
    "whole": lambda _: whole,
}
"""By name, for an output of so many pixels."""
