"""The native JPEG decoder, which decodes only the crop: select it, check it, call it.

It is the optional package stoker-native (`native/` in the repository); only this module imports it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np

from stoker.errors import MissingError
from stoker.load.decode import DecodeTask, Header, Pixels
from stoker.shards import images
from stoker.shards.images import BadImageError
from stoker.shards.sample import Buffer

DECODERS = ("auto", "native", "python")
INSTALL_HINT = "run `make setup` or `pip install ./native` in stoker's repository; needs gcc, libjpeg-dev, python3-dev"
NOT_INSTALLED = "is not installed"
FAILED = "native decoder failed; decoding these images with simplejpeg and OpenCV"

API = 2
"""Version of the interface of stoker_native; module.c has the same."""

log = logging.getLogger(__name__)
selection_log = log.getChild("selection")
"""The logger of what "auto" selects, which worker processes disable: the main process has logged it."""


class _Module(Protocol):
    """The interface of stoker_native."""

    API: int
    SIMD: int
    """Whether this CPU has AVX2."""

    def read_headers(self, images: list[Buffer]) -> list[tuple[int, int, bool] | None]:
        """Return width, height and whether there may be EXIF data, or None for unsupported images."""
        ...

    def Decoder(self, *, simd: bool = True) -> Any:  # noqa: N802
        """Create a decoder for one thread."""
        ...


class NativeDecoder:
    """Native decoder of one thread; it leaves unsupported images to the general decoder."""

    def __init__(self, *, antialias: bool = True, simd: bool = True) -> None:
        self._module = import_native()
        self._decoder = self._module.Decoder(simd=simd)
        self._antialias = antialias

    def read_headers(self, images: Sequence[Buffer]) -> list[Header | None]:
        """Return the headers of images; None for those that are not plain, upright JPEGs, or for all if it fails."""
        try:
            headers = self._module.read_headers(list(images))
        except Exception as error:
            _log_once(log, logging.WARNING, f"{FAILED}: {error!r}")
            return [None] * len(images)
        return [_to_header(data, header) for data, header in zip(images, headers, strict=True)]

    def fill(self, tasks: Sequence[DecodeTask], out: Pixels) -> list[DecodeTask]:
        """Decode images into the rows of `out`; return the tasks that it does not support, or all if it fails."""
        images: list[Buffer | None] = [None] * len(out)
        boxes, flips = np.zeros((len(out), 6)), bytearray(len(out))
        for row, data, header, crop, flip in tasks:
            images[row], flips[row] = data, bool(flip)
            boxes[row] = (*crop, header.width, header.height)
        try:
            statuses: bytes = self._decoder.fill(images, boxes, flips, out, out.shape[1], self._antialias)
        except Exception as error:
            _log_once(log, logging.WARNING, f"{FAILED}: {error!r}")
            return list(tasks)
        return [task for task in tasks if statuses[task.row]]


def select_decoder(decoder: str) -> str:
    """Return "native" or "python", and log once what "auto" selects; raise MissingError if it is not available."""
    if decoder == "python":
        return decoder
    if decoder == "native":
        if reason := why_unavailable():
            raise MissingError(f"native decoder {reason}", hint=INSTALL_HINT)
        return decoder
    if reason := why_not_preferred():
        what = f"decoding images with simplejpeg and OpenCV: native decoder {reason}"
        _log_once(selection_log, logging.WARNING, what)
        return "python"
    _log_once(selection_log, logging.INFO, "decoding images with stoker-native")
    return "native"


def why_not_preferred() -> str:
    """Return why "auto" does not select the native decoder on this machine; an empty string if it does."""
    return why_unavailable() or ("" if import_native().SIMD else "is slow on this CPU, which has no AVX2")


@functools.cache
def why_unavailable() -> str:
    """Return why the native decoder cannot be used on this machine; an empty string if it can."""
    if find_spec("stoker_native") is None:
        return NOT_INSTALLED
    try:
        version = getattr(import_native(), "API", None)
    except ImportError as error:
        return f"cannot be imported ({error})"
    return "" if version == API else f"has the wrong version (interface {version}, expected {API})"


@functools.cache
def _log_once(logger: logging.Logger, level: int, message: str) -> None:
    logger.log(level, message)


def import_native() -> _Module:
    """Import stoker_native."""
    return cast(_Module, importlib.import_module("stoker_native"))


def _to_header(data: Buffer, native_header: tuple[int, int, bool] | None) -> Header | None:
    if native_header is None:
        return None
    width, height, has_app1 = native_header
    try:
        images.check_size(width, height)
    except BadImageError:
        return None  # the general decoder reports it
    if has_app1 and images.read_orientation(data) != 1:
        return None
    return Header(width, height, 1)
