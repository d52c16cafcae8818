"""Models by name: their shapes and sizes, and what is said of those that are not there."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from stoker.errors import InputError, MissingError
from stoker.trainers import models


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("size", [4, 9, 30, 80])
def test_every_model_gives_a_number_for_each_class(name: str, size: int) -> None:
    model = models.build(name, num_classes=7, size=size)
    with torch.inference_mode():
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_the_resnets_are_the_known_ones() -> None:
    """By the number of their parameters, as torchvision has them."""
    known = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}
    for name, parameters in known.items():
        model = models.build(name, num_classes=1000, size=224)
        assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_small_images_get_a_stem_that_does_not_shrink_them() -> None:
    assert models.build("resnet18", num_classes=2, size=32).stem(torch.zeros(1, 3, 32, 32)).shape[2:] == (32, 32)
    assert models.build("resnet18", num_classes=2, size=128).stem(torch.zeros(1, 3, 128, 128)).shape[2:] == (32, 32)
    large = models.build("resnet18", num_classes=2, size=32, stem="imagenet")
    assert large.stem(torch.zeros(1, 3, 32, 32)).shape[2:] == (8, 8)


def test_zero_gamma_lets_blocks_begin_as_nothing() -> None:
    model = models.build("resnet50", num_classes=2, size=32, zero_gamma=True)
    assert all(not part.bn3.weight.any() for part in model.modules() if isinstance(part, models.Bottleneck))


def test_the_users_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = types.ModuleType("mine")
    mine.net = lambda num_classes, depth=2: torch.nn.Linear(depth, num_classes)  # type: ignore[attr-defined]
    mine.odd = lambda classes: classes  # type: ignore[attr-defined]
    mine.number = lambda num_classes: num_classes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert models.build("mine:net", num_classes=3, size=8)(torch.zeros(1, 2)).shape == (1, 3)
    for name, sentence in (
        ("mine:odd", "--model mine:odd: cannot be called with num_classes=3: "),
        ("mine:number", "--model mine:number: returned int, and not a torch.nn.Module"),
        ("mine:none", "--model mine:none: module 'mine' has no function 'none'"),
    ):
        with pytest.raises(InputError) as caught:
            models.build(name, num_classes=3, size=8)
        assert str(caught.value).startswith(sentence)


def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no model 'resnet19'; --model is one of resnet18, "):
        models.build("resnet19", num_classes=3, size=8)
    for package in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingError) as caught:
            models.build(f"{package}:resnet18", num_classes=3, size=8)
        assert str(caught.value) == (
            f"--model {package}:resnet18: the Python package '{package}' is not installed; run: pip install {package}"
        )
