"""Crops by numbers alone: torchvision's distribution, its fallback, and the middle that ImageNet is validated with."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from stoker.load.transforms import ATTEMPTS, DRAWS, TRANSFORMS, CenterCrop, Crop, draws, random_resized_crop

COUNT = 20_000
SHAPES = [(500, 375), (100, 1000), (37, 23)]

Table = npt.NDArray[np.float64]


def torchvisions(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int, bool]:
    """RandomResizedCrop.get_params and RandomHorizontalFlip of torchvision, with numpy's generator."""
    area, log_ratio = width * height, (math.log(3 / 4), math.log(4 / 3))
    for _ in range(10):
        wanted = area * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(*log_ratio))
        w, h = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
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


def drawn(width: int, height: int, seed: int = 0) -> Table:
    """Our crops at the first positions of an epoch: left, top, width, height, mirrored."""
    numbers = draws(seed, 0, np.arange(COUNT, dtype=np.int64)).tolist()
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
        "place across": left[free_x > 0] / free_x[free_x > 0],
        "place down": top[free_y > 0] / free_y[free_y > 0],
    }


@pytest.mark.parametrize(("width", "height"), SHAPES)
def test_crops_are_distributed_as_torchvisions(width: int, height: int) -> None:
    rng = np.random.default_rng(7)
    theirs = np.array([torchvisions(width, height, rng) for _ in range(COUNT)], dtype=np.float64)
    ours = drawn(width, height)
    expected = features(theirs, width, height)
    for name, values in features(ours, width, height).items():
        assert stats.ks_2samp(values, expected[name]).pvalue > 0.001, name
    # Half of 20,000 give or take five standard deviations.
    assert abs(ours[:, 4].mean() - 0.5) < 0.018


def test_the_area_is_uniform_and_the_ratio_log_uniform() -> None:
    """Against the formula itself, where the image is so wide that no first attempt fails but by its height."""
    ours = features(drawn(4000, 4000), 4000, 4000)
    small = ours["area"] < 0.7  # such a crop always fits into a square
    assert stats.kstest(ours["area"][small], stats.uniform(0.08, 0.62).cdf).pvalue > 0.001
    logs = np.log(ours["ratio"][small])
    assert stats.kstest(logs, stats.uniform(math.log(3 / 4), math.log(16 / 9)).cdf).pvalue > 0.001


def test_what_is_drawn_is_independent_of_each_other() -> None:
    numbers = draws(3, 1, np.arange(COUNT, dtype=np.int64))
    assert numbers.shape == (COUNT, DRAWS)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    away = np.abs(np.corrcoef(numbers.T) - np.eye(DRAWS)).max()
    assert away < 5 / math.sqrt(COUNT)
    neighbours = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(COUNT)


def test_draws_depend_on_seed_epoch_and_position_alone() -> None:
    positions = np.array([5, 3, 1 << 40], dtype=np.int64)
    rows = draws(1, 2, positions)
    assert np.array_equal(rows[:1], draws(1, 2, positions[:1]))
    assert np.array_equal(rows[::-1], draws(1, 2, positions[::-1].copy()))
    assert not np.isclose(rows, draws(1, 3, positions)).any()
    assert not np.isclose(rows, draws(2, 2, positions)).any()
    assert draws(1, 2, positions[:0]).shape == (0, DRAWS)


@pytest.mark.parametrize(("width", "height"), [*SHAPES, (1, 1), (1, 7), (3, 2), (2000, 30), (30, 2000)])
def test_a_crop_lies_within_the_image(width: int, height: int) -> None:
    left, top, w, h, flip = drawn(width, height).T
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
def test_when_no_attempt_fits_it_is_the_middle(width: int, height: int, expected: Crop) -> None:
    # An area of 1 at the widest ratio fits none of these, whatever the image is.
    attempts = [1.0, 1.0] * ATTEMPTS
    assert random_resized_crop(width, height, [*attempts, 0.9, 0.9, 0.49]) == (expected, True)
    assert random_resized_crop(width, height, [*attempts, 0.9, 0.9, 0.5]) == (expected, False)


def test_the_last_attempt_still_counts() -> None:
    attempts = [1.0, 1.0] * (ATTEMPTS - 1) + [0.0, 0.5]
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
def test_the_middle_after_resizing(size: int, width: int, height: int, expected: Crop) -> None:
    assert CenterCrop(size)(width, height, []) == (expected, False)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (333, 500), (1, 1), (1, 999), (997, 3)])
@pytest.mark.parametrize("size", [1, 32, 224, 384])
def test_the_middle_lies_within_the_image(width: int, height: int, size: int) -> None:
    crop, flip = TRANSFORMS["imagenet-val"](size)(width, height, [0.0] * DRAWS)
    assert not flip
    assert crop.left >= 0
    assert crop.top >= 0
    assert crop.left + crop.width <= width + 1e-9
    assert crop.top + crop.height <= height + 1e-9
    # Square on the screen: both sides shrink by the same factor, but for the longer side cut to whole pixels.
    short = round(size * 256 / 224)
    assert min(crop.width, crop.height) == pytest.approx(size * min(width, height) / short)


def test_small_images_lose_little_of_themselves() -> None:
    numbers = draws(0, 0, np.arange(2000, dtype=np.int64)).tolist()
    for name, mirrored in (("small-train", True), ("digits-train", False)):
        found = [TRANSFORMS[name](32)(32, 32, row) for row in numbers]
        areas = [crop.width * crop.height / 32**2 for crop, _ in found]
        assert min(areas) >= 0.55  # rounded to pixels
        assert max(areas) == 1
        assert 0.45 < np.mean([flip for _, flip in found]) < 0.55 if mirrored else not any(flip for _, flip in found)
    assert TRANSFORMS["whole"](32)(40, 24, numbers[0]) == (Crop(0, 0, 40, 24), False)
