"""Models by name: shapes, numbers of parameters, user functions, and errors for unknown models."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from stoker.errors import InputError, MissingError
from stoker.trainers import models


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("size", [4, 9, 30, 80])
def test_every_model_returns_logits(name: str, size: int) -> None:
    model = models.build_model(name, num_classes=7, size=size)
    with torch.inference_mode():
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_resnets_have_the_parameters_of_torchvision() -> None:
    """Compare the number of parameters with torchvision."""
    known = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}
    for name, parameters in known.items():
        model = models.build_model(name, num_classes=1000, size=224)
        assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_small_images_get_a_stem_without_stride() -> None:
    assert models.build_model("resnet18", num_classes=2, size=32).stem(torch.zeros(1, 3, 32, 32)).shape[2:] == (32, 32)
    assert models.build_model("resnet18", num_classes=2, size=128).stem(torch.zeros(1, 3, 128, 128)).shape[2:] == (
        32,
        32,
    )
    large = models.build_model("resnet18", num_classes=2, size=32, stem="imagenet")
    assert large.stem(torch.zeros(1, 3, 32, 32)).shape[2:] == (8, 8)


def test_zero_gamma_zeroes_the_last_batchnorm_of_each_block() -> None:
    model = models.build_model("resnet50", num_classes=2, size=32, zero_gamma=True)
    assert all(not part.bn3.weight.any() for part in model.modules() if isinstance(part, models.Bottleneck))


def test_user_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = types.ModuleType("mine")
    mine.net = lambda num_classes, depth=2: torch.nn.Linear(depth, num_classes)  # type: ignore[attr-defined]
    mine.no_num_classes = lambda classes: classes  # type: ignore[attr-defined]
    mine.number = lambda num_classes: num_classes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    assert models.build_model("mine:net", num_classes=3, size=8)(torch.zeros(1, 2)).shape == (1, 3)
    for name, where, part in (
        ("mine:no_num_classes", "--model mine:no_num_classes", "num_classes=3"),
        ("mine:number", "--model mine:number", "returned int, expected torch.nn.Module"),
        ("mine:none", "--model mine:none", "module 'mine' has no function 'none'"),
    ):
        with pytest.raises(InputError) as caught:
            models.build_model(name, num_classes=3, size=8)
        assert caught.value.where == where
        assert part in caught.value.what


def test_unknown_models_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"'resnet19'; .*--model.*resnet18, "):
        models.build_model("resnet19", num_classes=3, size=8)
    for package in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingError) as caught:
            models.build_model(f"{package}:resnet18", num_classes=3, size=8)
        assert caught.value.where == f"--model {package}:resnet18"
        assert f"{package!r} is not installed" in caught.value.what
        assert f"pip install {package}" in str(caught.value.hint)
