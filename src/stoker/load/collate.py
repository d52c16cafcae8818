"""Collate encoded images into a batch: as they are, decoded and cropped, or through a user transform."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stoker.core.permutations import seed_key
from stoker.errors import InputError
from stoker.load.buffers import BufferPool
from stoker.load.decode import Decoder, DecodeTask, Pixels, hwc_to_chw
from stoker.load.native import NativeDecoder
from stoker.load.transforms import Transform, random_numbers
from stoker.sampling.order import Int64Array
from stoker.shards.images import BadImageError
from stoker.shards.sample import Buffer

UserTransform = Callable[[Pixels, np.random.Generator], npt.NDArray[Any]]


class FillResult(NamedTuple):
    """Result for some rows: the bad ones with the reason, and the seconds of decoding and of the user transform."""

    bad: list[tuple[int, str]]
    decode_s: float = 0.0
    transform_s: float = 0.0
    native_count: int = 0
    """Number of rows decoded by the native decoder."""


class Collator(Protocol):
    """Builder of batches in slices of rows, from several threads at once."""

    def allocate(self, count: int) -> Any:
        """Allocate a batch of `count` rows."""
        ...

    def fill(self, rows: Any, first: int, images: Sequence[Buffer], epoch: int, random_ids: Int64Array) -> FillResult:
        """Fill the rows from `first` on; `random_ids` seed the random augmentation of each."""
        ...

    def collect(self, rows: Any, good: Sequence[int] | None) -> Any:
        """Return the batch: all rows, or only the good ones."""
        ...


class EncodedCollator:
    """Collator for encoded images: views into the shard, nothing is decoded."""

    def allocate(self, count: int) -> list[Buffer]:
        """Allocate a batch of `count` rows."""
        return [b""] * count

    def fill(
        self,
        rows: list[Buffer],
        first: int,
        images: Sequence[Buffer],
        epoch: int,  # noqa: ARG002
        random_ids: Int64Array,  # noqa: ARG002
    ) -> FillResult:
        """Store the images in their rows."""
        rows[first : first + len(images)] = images
        return FillResult([])

    def collect(self, rows: list[Buffer], good: Sequence[int] | None) -> list[Buffer]:
        """Return the list of images."""
        return rows if good is None else [rows[row] for row in good]


class PixelCollator:
    """Collator for built-in transforms: crops decoded straight into the batch, all of one size."""

    def __init__(
        self,
        transform: Transform,
        *,
        size: int,
        channels_first: bool,
        antialias: bool,
        seed: int,
        buffers: BufferPool,
        native: bool = False,
    ) -> None:
        self._transform, self._size, self._channels_first, self._seed = transform, size, channels_first, seed
        self._antialias, self._buffers, self._native = antialias, buffers, native
        self._local = threading.local()

    def allocate(self, count: int) -> Pixels:
        """Allocate a batch of `count` rows."""
        row = (3, self._size, self._size) if self._channels_first else (self._size, self._size, 3)
        return self._buffers.acquire((count, *row))

    def fill(
        self, rows: Pixels, first: int, images: Sequence[Buffer], epoch: int, random_ids: Int64Array
    ) -> FillResult:
        """Draw a crop for each image and decode it into its row."""
        started = time.perf_counter()
        decoders = self._decoders()
        target = rows[first : first + len(images)]
        out = decoders.scratch(len(images), self._size) if self._channels_first else target
        numbers = random_numbers(self._seed, epoch, random_ids).tolist()
        bad, native_count = decoders.decode(images, self._transform, numbers, out)
        if self._channels_first:
            for pixels, row in zip(out, target, strict=True):
                hwc_to_chw(pixels, row)
        decode_s = time.perf_counter() - started
        return FillResult([(first + row, reason) for row, reason in bad], decode_s, native_count=native_count)

    def collect(self, rows: Pixels, good: Sequence[int] | None) -> Pixels:
        """Return the array, or a copy of its good rows."""
        return rows if good is None else rows[np.array(good, dtype=np.int64)]

    def _decoders(self) -> _ThreadDecoders:
        """Return the decoders of this thread."""
        if not hasattr(self._local, "decoders"):
            self._local.decoders = _ThreadDecoders(antialias=self._antialias, native=self._native)
        decoders: _ThreadDecoders = self._local.decoders
        return decoders


class _ThreadDecoders:
    """Decoders of one thread: the native one, if available, decodes what it supports, the general one the rest."""

    def __init__(self, *, antialias: bool, native: bool) -> None:
        self._general = Decoder(antialias=antialias)
        self._native = NativeDecoder(antialias=antialias) if native else None
        self._pixels = np.empty((0, 0, 0, 3), dtype=np.uint8)

    def scratch(self, count: int, size: int) -> Pixels:
        """Return memory for images whose channels are not in the order of the batch yet."""
        if len(self._pixels) < count:
            self._pixels = np.empty((count, size, size, 3), dtype=np.uint8)
        return self._pixels[:count]

    def decode(
        self, images: Sequence[Buffer], transform: Transform, numbers: list[list[float]], out: Pixels
    ) -> tuple[list[tuple[int, str]], int]:
        """Decode images into the rows of `out`; return the bad rows with the reason, and the native decoder's count."""
        bad: dict[int, str] = {}
        native_count = 0
        headers = [None] * len(images) if self._native is None else self._native.read_headers(images)
        tasks = []
        for row, (data, native_header, sample_numbers) in enumerate(zip(images, headers, numbers, strict=True)):
            try:
                header = native_header or self._general.read_header(data)
            except BadImageError as error:
                bad[row] = str(error)
                continue
            tasks.append(DecodeTask(row, data, header, *transform(header.width, header.height, sample_numbers)))
        if self._native is not None:
            native_tasks = [task for task in tasks if headers[task.row] is not None]
            unsupported = self._native.fill(native_tasks, out)
            native_count = len(native_tasks) - len(unsupported)
            tasks = [*unsupported, *(task for task in tasks if headers[task.row] is None)]
        for row, data, header, crop, flip in tasks:
            try:
                self._general.fill(data, header, crop, flip, out[row])
            except BadImageError as error:
                bad[row] = str(error)
        return sorted(bad.items()), native_count


class _Output(NamedTuple):
    """What a user transform returned for a sample, whose number names it in errors."""

    array: npt.NDArray[Any]
    sample: int
    epoch: int


class UserCollator:
    """Collator for a user transform: a function of upright RGB pixels and a random generator seeded per sample."""

    def __init__(self, transform: UserTransform, *, seed: int) -> None:
        self._transform, self._seed = transform, seed
        self._local = threading.local()
        self._last_output: npt.NDArray[Any] = np.empty(0)
        """An empty batch has the shape and dtype of the last output."""

    def allocate(self, count: int) -> list[_Output | None]:
        """Allocate a batch of `count` rows."""
        return [None] * count

    def fill(
        self,
        rows: list[_Output | None],
        first: int,
        images: Sequence[Buffer],
        epoch: int,
        random_ids: Int64Array,
    ) -> FillResult:
        """Decode whole images and call the transform on each."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder()
        bad, decode_s, transform_s = [], 0.0, 0.0
        for row, (data, random_id) in enumerate(zip(images, random_ids.tolist(), strict=True), first):
            started = time.perf_counter()
            try:
                pixels = self._local.decoder.decode_whole(data)
            except BadImageError as error:
                bad.append((row, str(error)))
                continue
            finally:
                decoded = time.perf_counter()
                decode_s += decoded - started
            stream = np.random.Philox(key=seed_key("augment", self._seed, epoch, random_id))
            output = self._transform(pixels, np.random.Generator(stream))
            if output is None:
                raise InputError("transform returned None", where=f"sample {random_id} of epoch {epoch}")
            rows[row] = _Output(np.asarray(output), random_id, epoch)
            transform_s += time.perf_counter() - decoded
        return FillResult(bad, decode_s, transform_s)

    def collect(self, rows: list[_Output | None], good: Sequence[int] | None) -> npt.NDArray[Any]:
        """Return the stacked outputs; raise InputError if they have different shapes."""
        numbers = range(len(rows)) if good is None else good
        outputs = [output for row in numbers if (output := rows[row]) is not None]
        if not outputs:
            return np.empty((0, *self._last_output.shape), dtype=self._last_output.dtype)
        first = outputs[0]
        if other := next((output for output in outputs if output.array.shape != first.array.shape), None):
            raise InputError(
                f"transform returned shape {first.array.shape} for sample {first.sample} and {other.array.shape} for "
                f"sample {other.sample} of epoch {first.epoch}, which cannot be stacked to a batch",
                hint="return arrays of the same shape, for example crop or resize every image to one size",
            )
        self._last_output = first.array
        return np.stack([output.array for output in outputs])
