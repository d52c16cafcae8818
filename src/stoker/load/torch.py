"""Batches for PyTorch: the loader as an IterableDataset, to be used directly or with a DataLoader."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from stoker.core.processes import exit_with_process
from stoker.errors import InputError, MissingExtraError, SpecError
from stoker.load import native
from stoker.load.decode import Pixels
from stoker.load.loader import BadSample, Batch, Loader, describe_batch
from stoker.load.shared_cursor import ConsumerState, SharedCursor
from stoker.load.transforms import IMAGENET_MEAN, IMAGENET_STD
from stoker.sampling.cursor import Cursor
from stoker.sampling.order import Int64Array
from stoker.shards.shard_set import ShardSet
from stoker.storage import redacted

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map
except ImportError as error:
    raise MissingExtraError("torch", "torch", purpose="stoker.load.torch") from error

PLAN_SETTINGS = ("global_batch", "sampling", "epoch_samples", "seed", "rank")
"""Settings of the loader that determine the number of batches."""
MAX_COPIES_IN_FLIGHT = 2
"""Host batches kept alive at once because their copy to the device may not be complete."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchBatch:
    """One rank's share of a global batch as tensors.

    `images` is a uint8 tensor of shape N×3×H×W in channels_last memory, the stacked results of a user transform in the
    layout that it returned, or, without a transform, a list of bytes; `count` is their number. `cursor` marks the end
    of this batch: resume from it after using the batch. `positions`, a numpy array, are the positions of the rows in
    the epoch.
    """

    images: Any
    labels: torch.Tensor
    count: int
    cursor: Cursor
    positions: Int64Array

    def __repr__(self) -> str:
        return describe_batch("TorchBatch", self.images, self.cursor)

    def pin_memory(self) -> TorchBatch:
        """Copy to page-locked memory; DataLoader calls this for `pin_memory=True`."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TorchBatch:
        """Copy to a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TorchBatch:
        images = function(self.images) if isinstance(self.images, torch.Tensor) else self.images
        return replace(self, images=images, labels=function(self.labels))


class Dataset(IterableDataset[TorchBatch]):
    """Iterable dataset of batches, one epoch per `for` loop; takes the parameters of `stoker.Loader`, and a device.

    Used directly, it behaves like the Loader: the next loop continues where the last one stopped, and `state_dict()`
    returns that position. With `DataLoader(dataset, batch_size=None, num_workers=N)`, worker `w` loads the steps
    ≡ `w` mod N and the DataLoader puts them in order. The dataset then cannot know which batches were consumed: each
    loop is the next epoch, unless `load_state_dict(batch.cursor.state())` sets the position.
    """

    def __init__(
        self, url: str | Path | ShardSet, *, device: torch.device | str | None = None, **settings: Any
    ) -> None:
        inspect.signature(Loader).bind(url, **settings)  # report a wrong keyword here, not in a worker
        self._url, self._settings = url, settings
        if settings.get("decoder", "auto") == "auto" and isinstance(settings.get("transform", ""), str):
            native.select_decoder("auto")  # logs the choice; worker processes do not
        cuda = _cuda_device(device)
        self._copier = None if cuda is None else _DeviceCopier(cuda)
        if self._copier is not None:
            self._settings = {"allocate": _allocate_pinned, **settings}
        self._cursor = SharedCursor(ConsumerState(Cursor(0, 0, "")))
        self._iterations = 0
        self._lengths: dict[int, int] = {}
        # By process id: a forked worker must not use the loader it inherited, whose threads do not exist there.
        self._loaders: dict[int, Loader] = {}

    def __iter__(self) -> Iterator[TorchBatch]:
        """Yield the rest of the epoch; in a worker process, its share."""
        worker = get_worker_info()
        if worker is None:
            return self._iterate()
        _exit_with_consumer(os.getpid())
        self._iterations += 1
        # Claim here, not with the first batch: once all workers of an iteration have started, none claims any more.
        start = self._cursor.claim(f"{worker.seed - worker.id}:{self._iterations}", worker.id)
        return self._iterate_worker(start, worker.id, worker.num_workers)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank, which `len(DataLoader(dataset))` returns too.

        It does not depend on the cursor: the loop that resumes in the middle of an epoch has fewer batches.
        """
        epoch = self._cursor.get().next_start.epoch
        if epoch in self._lengths:
            return self._lengths[epoch]
        if str(self._url).startswith("s3://") and os.getpid() not in self._loaders:
            # Not in this process, which could then not fork workers that read from S3.
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as child:
                settings = {name: self._settings[name] for name in PLAN_SETTINGS if name in self._settings}
                self._lengths[epoch] = child.submit(_count_batches, str(self._url), settings, epoch).result()
            return self._lengths[epoch]
        return _count_epoch(self._loader(), epoch)

    def __bool__(self) -> bool:
        """Return True: `if dataset` must not open the dataset to determine its length."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor as plain values, for a checkpoint."""
        state = self._cursor.get()
        if not state.is_exact:
            raise InputError(
                "with DataLoader workers, the dataset does not know which batches were consumed",
                hint="save batch.cursor.state() of the last batch",
            )
        return self._with_plan(state.next_start).state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor; the next loop raises InputError if the cursor belongs to another plan.

        Nothing is opened here, because a process that has opened an object store cannot fork workers that open it too.
        """
        cursor = Cursor.from_state(state)
        with self._cursor.update() as shared:
            shared.next_start, shared.is_exact = cursor, True

    @property
    def bad(self) -> list[BadSample]:
        """Samples skipped in this process; worker processes log the samples that they skip."""
        return self._loaders[os.getpid()].bad if os.getpid() in self._loaders else []

    def close(self) -> None:
        """Stop the threads of this process and close all shards. A dataset can be used again and reopens them."""
        if os.getpid() in self._loaders:
            self._loaders[os.getpid()].close()

    @property
    def loader(self) -> Loader:
        """The loader of this process, with its plan, shard set, times and rank; opened on first use."""
        return self._loader()

    def __repr__(self) -> str:
        url = self._url.url if isinstance(self._url, ShardSet) else str(self._url)
        settings = [f"{name}={value!r}" for name, value in self._settings.items() if name != "allocate"]
        return f"<stoker.load.torch.Dataset {redacted(url)!r}: {', '.join(settings)}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaders": {}}

    def _iterate(self) -> Iterator[TorchBatch]:
        loader = self._loader()
        loader.load_state_dict(self._with_plan(self._cursor.get().next_start).state())
        for batch in loader:
            tensors = self._to_torch(batch)
            with self._cursor.update() as shared:
                shared.next_start, shared.is_exact = batch.cursor, True
            yield tensors if self._copier is None else self._copier(tensors)

    def _iterate_worker(self, start: Cursor, worker: int, workers: int) -> Iterator[TorchBatch]:
        if self._copier is not None:
            raise InputError(
                f"DataLoader workers cannot copy batches to {self._copier.device}",
                hint="remove `device` here, pass pin_memory=True to the DataLoader and call batch.to(device)",
            )
        native.selection_log.disabled = True  # every new worker would repeat the message of the main process
        try:
            loader = self._loader()
        except SpecError as error:  # torch recreates an error from its message, and SpecError takes faults
            raise InputError(str(error)) from error
        try:
            loader.load_state_dict(self._with_plan(start).state())
            for batch in loader.worker_batches(worker, workers):
                yield self._to_torch(batch)
        finally:
            loader.close()

    def _loader(self) -> Loader:
        process = os.getpid()
        if process not in self._loaders:
            self._loaders[process] = Loader(self._url, **self._settings)
        return self._loaders[process]

    def _with_plan(self, cursor: Cursor) -> Cursor:
        """Return the cursor with the digest of the plan, if it was created before the plan was known."""
        return cursor if cursor.plan else cursor._replace(plan=self._loader().plan.digest)

    def _to_torch(self, batch: Batch) -> TorchBatch:
        images: Any
        if isinstance(batch.images, list):
            images = [bytes(image) for image in batch.images]
        else:
            images = torch.from_numpy(batch.images)
            is_builtin = isinstance(self._settings.get("transform", "imagenet-train"), str)
            if is_builtin and self._settings.get("layout", "NHWC") == "NHWC":
                images = images.permute(0, 3, 1, 2)
        labels = torch.from_numpy(batch.labels)
        return TorchBatch(images, labels, batch.count, batch.cursor, batch.positions)


def _reject_batching(batches: list[TorchBatch], **_: object) -> NoReturn:  # noqa: ARG001
    """Raise InputError for a DataLoader that combines batches to batches."""
    raise InputError("the dataset already yields batches", hint="pass batch_size=None to the DataLoader")


default_collate_fn_map[TorchBatch] = _reject_batching


def _count_batches(url: str, settings: dict[str, Any], epoch: int) -> int:
    with Loader(url, transform=None, **settings) as loader:
        return _count_epoch(loader, epoch)


def _count_epoch(loader: Loader, epoch: int) -> int:
    return loader.plan.epoch(epoch, loader.rank).count_steps(0, loader.global_batch)


@functools.cache
def _exit_with_consumer(worker: int) -> None:  # noqa: ARG001 (the key: once per process)
    """Make this worker process exit with the process that consumes its batches.

    PyTorch ends an orphan only between two batches, and not while its queue is full: other orphans keep it open.
    """
    if (consumer := multiprocessing.parent_process()) is not None and consumer.pid is not None:
        exit_with_process(consumer.pid)


def normalize(
    images: torch.Tensor,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Normalize images of shape N×C×H×W by mean and std, on their device and in their memory format.

    The result is rounded to `dtype` once. Raise InputError for images in another layout.
    """
    if images.ndim != 4 or images.shape[1] != len(mean):
        raise InputError(
            f"normalize needs images of shape N×{len(mean)}×H×W, got {'×'.join(map(str, images.shape))}",
            hint="a user transform must return channels first, or call images.permute(0, 3, 1, 2)",
        )
    shift, scale = _normalize_constants(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32, copy=True).sub_(shift).mul_(scale).to(dtype)


@functools.lru_cache(maxsize=16)
def _normalize_constants(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shift and scale on a device; cached, because each copy would wait for the device to finish its work."""
    shift = torch.tensor(mean, dtype=torch.float32, device=device).mul_(255).view(1, -1, 1, 1)
    scale = torch.tensor(std, dtype=torch.float32, device=device).mul_(255).reciprocal_().view(1, -1, 1, 1)
    return shift, scale


def _cuda_device(device: torch.device | str | None) -> torch.device | None:
    """Return the CUDA device to copy batches to; None if they stay in host memory."""
    target = torch.device(device or "cpu")
    if target.type == "cpu":
        return None
    if target.type != "cuda":
        raise InputError(f"device {str(target)!r} is not supported", hint="use cpu or cuda")
    if not torch.cuda.is_available():
        raise InputError(f"CUDA is not available for device {str(target)!r}", hint="remove `device`")
    return target


def _allocate_pinned(size: int) -> Pixels:
    """Allocate page-locked memory, from which copies to a device are asynchronous."""
    memory: Pixels = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class _DeviceCopier:
    """Asynchronous copy of batches to a device; keeps each host batch alive until its copy is complete."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in_flight: deque[tuple[torch.cuda.Event, TorchBatch]] = deque()

    def __call__(self, batch: TorchBatch) -> TorchBatch:
        """Start a copy; wait for the oldest one if too many are in flight."""
        on_device = batch.to(self.device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        self._in_flight.append((copied, batch))
        if len(self._in_flight) > MAX_COPIES_IN_FLIGHT:
            self._in_flight[0][0].synchronize()
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()
        return on_device

    def __reduce__(self) -> tuple[Any, ...]:
        return _DeviceCopier, (self.device,)
