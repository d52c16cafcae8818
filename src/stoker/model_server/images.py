"""Classify an image file: decode it like the validation of the training, and name the best classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import InputError, StokerError
from stoker.load.buffers import BufferPool
from stoker.load.collate import PixelCollator
from stoker.load.native import select_decoder
from stoker.load.transforms import TRANSFORMS
from stoker.model_server.signatures import Array, format_shape
from stoker.trainers.model_description import FILE_NAME, ImageInput, ModelDescription


class ImageDecoder:
    """Decoder of image files into the input of a model; several threads may use it at once."""

    def __init__(self, image: ImageInput) -> None:
        self._image = image
        self._collator = PixelCollator(
            TRANSFORMS[image.transform](image.size),
            size=image.size,
            channels_first=image.layout == "NCHW",
            antialias=True,
            seed=0,
            buffers=BufferPool(),
            native=select_decoder("auto") == "native",
        )

    def decode(self, data: bytes) -> Array:
        """Return one row of the model's input; raise InputError if the image cannot be decoded."""
        rows = self._collator.allocate(1)
        result = self._collator.fill(rows, 0, [data], 0, np.zeros(1, dtype=np.int64))
        if result.bad:
            raise InputError(f"bad image: {result.bad[0][1]}")
        return self._normalize(rows)

    def _normalize(self, pixels: npt.NDArray[np.uint8]) -> Array:
        image = self._image
        if image.dtype == "uint8":
            return pixels
        values = pixels.astype(np.float32)
        if image.mean is not None and image.std is not None:
            shape = (3, 1, 1) if image.layout == "NCHW" else (3,)
            values -= np.array(image.mean, dtype=np.float32).reshape(shape) * np.float32(255)
            values *= 1 / (np.array(image.std, dtype=np.float32).reshape(shape) * np.float32(255))
        return values


@dataclass(frozen=True, slots=True)
class ClassScore:
    """A class and its probability."""

    index: int
    name: str
    probability: float


def rank_classes(scores: Array, description: ModelDescription, top: int) -> list[ClassScore]:
    """Return the `top` most probable classes, the best first; raise StokerError for scores that make no sense."""
    if scores.shape != (len(description.classes),):
        raise StokerError(
            f"model returned scores of shape {format_shape(scores.shape)} for {len(description.classes)} classes",
            hint=f"correct the classes in {FILE_NAME}",
        )
    if not np.isfinite(scores).all():
        raise StokerError("model returned scores that are not finite numbers")
    values = scores.astype(np.float64)
    if description.scores == "logits":
        values = np.exp(values - values.max())
        values /= values.sum()
    order = np.argsort(-values, kind="stable")[:top]
    return [ClassScore(index, description.classes[index], float(values[index])) for index in order.tolist()]
