from __future__ import annotations

import pytest
import torch

from stoker.trainers.models import build_model
from stoker.trainers.suggest import suggest_batch, suggest_flags, suggest_model, suggest_size


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (28, 28, 32),
        (32, 32, 32),
        (24, 18, 24),
        (64, 48, 64),
        (64, 65, 64),
        (96, 96, 96),
        (200, 300, 192),
        (500, 375, 224),
        (4000, 20, 64),
        (1, 1, 8),
    ],
)
def test_size_follows_the_images(width: int, height: int, size: int) -> None:
    assert suggest_size(width, height) == size


@pytest.mark.parametrize(
    ("samples", "size", "model", "batch"),
    [
        (1, 32, "small", 8),
        (1437, 32, "small", 64),
        (50_000, 32, "resnet18", 256),
        (3680, 224, "resnet18", 128),
        (1_281_167, 224, "resnet50", 128),
    ],
)
def test_model_and_batch_fit_the_dataset(samples: int, size: int, model: str, batch: int) -> None:
    assert (suggest_model(samples, size), suggest_batch(samples, size)) == (model, batch)


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (96, 128), None])
def test_suggested_model_accepts_the_suggested_size(size: tuple[int, int] | None) -> None:
    for samples in (30, 20_000):
        flags = suggest_flags(samples, size)
        values = dict(zip(flags[::2], flags[1::2], strict=True))
        side = int(values["--size"])
        model = build_model(values["--model"], num_classes=3, size=side).eval()
        assert model(torch.zeros(1, 3, side, side)).shape == (1, 3)
