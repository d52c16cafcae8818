"""Batches for PyTorch: the loader as an iterable dataset, alone or under the user's own DataLoader."""

from __future__ import annotations

import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import InputError, MissingExtraError, SpecError
from stoker.load import native
from stoker.load.decode import Pixels
from stoker.load.loader import Bad, Batch, Loader
from stoker.load.shared_cursor import Turn, Turns
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import Numbers
from stoker.shards.shard_set import ShardSet

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as error:
    raise MissingExtraError("torch", "torch", purpose="stoker.load.torch") from error

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IN_FLIGHT = 2
"""Host batches that are held at once because their copy to the device is not known to be done."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchBatch:
    """One rank's share of a global batch as tensors.

    `images` are uint8, N×3×H×W in channels_last memory, or what the user's transform made, or without a transform a
    list of bytes; `count` is how many there are. `cursor` is where the epoch stands once this batch is taken, and
    `positions` (of numpy) are those of the rows in the epoch.
    """

    images: Any
    labels: torch.Tensor
    count: int
    cursor: Cursor
    positions: Numbers

    def pin_memory(self) -> TorchBatch:
        """Copy into page-locked memory: what DataLoader calls for `pin_memory=True`."""
        return self._each(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TorchBatch:
        """Copy to a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TorchBatch:
        images = change(self.images) if isinstance(self.images, torch.Tensor) else self.images
        return replace(self, images=images, labels=change(self.labels))


class Dataset(IterableDataset[TorchBatch]):
    """Iterates a shard set, one epoch for each `for`; takes what `stoker.Loader` takes, and a device.

    In a plain loop it is the Loader: the next `for` goes on where the last was left, and `state_dict()` tells where.
    Under `DataLoader(dataset, batch_size=None, num_workers=N)` worker `w` makes the steps ≡ `w` mod N, which the
    DataLoader puts in order. Nobody then knows how far the batches were taken but who took them: each `for` is the next
    epoch, unless `load_state_dict(batch.cursor.state())` says where to go on.
    """

    def __init__(
        self, url: str | Path | ShardSet, *, device: torch.device | str | None = None, **settings: Any
    ) -> None:
        inspect.signature(Loader).bind(url, **settings)  # a wrong keyword is told here, not by a worker
        self._url, self._settings = url, settings
        if settings.get("decoder", "auto") == "auto" and isinstance(settings.get("transform", ""), str):
            native.chosen("auto")  # says which one that is, which worker processes do not
        cuda = _cuda(device)
        self._upload = None if cuda is None else _Upload(cuda)
        if self._upload is not None:
            self._settings = {"allocate": _pinned, **settings}
        self._turns = Turns(Turn(Cursor(0, 0, "")))
        self._rounds = 0
        # By process, so that a forked worker leaves alone what it inherited, whose threads it has not.
        self._loaders: dict[int, Loader] = {}

    def __iter__(self) -> Iterator[TorchBatch]:
        """Give the rest of the epoch; in a worker process, its share of it."""
        worker = get_worker_info()
        if worker is None:
            return self._rest()
        self._rounds += 1
        # At once, not with the first batch: when all workers of an iteration have begun, none claims any more.
        start = self._turns.claim(f"{worker.seed - worker.id}:{self._rounds}", worker.id)
        return self._share(start, worker.id, worker.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor as plain values, for a checkpoint."""
        turn = self._turns.look()
        if not turn.known:
            raise InputError(
                "with worker processes a dataset cannot know which of its batches were taken",
                hint="save batch.cursor.state() of the last one",
            )
        return self._named(turn.next).state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor: the next `for` starts there, and refuses one that another plan made.

        Nothing is opened here, because a process that has opened an object store cannot fork workers that do.
        """
        cursor = Cursor.from_state(state)
        with self._turns.turn() as turn:
            turn.next, turn.known = cursor, True

    @property
    def bad(self) -> list[Bad]:
        """What a plain loop has left out; worker processes write what they left out to the log."""
        return self._loaders[os.getpid()].bad if os.getpid() in self._loaders else []

    def close(self) -> None:
        """End this process's threads and let go of all shards. A dataset that is used again opens them again."""
        if os.getpid() in self._loaders:
            self._loaders[os.getpid()].close()

    @property
    def loader(self) -> Loader:
        """The loader of a plain loop in this process, opened where it was not yet: its plan, set, times and seat."""
        return self._loader()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaders": {}}

    def _rest(self) -> Iterator[TorchBatch]:
        loader = self._loader()
        loader.load_state_dict(self._named(self._turns.look().next).state())
        for batch in loader:
            made = self._tensors(batch)
            with self._turns.turn() as turn:
                turn.next, turn.known = batch.cursor, True
            yield made if self._upload is None else self._upload(made)

    def _share(self, start: Cursor, worker: int, workers: int) -> Iterator[TorchBatch]:
        if self._upload is not None:
            raise InputError(
                f"worker processes cannot put batches on {self._upload.device}",
                hint="give DataLoader pin_memory=True, leave `device` away here, and call batch.to(device)",
            )
        native.log.disabled = True  # a new worker for each epoch would say again what the dataset's maker has said
        try:
            loader = self._loader()
        except SpecError as error:  # torch makes an error anew of its text, and this one is made of faults
            raise InputError(str(error)) from error
        try:
            loader.load_state_dict(self._named(start).state())
            for batch in loader.share(worker, workers):
                yield self._tensors(batch)
        finally:
            loader.close()

    def _loader(self) -> Loader:
        process = os.getpid()
        if process not in self._loaders:
            self._loaders[process] = Loader(self._url, **self._settings)
        return self._loaders[process]

    def _named(self, cursor: Cursor) -> Cursor:
        """Give a cursor the name of the plan where it was made before the plan was known."""
        return cursor if cursor.plan else cursor._replace(plan=self._loader().plan.digest)

    def _tensors(self, batch: Batch) -> TorchBatch:
        images: Any
        if isinstance(batch.images, list):
            images = [bytes(image) for image in batch.images]
        else:
            images = torch.from_numpy(batch.images)
            named = isinstance(self._settings.get("transform", "imagenet-train"), str)
            if named and self._settings.get("layout", "NHWC") == "NHWC":
                images = images.permute(0, 3, 1, 2)
        labels = torch.from_numpy(batch.labels)
        return TorchBatch(images, labels, batch.count, batch.cursor, batch.positions)


def normalise(
    images: torch.Tensor,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Give uint8 images as numbers around 0, on their device and in their memory format; rounded to `dtype` once."""
    shift, scale = _constants(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32, copy=True).sub_(shift).mul_(scale).to(dtype)


@functools.lru_cache(maxsize=16)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the constants on a device, once: each time would wait for all that the device still has to do."""
    shift = torch.tensor(mean, dtype=torch.float32, device=device).mul_(255).view(1, -1, 1, 1)
    scale = torch.tensor(std, dtype=torch.float32, device=device).mul_(255).reciprocal_().view(1, -1, 1, 1)
    return shift, scale


def _cuda(device: torch.device | str | None) -> torch.device | None:
    """Give the CUDA device that batches are put on; None where they stay in host memory."""
    wanted = torch.device(device or "cpu")
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise InputError(f"batches cannot be put on the device {str(wanted)!r}", hint="it must be cpu or cuda")
    if not torch.cuda.is_available():
        raise InputError(f"there is no CUDA here for the device {str(wanted)!r}", hint="leave `device` away")
    return wanted


def _pinned(size: int) -> Pixels:
    """Allocate page-locked memory, from which a device copies by itself."""
    memory: Pixels = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class _Upload:
    """Copies batches to a device without waiting, and holds each in host memory until its copy is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: deque[tuple[torch.cuda.Event, TorchBatch]] = deque()

    def __call__(self, batch: TorchBatch) -> TorchBatch:
        """Begin a copy; wait for the oldest one if too many are under way."""
        moved = batch.to(self.device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        self._held.append((copied, batch))
        if len(self._held) > IN_FLIGHT:
            self._held[0][0].synchronize()
        while self._held and self._held[0][0].query():  # type: ignore[no-untyped-call]
            self._held.popleft()
        return moved

    def __reduce__(self) -> tuple[Any, ...]:
        return _Upload, (self.device,)
