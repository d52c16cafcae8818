"""The optional decoder that touches only the crop: a package of its own, `native/`, and this is its only home."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np

from stoker.errors import MissingError
from stoker.load.decode import Header, Pixels, Task
from stoker.shards import images
from stoker.shards.images import BadImageError
from stoker.shards.sample import Buffer

DECODERS = ("auto", "native", "python")
HINT = "in stoker's repository: make setup, or pip install ./native; needs gcc, libjpeg-dev and python3-dev"

API = 1
"""What the module must speak: what it is called with, and what it gives."""

log = logging.getLogger(__name__)


class _Module(Protocol):
    """What stoker_native offers."""

    API: int
    SIMD: int
    """Whether this processor has what makes it fast."""

    def look(self, images: list[Buffer]) -> list[tuple[int, int, bool] | None]:
        """Tell width, height and whether there may be EXIF."""
        ...

    def Decoder(self, *, simd: bool = True) -> Any:  # noqa: N802
        """Make a decoder for one thread."""
        ...


class NativeDecoder:
    """One thread's decoder for the slices of a batch; whatever it leaves is for the general one."""

    def __init__(self, *, antialias: bool = True, simd: bool = True) -> None:
        self._module = _loaded()
        self._decoder = self._module.Decoder(simd=simd)
        self._antialias = antialias

    def look(self, images: Sequence[Buffer]) -> list[Header | None]:
        """Read headers; None for images that are not plain, upright JPEGs."""
        return [_header(data, looked) for data, looked in zip(images, self._module.look(list(images)), strict=True)]

    def fill(self, tasks: Sequence[Task], out: Pixels) -> list[Task]:
        """Fill the rows of `out`, and give back the tasks that are not done."""
        images: list[Buffer | None] = [None] * len(out)
        boxes, flips = np.zeros((len(out), 6)), bytearray(len(out))
        for row, data, header, crop, flip in tasks:
            images[row], flips[row] = data, bool(flip)
            boxes[row] = (*crop, header.width, header.height)
        statuses: bytes = self._decoder.fill(images, boxes, flips, out, out.shape[1], self._antialias)
        return [task for task in tasks if statuses[task.row]]


def chosen(decoder: str) -> str:
    """Tell which decoder "auto" means on this machine, and say it once; refuse one that is not there."""
    if decoder == "python":
        return decoder
    if decoder == "native":
        if why_not := problem():
            raise MissingError(f"the native decoder {why_not}", hint=HINT)
        return decoder
    if why_not := drawback():
        _say_once(logging.WARNING, f"images are decoded by simplejpeg and OpenCV: the native decoder {why_not}")
        return "python"
    _say_once(logging.INFO, "images are decoded by stoker-native")
    return "native"


def drawback() -> str:
    """Say why "auto" does not mean the native decoder here; nothing if it does."""
    return problem() or ("" if _loaded().SIMD else "is slow on this processor, which has no AVX2")


@functools.cache
def problem() -> str:
    """Say why the native decoder cannot be used here; nothing if it can."""
    if find_spec("stoker_native") is None:
        return "is not installed"
    try:
        found = getattr(_loaded(), "API", None)
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return "" if found == API else f"is of another version (it speaks {found}, and {API} is wanted)"


@functools.cache
def _say_once(level: int, what: str) -> None:
    log.log(level, what)


def _loaded() -> _Module:
    return cast(_Module, importlib.import_module("stoker_native"))


def _header(data: Buffer, looked: tuple[int, int, bool] | None) -> Header | None:
    if looked is None:
        return None
    width, height, may_be_turned = looked
    try:
        images.check_size(width, height)
    except BadImageError:
        return None  # the general decoder says so
    if may_be_turned and images.orientation(data) != 1:
        return None
    return Header(width, height, 1)
