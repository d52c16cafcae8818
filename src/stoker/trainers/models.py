"""Models by name: ResNets and small ones in plain PyTorch, those of timm and torchvision, and the user's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from stoker.errors import InputError, MissingError
from stoker.trainers.flags import SMALL_SIZE


def build_model(name: str, *, num_classes: int, size: int, stem: str = "auto", zero_gamma: bool = False) -> nn.Module:
    """Make the model that a name means, with weights drawn from torch's generator as it stands."""
    small = size <= SMALL_SIZE if stem == "auto" else stem == "small"
    if name in _BUILTIN:
        model = _BUILTIN[name](num_classes=num_classes, small=small)
        if zero_gamma:
            zero_init_residual(model)
        return model
    home, colon, rest = name.partition(":")
    if not colon:
        raise InputError(
            f"there is no model {name!r}",
            hint=f"--model is one of {', '.join(_BUILTIN)}, or timm:NAME, torchvision:NAME, package.module:function",
        )
    return _call_factory(_find_factory(home, rest), name, num_classes)


class TrivialNet(nn.Module):
    """One linear layer on the pooled pixels: for measuring everything but the model."""

    def __init__(self, *, num_classes: int, small: bool = True, side: int = 8) -> None:  # noqa: ARG002
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.head = nn.Linear(3 * side * side, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give a number for each class."""
        return cast(torch.Tensor, self.head(self.pool(images).flatten(1)))


class SmallConvNet(nn.Module):
    """Three convolutions, each followed by halving: digits and other small pictures in a minute on a CPU."""

    def __init__(self, *, num_classes: int, small: bool = True, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_bn_relu(3, width, stride=1 if small else 4),
            nn.MaxPool2d(2, ceil_mode=True),
            *_conv_bn_relu(width, 2 * width),
            nn.MaxPool2d(2, ceil_mode=True),
            *_conv_bn_relu(2 * width, 4 * width),
        )
        self.head = nn.Linear(4 * 4 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give a number for each class."""
        found = self.body(images)
        # To 2×2 by plain pooling: the adaptive one has no deterministic backward pass on GPUs.
        side = found.shape[-1]
        found = avg_pool2d(found, (side + 1) // 2, ceil_mode=True) if side > 1 else found.expand(-1, -1, 2, 2)
        return cast(torch.Tensor, self.head(found.flatten(1)))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and the way past them."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inside, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.past = _shortcut(inside, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the convolutions find to what came in."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.past(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 (which strides, as in ResNet v1.5) and 1×1 convolutions, and the way past them."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1, self.bn1 = _conv(inside, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        self.past = _shortcut(inside, out, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the convolutions find to what came in."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.past(x))


class ResNet(nn.Module):
    """A stem, stages that halve the picture, and one linear layer."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        widths: tuple[int, ...] = (64, 128, 256, 512),
        *,
        num_classes: int,
        small: bool = False,
        stem_width: int = 64,
        first_stride: int = 1,
    ) -> None:
        super().__init__()
        inside = stem_width
        stem: list[nn.Module] = [_conv(3, inside, 3) if small else _conv(3, inside, 7, 2)]
        stem += [nn.BatchNorm2d(inside), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*stem, *([] if small else [nn.MaxPool2d(3, 2, 1)]))
        stages = []
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for number in range(depth):
                stages.append(block(inside, width, 1 if number else 2 if stage else first_stride))
                inside = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give a number for each class."""
        return cast(torch.Tensor, self.head(self.stages(self.stem(images)).mean((2, 3))))


_BUILTIN: dict[str, Callable[..., nn.Module]] = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet8": partial(ResNet, BasicBlock, (1, 1, 1), (32, 64, 128), stem_width=16, first_stride=2),
    "small": SmallConvNet,
    "trivial": TrivialNet,
}
NAMES = tuple(_BUILTIN)


def _conv(inside: int, outside: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, side, stride, side // 2, bias=False)


def _conv_bn_relu(inside: int, outside: int, stride: int = 1) -> list[nn.Module]:
    return [_conv(inside, outside, 3, stride), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    if inside == outside and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inside, outside, 1, stride), nn.BatchNorm2d(outside))


def zero_init_residual(model: nn.Module) -> None:
    """Let every block begin as the way past it: the last normalisation of each starts at 0."""
    for part in model.modules():
        last = part.bn3 if isinstance(part, Bottleneck) else part.bn2 if isinstance(part, BasicBlock) else None
        if last is not None:
            nn.init.zeros_(last.weight)


def _find_factory(home: str, name: str) -> Callable[..., object]:
    """Import the function that makes the model."""
    if home == "timm":
        return partial(_import("timm", f"timm:{name}").create_model, name)
    if home == "torchvision":
        return partial(_import("torchvision.models", f"torchvision:{name}").get_model, name)
    function = getattr(_import(home, f"{home}:{name}"), name, None)
    if not callable(function):
        raise InputError(f"module {home!r} has no function {name!r}", where=f"--model {home}:{name}")
    return cast(Callable[..., object], function)


def _import(module: str, model: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise MissingError(
            f"the Python package {package!r} is not installed",
            where=f"--model {model}",
            hint=f"run: pip install {package}",
        ) from error
    except Exception as error:  # a package that is there and does not import, as torchvision on another torch
        raise MissingError(f"{module!r} cannot be imported: {error}", where=f"--model {model}") from error


def _call_factory(function: Callable[..., object], name: str, num_classes: int) -> nn.Module:
    try:
        inspect.signature(function).bind(num_classes=num_classes)
    except TypeError as error:
        raise InputError(
            f"cannot be called with num_classes={num_classes}: {error}",
            where=f"--model {name}",
            hint="write a function that takes num_classes and returns the model",
        ) from error
    except ValueError:
        pass  # a function that does not tell its parameters
    model = function(num_classes=num_classes)
    if not isinstance(model, nn.Module):
        raise InputError(f"returned {type(model).__name__}, and not a torch.nn.Module", where=f"--model {name}")
    return model
