"""The description of a trained model: its classes, and the images that it takes. Imports no framework.

Beside an exported model it is the file `stoker-model.json`; a PyTorch checkpoint holds the same facts in its `meta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stoker.core import json_io
from stoker.core.spec import decode, run_checks, to_json
from stoker.errors import Fault, InputError
from stoker.load.transforms import MAX_SIZE, TRANSFORMS

FILE_NAME = "stoker-model.json"
DEFAULT_SIGNATURE = "serving_default"

Side = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Channels = tuple[float, float, float]


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image tensor of a model: how an image file becomes one row of it."""

    size: Side
    """Side length in pixels."""
    transform: str = "imagenet-val"
    """The validation transform of the training, which crops and resizes."""
    layout: Literal["NHWC", "NCHW"] = "NHWC"
    dtype: Literal["uint8", "float32"] = "uint8"
    mean: Channels | None = None
    """Mean and standard deviation of each channel, for pixels in 0..1; None: pixels are in 0..255."""
    std: Channels | None = None

    def faults(self) -> Iterator[Fault]:
        """Yield the combinations that make no sense."""
        yield from run_checks(self, _check_transform, _check_normalization)


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server must know to classify images with a model."""

    classes: tuple[str, ...]
    image: ImageInput
    scores: Literal["logits", "probabilities"] = "logits"
    """What the model returns for each class."""
    signature: str = DEFAULT_SIGNATURE
    """The signature of a SavedModel that takes the images; its first output are the scores."""

    def faults(self) -> Iterator[Fault]:
        """Yield a fault if there are no classes."""
        if not self.classes:
            yield Fault("classes", "must name at least one class")


def _check_transform(image: ImageInput) -> Iterator[Fault]:
    if image.transform not in TRANSFORMS:
        yield Fault("transform", f"must be one of {', '.join(TRANSFORMS)}, got {image.transform!r}")


def _check_normalization(image: ImageInput) -> Iterator[Fault]:
    if (image.mean is None) != (image.std is None):
        yield Fault("mean" if image.mean is None else "std", "mean and std must be set together")
    if image.mean is not None and image.dtype == "uint8":
        yield Fault("dtype", "must be float32 if mean and std are set")
    if image.std is not None and not all(value > 0 for value in image.std):
        yield Fault("std", "must be positive")


def write_description(description: ModelDescription, directory: Path) -> None:
    """Write `stoker-model.json` beside an exported model, before the export is moved into place."""
    (directory / FILE_NAME).write_bytes(to_json(description))


def read_description(directory: Path) -> ModelDescription | None:
    """Read `stoker-model.json` of an exported model; None if there is none."""
    path = directory / FILE_NAME
    try:
        data = json_io.read_file(path)
    except FileNotFoundError:
        return None
    return decode(json_io.parse(data, path), ModelDescription, path)


def describe_checkpoint(meta: Mapping[str, Any], *, where: object) -> ModelDescription:
    """Describe the model of a checkpoint; classes without known names are named by their number."""
    args, number = meta.get("args") or {}, meta.get("num_classes")
    if not number or "size" not in args or "val_transform" not in args:
        raise InputError("checkpoint does not say which images its model takes", where=where)
    names = tuple(meta.get("classes") or ())
    return ModelDescription(
        classes=(*names, *(str(index) for index in range(len(names), number))),
        image=ImageInput(size=args["size"], transform=args["val_transform"]),
    )
