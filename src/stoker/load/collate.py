"""Encoded images into the rows of a batch: as they are, as pixels of a named transform, or by the user's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stoker.core.permutations import key
from stoker.errors import InputError
from stoker.load.buffers import Buffers
from stoker.load.decode import Decoder, Pixels, Task, to_planes
from stoker.load.native import NativeDecoder
from stoker.load.transforms import Transform, draws
from stoker.sampling.order import Numbers
from stoker.shards.images import BadImageError
from stoker.shards.sample import Buffer

UserTransform = Callable[[Pixels, np.random.Generator], npt.NDArray[Any]]


class Filled(NamedTuple):
    """What became of some rows: which are bad and why, and the seconds of decoding and of the user's transform."""

    bad: list[tuple[int, str]]
    decode_s: float = 0.0
    transform_s: float = 0.0
    natively: int = 0
    """How many the native decoder made."""


class Rows(Protocol):
    """Makes the rows of a batch, in slices, from several threads at once."""

    def room(self, count: int) -> Any:
        """Give room for so many rows."""
        ...

    def fill(self, room: Any, first: int, images: Sequence[Buffer], epoch: int, positions: Numbers) -> Filled:
        """Fill the rows from `first` on."""
        ...

    def pick(self, room: Any, good: Sequence[int] | None) -> Any:
        """Give the batch: all rows, or only the good ones."""
        ...


class EncodedRows:
    """Images as their shard holds them: views of it, nothing is decoded."""

    def room(self, count: int) -> list[Buffer]:
        """Give room for so many rows."""
        return [b""] * count

    def fill(
        self,
        room: list[Buffer],
        first: int,
        images: Sequence[Buffer],
        epoch: int,  # noqa: ARG002
        positions: Numbers,  # noqa: ARG002
    ) -> Filled:
        """Put the images where they belong."""
        room[first : first + len(images)] = images
        return Filled([])

    def pick(self, room: list[Buffer], good: Sequence[int] | None) -> list[Buffer]:
        """Give the images."""
        return room if good is None else [room[row] for row in good]


class PixelRows:
    """Pixels of one size, decoded straight into the batch."""

    def __init__(
        self,
        transform: Transform,
        *,
        size: int,
        planes: bool,
        antialias: bool,
        seed: int,
        buffers: Buffers,
        native: bool = False,
    ) -> None:
        self._transform, self._size, self._planes, self._seed = transform, size, planes, seed
        self._antialias, self._buffers, self._native = antialias, buffers, native
        self._own = threading.local()

    def room(self, count: int) -> Pixels:
        """Give room for so many rows."""
        row = (3, self._size, self._size) if self._planes else (self._size, self._size, 3)
        return self._buffers.take((count, *row))

    def fill(self, room: Pixels, first: int, images: Sequence[Buffer], epoch: int, positions: Numbers) -> Filled:
        """Draw the crops, and decode each of them into its row."""
        started = time.perf_counter()
        tools = self._tools()
        rows = room[first : first + len(images)]
        out = tools.pixels(len(images), self._size) if self._planes else rows
        bad, natively = tools.decode(images, self._transform, draws(self._seed, epoch, positions).tolist(), out)
        if self._planes:
            for pixels, row in zip(out, rows, strict=True):
                to_planes(pixels, row)
        decode_s = time.perf_counter() - started
        return Filled([(first + row, reason) for row, reason in bad], decode_s, natively=natively)

    def pick(self, room: Pixels, good: Sequence[int] | None) -> Pixels:
        """Give the batch."""
        return room if good is None else room[np.array(good, dtype=np.int64)]

    def _tools(self) -> _Tools:
        """Give what belongs to this thread."""
        if not hasattr(self._own, "tools"):
            self._own.tools = _Tools(antialias=self._antialias, native=self._native)
        tools: _Tools = self._own.tools
        return tools


class _Tools:
    """One thread's decoders: the native one, where there is one, takes what it can of a slice, the other the rest."""

    def __init__(self, *, antialias: bool, native: bool) -> None:
        self._general = Decoder(antialias=antialias)
        self._native = NativeDecoder(antialias=antialias) if native else None
        self._pixels = np.empty((0, 0, 0, 3), dtype=np.uint8)

    def pixels(self, count: int, size: int) -> Pixels:
        """Give room for pixels that are not yet as the batch wants them."""
        if len(self._pixels) < count:
            self._pixels = np.empty((count, size, size, 3), dtype=np.uint8)
        return self._pixels[:count]

    def decode(
        self, images: Sequence[Buffer], transform: Transform, numbers: list[list[float]], out: Pixels
    ) -> tuple[list[tuple[int, str]], int]:
        """Fill every row of `out` that can be; tell which cannot and why, and how many the native decoder filled."""
        bad: dict[int, str] = {}
        natively = 0
        headers = [None] * len(images) if self._native is None else self._native.look(images)
        tasks = []
        for row, (data, looked, drawn) in enumerate(zip(images, headers, numbers, strict=True)):
            try:
                header = looked or self._general.look(data)
            except BadImageError as error:
                bad[row] = str(error)
                continue
            tasks.append(Task(row, data, header, *transform(header.width, header.height, drawn)))
        if self._native is not None:
            given = [task for task in tasks if headers[task.row] is not None]
            left = self._native.fill(given, out)
            natively = len(given) - len(left)
            tasks = [*left, *(task for task in tasks if headers[task.row] is None)]
        for row, data, header, crop, flip in tasks:
            try:
                self._general.fill(data, header, crop, flip, out[row])
            except BadImageError as error:
                bad[row] = str(error)
        return sorted(bad.items()), natively


class UserRows:
    """What the user's own function makes of upright RGB pixels and a generator that depends on the position alone."""

    def __init__(self, transform: UserTransform, *, seed: int) -> None:
        self._transform, self._seed = transform, seed
        self._own = threading.local()
        self._like: npt.NDArray[Any] = np.empty(0)
        """What the function made last: an empty batch looks like it."""

    def room(self, count: int) -> list[npt.NDArray[Any] | None]:
        """Give room for so many rows."""
        return [None] * count

    def fill(
        self,
        room: list[npt.NDArray[Any] | None],
        first: int,
        images: Sequence[Buffer],
        epoch: int,
        positions: Numbers,
    ) -> Filled:
        """Decode whole images, and hand each to the function."""
        if not hasattr(self._own, "decoder"):
            self._own.decoder = Decoder()
        bad, decode_s, transform_s = [], 0.0, 0.0
        for row, (data, position) in enumerate(zip(images, positions.tolist(), strict=True), first):
            started = time.perf_counter()
            try:
                pixels = self._own.decoder.whole(data)
            except BadImageError as error:
                bad.append((row, str(error)))
                continue
            finally:
                decoded = time.perf_counter()
                decode_s += decoded - started
            stream = np.random.Philox(key=key("augment", self._seed, epoch, position))
            made = self._transform(pixels, np.random.Generator(stream))
            if made is None:
                raise InputError("the transform returned None", where=f"position {position} of epoch {epoch}")
            room[row] = made
            transform_s += time.perf_counter() - decoded
        return Filled(bad, decode_s, transform_s)

    def pick(self, room: list[npt.NDArray[Any] | None], good: Sequence[int] | None) -> npt.NDArray[Any]:
        """Stack what was made."""
        rows = range(len(room)) if good is None else good
        if made := [np.asarray(room[row]) for row in rows]:
            self._like = made[0]
            return np.stack(made)
        return np.empty((0, *self._like.shape), dtype=self._like.dtype)
