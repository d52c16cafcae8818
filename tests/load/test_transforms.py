"""Transforms: crops have the distribution and fallback of torchvision; the center crop of ImageNet validation."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from stoker.load.transforms import (
    MAX_ATTEMPTS,
    NUMBERS_PER_SAMPLE,
    TRANSFORMS,
    CenterCrop,
    Crop,
    random_numbers,
    random_resized_crop,
)

COUNT = 20_000
SHAPES = [(500, 375), (100, 1000), (37, 23)]

Table = npt.NDArray[np.float64]


def torchvision_crop(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int, bool]:
    """RandomResizedCrop.get_params and RandomHorizontalFlip of torchvision, with numpy's generator."""
    area, log_ratio = width * height, (math.log(3 / 4), math.log(4 / 3))
    for _ in range(10):
        target_area = area * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(*log_ratio))
        w, h = round(math.sqrt(target_area * ratio)), round(math.sqrt(target_area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
            return int(left), int(top), w, h, bool(rng.random() < 0.5)
    in_ratio = width / height
    w, h = width, height
    if in_ratio < 3 / 4:
        h = round(w / (3 / 4))
    elif in_ratio > 4 / 3:
        w = round(h * (4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h, bool(rng.random() < 0.5)


def our_crops(width: int, height: int, seed: int = 0) -> Table:
    """Our crops at the first positions of an epoch: left, top, width, height, flipped."""
    numbers = random_numbers(seed, 0, np.arange(COUNT, dtype=np.int64)).tolist()
    crops = (random_resized_crop(width, height, row) for row in numbers)
    return np.array([(*crop, flip) for crop, flip in crops], dtype=np.float64)


def features(crops: Table, width: int, height: int) -> dict[str, npt.NDArray[np.float64]]:
    left, top, w, h, _ = crops.T
    free_x, free_y = width - w, height - h
    return {
        "area": w * h / (width * height),
        "ratio": w / h,
        "left": left,
        "top": top,
        "relative x": left[free_x > 0] / free_x[free_x > 0],
        "relative y": top[free_y > 0] / free_y[free_y > 0],
    }


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_crops_are_distributed_as_in_torchvision(width: int, height: int) -> None:
    rng = np.random.default_rng(7)
    theirs = np.array([torchvision_crop(width, height, rng) for _ in range(COUNT)], dtype=np.float64)
    ours = our_crops(width, height)
    expected = features(theirs, width, height)
    for name, values in features(ours, width, height).items():
        assert stats.ks_2samp(values, expected[name]).pvalue > 0.001, name
    # Half of 20,000, within five standard deviations.
    assert abs(ours[:, 4].mean() - 0.5) < 0.018


def test_area_is_uniform_and_aspect_ratio_log_uniform() -> None:
    """Compare with the formula, on an image so large that rounding does not matter."""
    ours = features(our_crops(4000, 4000), 4000, 4000)
    small = ours["area"] < 0.7  # such a crop always fits into the square image
    assert stats.kstest(ours["area"][small], stats.uniform(0.08, 0.62).cdf).pvalue > 0.001
    logs = np.log(ours["ratio"][small])
    assert stats.kstest(logs, stats.uniform(math.log(3 / 4), math.log(16 / 9)).cdf).pvalue > 0.001


def test_random_numbers_are_independent() -> None:
    numbers = random_numbers(3, 1, np.arange(COUNT, dtype=np.int64))
    assert numbers.shape == (COUNT, NUMBERS_PER_SAMPLE)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    largest = np.abs(np.corrcoef(numbers.T) - np.eye(NUMBERS_PER_SAMPLE)).max()
    assert largest < 5 / math.sqrt(COUNT)
    neighbors = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    assert abs(neighbors) < 5 / math.sqrt(COUNT)


def test_random_numbers_depend_on_seed_epoch_and_position_only() -> None:
    positions = np.array([5, 3, 1 << 40], dtype=np.int64)
    rows = random_numbers(1, 2, positions)
    assert np.array_equal(rows[:1], random_numbers(1, 2, positions[:1]))
    assert np.array_equal(rows[::-1], random_numbers(1, 2, positions[::-1].copy()))
    assert not np.isclose(rows, random_numbers(1, 3, positions)).any()
    assert not np.isclose(rows, random_numbers(2, 2, positions)).any()
    assert random_numbers(1, 2, positions[:0]).shape == (0, NUMBERS_PER_SAMPLE)


@pytest.mark.parametrize(("width", "height"), [*SHAPES, (1, 1), (1, 7), (3, 2), (2000, 30), (30, 2000)])
def test_a_crop_lies_within_the_image(width: int, height: int) -> None:
    left, top, w, h, flip = our_crops(width, height).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (w >= 1).all()
    assert (h >= 1).all()
    assert (left + w <= width).all()
    assert (top + h <= height).all()
    assert set(flip.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (10, 1000, Crop(0, 493, 10, 13)),
        (1000, 10, Crop(493, 0, 13, 10)),
        (1000, 1, Crop(499, 0, 1, 1)),
        (1, 1000, Crop(0, 499, 1, 1)),
        (9, 1000, Crop(0, 494, 9, 12)),
        (100, 100, Crop(0, 0, 100, 100)),
    ],
)
def test_center_crop_if_no_attempt_fits(width: int, height: int, expected: Crop) -> None:
    # The full area at the widest aspect ratio fits into none of these images.
    attempts = [1.0, 1.0] * MAX_ATTEMPTS
    assert random_resized_crop(width, height, [*attempts, 0.9, 0.9, 0.49]) == (expected, True)
    assert random_resized_crop(width, height, [*attempts, 0.9, 0.9, 0.5]) == (expected, False)


def test_the_last_attempt_is_used() -> None:
    attempts = [1.0, 1.0] * (MAX_ATTEMPTS - 1) + [0.0, 0.5]
    (left, top, w, h), _ = random_resized_crop(100, 100, [*attempts, 0.999999, 0.0, 0.0])
    assert (w, h) == (28, 28)
    assert (left, top) == (72, 0)


@pytest.mark.parametrize(
    ("size", "width", "height", "expected"),
    [
        (224, 256, 256, Crop(16, 16, 224, 224)),
        (224, 512, 256, Crop(144, 16, 224, 224)),
        (224, 512, 512, Crop(32, 32, 448, 448)),
        (112, 128, 128, Crop(8, 8, 112, 112)),
        (7, 8, 8, Crop(0, 0, 7, 7)),
    ],
)
def test_center_crop_after_resizing(size: int, width: int, height: int, expected: Crop) -> None:
    assert CenterCrop(size)(width, height, []) == (expected, False)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (333, 500), (1, 1), (1, 999), (997, 3)])
@pytest.mark.parametrize("size", [1, 32, 224, 384])
def test_center_crop_lies_within_the_image(width: int, height: int, size: int) -> None:
    crop, flip = TRANSFORMS["imagenet-val"](size)(width, height, [0.0] * NUMBERS_PER_SAMPLE)
    assert not flip
    assert crop.left >= 0
    assert crop.top >= 0
    assert crop.left + crop.width <= width + 1e-9
    assert crop.top + crop.height <= height + 1e-9
    # Both sides shrink by the same factor, except that the longer side is truncated to whole pixels.
    short = round(size * 256 / 224)
    assert min(crop.width, crop.height) == pytest.approx(size * min(width, height) / short)


def test_transforms_for_small_images_keep_most_of_the_area() -> None:
    numbers = random_numbers(0, 0, np.arange(2000, dtype=np.int64)).tolist()
    for name, flips in (("small-train", True), ("digits-train", False)):
        crops = [TRANSFORMS[name](32)(32, 32, row) for row in numbers]
        areas = [crop.width * crop.height / 32**2 for crop, _ in crops]
        assert min(areas) >= 0.55  # rounded to pixels
        assert max(areas) == 1
        assert 0.45 < np.mean([flip for _, flip in crops]) < 0.55 if flips else not any(flip for _, flip in crops)
    assert TRANSFORMS["whole"](32)(40, 24, numbers[0]) == (Crop(0, 0, 40, 24), False)
