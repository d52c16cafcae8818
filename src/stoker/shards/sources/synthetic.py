"""Source: synthetic images, generated from a seed, learnable, of any size and number, for tests and benchmarks."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, __version__

from stoker.errors import InputError
from stoker.shards.sample import Content, Item
from stoker.shards.sources.png import encode_png

PREFIX = "synthetic:"
EXAMPLE = "synthetic:samples=1000,classes=10,size=64x48,val=200,seed=0,kind=jpg"
MAX_SAMPLES = 10**12
MAX_CLASSES = 100_000
MAX_SIDE = 8192
SPLITS = ("train", "val")
# Horizontal and vertical steps of stripes in eight directions.
DIRECTIONS = ((8, 0), (7, 3), (6, 6), (3, 7), (0, 8), (-3, 7), (-6, 6), (-7, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings after `synthetic:`."""

    samples: int = 1000
    classes: int = 10
    size: tuple[int, int] = (64, 64)
    val: int = 0
    seed: int = 0
    kind: str = "jpg"


class SyntheticSource:
    """Generated images with labels; each depends only on the seed, the split and its number."""

    name = "synthetic"

    def __init__(self, where: str, *, scratch: Path) -> None:  # noqa: ARG002 - nothing needs unpacking
        self._recipe = parse_recipe(where)
        self.recipe = f"{self._recipe!r} by Pillow {__version__}"
        counts = zip(SPLITS, (self._recipe.samples, self._recipe.val), strict=True)
        self._counts = {split: count for split, count in counts if count}
        self.splits: Sequence[str] = tuple(self._counts)
        digits = max(2, len(str(self._recipe.classes - 1)))
        self.classes: Sequence[str] = tuple(f"class{label:0{digits}d}" for label in range(self._recipe.classes))
        self.notes: Sequence[str] = ("the images are synthetic: use them to measure speed, not accuracy",)

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether the name starts with `synthetic:`."""
        return where.startswith(PREFIX) or where == PREFIX.rstrip(":")

    def scan(self, split: str) -> Iterator[Item]:
        """List the images; labels cycle through the classes."""
        width, height = self._recipe.size
        # An estimate, as nothing is encoded yet: such JPEGs take 3 bits per pixel, and noise does not compress as PNG.
        size = 600 + width * height * (3 if self._recipe.kind == "jpg" else 18) // 8
        for index in range(self._counts[split]):
            label = index % self._recipe.classes
            name = f"{self.classes[label]}/{index:08d}.{self._recipe.kind}"
            yield Item(name=name, label=label, size=size, offset=index)

    def read(self, split: str, item: Item) -> Content:
        """Generate and encode one image."""
        pixels = draw_image(self._recipe, SPLITS.index(split), item.offset)
        if self._recipe.kind == "png":
            return Content(encode_png(pixels))
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=90)
        return Content(out.getvalue())

    def close(self) -> None:
        """Do nothing: no file stays open."""


def draw_image(recipe: Recipe, split: int, index: int) -> npt.NDArray[np.uint8]:
    """Draw stripes; color, direction and width depend on the class, offset, brightness and noise on the seed.

    Uses only raw words and integers, which are the same in every version of NumPy and on every machine; NumPy's
    distributions and the sine of libm are not.
    """
    label = index % recipe.classes
    width, height = recipe.size
    words = np.random.Philox(key=np.array([recipe.seed, split << 62 | index], np.uint64)).random_raw(
        1 + -(-3 * width * height // 8)
    )
    noise = words[1:].astype("<u8").view(np.uint8)[: 3 * width * height].reshape(height, width, 3)
    shift, light = int(words[0]) & 511, 192 + (int(words[0]) >> 9 & 63)
    across, down = DIRECTIONS[label % len(DIRECTIONS)]
    thickness = 1 + label // len(DIRECTIONS) % 3
    x, y = np.arange(width, dtype=np.int32), np.arange(height, dtype=np.int32)[:, None]
    phase = ((x * across + y * down) * 4 // thickness + shift) & 511
    stripes = 96 + (np.where(phase < 256, phase, 511 - phase) * 160 >> 8)
    color = np.array(_hue_to_rgb(label * 1536 // recipe.classes), np.int32) * light >> 8
    pixels = (stripes[:, :, None] * color >> 8) * 7 // 8 + (noise >> 3)
    return pixels.astype(np.uint8)


def _hue_to_rgb(hue: int) -> tuple[int, int, int]:
    """Return the color at step `hue` of 1536 around the color circle, each channel from 32 to 255."""

    def channel(at: int) -> int:
        distance = abs((hue - at + 768) % 1536 - 768)
        return min(max(512 - distance, 32), 255)

    return channel(0), channel(512), channel(1024)


def parse_recipe(where: str) -> Recipe:
    """Parse `synthetic:key=value,…`; raise one InputError with every fault."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    for part in filter(None, (part.strip() for part in where.partition(":")[2].split(","))):
        key, equals, value = part.partition("=")
        if key not in SETTINGS or not equals:
            faults.append(f"unknown setting {part!r}")
        elif key in values:
            faults.append(f"{key} is set twice")
        else:
            try:
                values[key] = SETTINGS[key](value)
            except ValueError as error:
                faults.append(f"{key} must be {error}, got {value!r}")
                values[key] = None
    if faults:
        raise InputError("; ".join(faults), where=where, hint=f"all settings are optional: {EXAMPLE}")
    return Recipe(**values)


def _parse_int(low: int, high: int, text: str) -> int:
    # int() also accepts signs, spaces and underscores, and fails at 4300 digits.
    if not (text.isascii() and text.isdigit() and len(text) < 40 and low <= int(text) <= high):
        raise ValueError(f"an integer between {low} and {high}")
    return int(text)


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    width, height = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise ValueError(f"SIDE or WIDTHxHEIGHT, each between 1 and {MAX_SIDE}")
    return width, height


def _parse_kind(text: str) -> str:
    if text not in ("jpg", "png"):
        raise ValueError("jpg or png")
    return text


SETTINGS: dict[str, Callable[[str], Any]] = {
    "samples": partial(_parse_int, 1, MAX_SAMPLES),
    "classes": partial(_parse_int, 1, MAX_CLASSES),
    "size": _parse_size,
    "val": partial(_parse_int, 0, MAX_SAMPLES),
    "seed": partial(_parse_int, 0, 2**64 - 1),
    "kind": _parse_kind,
}
