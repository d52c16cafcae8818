"""Build a model by name: built-in ResNets and small models, models of timm and torchvision, or your own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from stoker.errors import InputError
from stoker.trainers.flags import SMALL_SIZE
from stoker.trainers.model_functions import call_function, find_function, import_package


def build_model(name: str, *, num_classes: int, size: int, stem: str = "auto", zero_gamma: bool = False) -> nn.Module:
    """Build a model; its weights are drawn from the current state of torch's random generator."""
    small = size <= SMALL_SIZE if stem == "auto" else stem == "small"
    if name in _BUILTIN:
        model = _BUILTIN[name](num_classes=num_classes, small=small)
        if zero_gamma:
            _zero_init_residual(model)
        return model
    home, colon, rest = name.partition(":")
    if not colon:
        raise InputError(
            f"unknown model {name!r}",
            hint=f"set --model to one of {', '.join(_BUILTIN)}, timm:NAME, torchvision:NAME or package.module:function",
        )
    return call_function(_find_factory(home, rest), name, num_classes, nn.Module, "torch.nn.Module")


class TrivialNet(nn.Module):
    """One linear layer on pooled pixels: to measure everything but the model."""

    def __init__(self, *, num_classes: int, small: bool = True, side: int = 8) -> None:  # noqa: ARG002
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.head = nn.Linear(3 * side * side, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return cast(torch.Tensor, self.head(self.pool(images).flatten(1)))


class SmallConvNet(nn.Module):
    """Three convolutions with pooling: learns digits and other small images in a minute on a CPU."""

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
        """Return the logits."""
        features = self.body(images)
        # Pool to 2×2 without AdaptiveAvgPool2d, whose backward pass is not deterministic on GPUs.
        side = features.shape[-1]
        features = avg_pool2d(features, (side + 1) // 2, ceil_mode=True) if side > 1 else features.expand(-1, -1, 2, 2)
        return cast(torch.Tensor, self.head(features.flatten(1)))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(in_channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.past = _shortcut(in_channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the convolutions and the shortcut."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.past(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 (with the stride, as in ResNet v1.5) and 1×1 convolutions with a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1, self.bn1 = _conv(in_channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, out, 1), nn.BatchNorm2d(out)
        self.past = _shortcut(in_channels, out, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the convolutions and the shortcut."""
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.past(x))


class ResNet(nn.Module):
    """A stem, stages that each halve the resolution, and a linear classifier."""

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
        in_channels = stem_width
        stem: list[nn.Module] = [_conv(3, in_channels, 3) if small else _conv(3, in_channels, 7, 2)]
        stem += [nn.BatchNorm2d(in_channels), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*stem, *([] if small else [nn.MaxPool2d(3, 2, 1)]))
        stages = []
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            for number in range(depth):
                stages.append(block(in_channels, width, 1 if number else 2 if stage else first_stride))
                in_channels = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(in_channels, num_classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
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


def _conv(in_channels: int, out_channels: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, side, stride, side // 2, bias=False)


def _conv_bn_relu(in_channels: int, out_channels: int, stride: int = 1) -> list[nn.Module]:
    return [_conv(in_channels, out_channels, 3, stride), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def _zero_init_residual(model: nn.Module) -> None:
    """Initialize the last BatchNorm of each residual block with 0, so that the block starts as the identity."""
    for part in model.modules():
        last = part.bn3 if isinstance(part, Bottleneck) else part.bn2 if isinstance(part, BasicBlock) else None
        if last is not None:
            nn.init.zeros_(last.weight)


def _find_factory(home: str, name: str) -> Callable[..., object]:
    """Import the function that builds the model."""
    if home == "timm":
        return partial(import_package("timm", f"timm:{name}").create_model, name)
    if home == "torchvision":
        return partial(import_package("torchvision.models", f"torchvision:{name}").get_model, name)
    return find_function(home, name)
