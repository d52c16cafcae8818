"""Build a Keras model by name: the built-in models of `models.py` in TensorFlow's layout, or your own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from keras import layers

from stoker.errors import InputError
from stoker.trainers.flags import SMALL_SIZE
from stoker.trainers.model_functions import call_function, find_function


def build_model(name: str, *, num_classes: int, size: int, stem: str = "auto", zero_gamma: bool = False) -> Any:
    """Build a model; its weights are drawn from the current state of Keras' random generator."""
    keras.utils.clear_session()  # names of layers count from the start, in every process
    small = size <= SMALL_SIZE if stem == "auto" else stem == "small"
    if name not in _BUILTIN:
        return _build_own(name, num_classes, size)
    inputs = keras.Input((size, size, 3))
    features = _BUILTIN[name](inputs, small=small, zero_gamma=zero_gamma)
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(features))


def _trivial(images: Any, *, small: bool, zero_gamma: bool) -> Any:  # noqa: ARG001
    """One linear layer on pooled pixels: to measure everything but the model."""
    side = max(1, int(images.shape[1]) // 8)
    return layers.Flatten()(layers.AveragePooling2D(side)(images))


def _small(images: Any, *, small: bool, zero_gamma: bool, width: int = 16) -> Any:  # noqa: ARG001
    """Three convolutions with pooling: learns digits and other small images in a minute on a CPU."""
    x = _conv_bn_relu(images, "conv1", width, 3, 1 if small else 4)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = _conv_bn_relu(x, "conv2", 2 * width, 3)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = _conv_bn_relu(x, "conv3", 4 * width, 3)
    side = int(x.shape[1])
    return layers.Flatten()(layers.AveragePooling2D((side + 1) // 2, padding="same")(x) if side > 1 else x)


def _resnet(
    images: Any,
    depths: tuple[int, ...],
    widths: tuple[int, ...] = (64, 128, 256, 512),
    *,
    bottleneck: bool = False,
    small: bool = False,
    zero_gamma: bool = False,
    stem_width: int = 64,
    first_stride: int = 1,
) -> Any:
    """A stem, stages that each halve the resolution, and global pooling."""
    x = _conv_bn_relu(images, "stem", stem_width, 3 if small else 7, 1 if small else 2)
    if not small:
        x = layers.MaxPooling2D(3, 2, padding="same", name="stem.pool")(x)
    block = _bottleneck if bottleneck else _basic_block
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for number in range(depth):
            stride = 1 if number else 2 if stage else first_stride
            x = block(x, f"stage{stage}.{number}", width, stride, zero_gamma)
    return layers.GlobalAveragePooling2D(name="pool")(x)


def _basic_block(x: Any, name: str, width: int, stride: int, zero_gamma: bool) -> Any:
    """Two 3×3 convolutions with a shortcut."""
    y = _conv_bn_relu(x, f"{name}.conv1", width, 3, stride)
    y = _conv_bn(y, f"{name}.conv2", width, 3, zero_gamma=zero_gamma)
    return layers.ReLU(name=f"{name}.relu")(layers.Add(name=f"{name}.add")([y, _shortcut(x, name, width, stride)]))


def _bottleneck(x: Any, name: str, width: int, stride: int, zero_gamma: bool) -> Any:
    """1×1, 3×3 (with the stride, as in ResNet v1.5) and 1×1 convolutions with a shortcut."""
    y = _conv_bn_relu(x, f"{name}.conv1", width, 1)
    y = _conv_bn_relu(y, f"{name}.conv2", width, 3, stride)
    y = _conv_bn(y, f"{name}.conv3", 4 * width, 1, zero_gamma=zero_gamma)
    return layers.ReLU(name=f"{name}.relu")(layers.Add(name=f"{name}.add")([y, _shortcut(x, name, 4 * width, stride)]))


def _shortcut(x: Any, name: str, width: int, stride: int) -> Any:
    return x if x.shape[-1] == width and stride == 1 else _conv_bn(x, f"{name}.past", width, 1, stride)


def _conv_bn(x: Any, name: str, width: int, side: int, stride: int = 1, *, zero_gamma: bool = False) -> Any:
    """Add a convolution, padded like in PyTorch, and a BatchNorm with the momentum of PyTorch."""
    x = layers.ZeroPadding2D(side // 2, name=f"{name}.pad")(x) if side > 1 else x
    initializer = keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal")
    x = layers.Conv2D(width, side, stride, use_bias=False, kernel_initializer=initializer, name=name)(x)
    gamma = "zeros" if zero_gamma else "ones"
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, name=f"{name}.bn")(x)


def _conv_bn_relu(x: Any, name: str, width: int, side: int, stride: int = 1) -> Any:
    return layers.ReLU(name=f"{name}.relu")(_conv_bn(x, name, width, side, stride))


_BUILTIN: dict[str, Callable[..., Any]] = {
    "resnet18": partial(_resnet, depths=(2, 2, 2, 2)),
    "resnet34": partial(_resnet, depths=(3, 4, 6, 3)),
    "resnet50": partial(_resnet, depths=(3, 4, 6, 3), bottleneck=True),
    "resnet8": partial(_resnet, depths=(1, 1, 1), widths=(32, 64, 128), stem_width=16, first_stride=2),
    "small": _small,
    "trivial": _trivial,
}


def _build_own(name: str, num_classes: int, size: int) -> Any:
    """Build the model of a user's function."""
    home, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(
            f"unknown model {name!r}",
            hint=f"set --model to one of {', '.join(_BUILTIN)}, or package.module:function",
        )
    model = call_function(find_function(home, attribute), name, num_classes, keras.Model, "keras.Model")
    if not model.built:
        model.build((None, size, size, 3))
    return model
