"""Dynamic batching: while one batch runs, requests queue up and form the next one.

A lone request never waits for others; under load, batches grow up to the limit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stoker.core.threads import ThreadPool
from stoker.errors import UnavailableError
from stoker.model_server.signatures import Signature, Tensors

MAX_QUEUED = 2048
"""Requests that may wait for one version of a model."""


class OverloadedError(UnavailableError):
    """Too many requests are waiting."""


class Runner(Protocol):
    """The part of a model that a batcher needs."""

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """The functions of the model."""
        ...

    def run(self, signature: str, inputs: Tensors) -> Tensors:
        """Run one function; called from one thread at a time."""
        ...


@dataclass(eq=False, slots=True)
class _Request:
    """A queued request; requests with the same key can share a batch, None can share with no other."""

    signature: str
    inputs: Tensors
    key: tuple[object, ...] | None
    rows: int
    future: asyncio.Future[Tensors]


class Batcher:
    """Queue of one model version; its model runs in one thread, which uses all cores by itself."""

    def __init__(
        self,
        model: Runner,
        *,
        max_rows: int = 32,
        max_queued: int = MAX_QUEUED,
        on_batch: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._model, self._max_rows, self._max_queued, self._on_batch = model, max_rows, max_queued, on_batch
        self._queue: deque[_Request] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._pool = ThreadPool(1, "stoker-model")

    async def submit(self, signature: str, inputs: Tensors) -> Tensors:
        """Run a function on these inputs, possibly together with those of other requests."""
        if len(self._queue) >= self._max_queued:
            raise OverloadedError(f"{len(self._queue)} requests are waiting", hint="try again later")
        key, rows = self._group(signature, inputs)
        request = _Request(signature, inputs, key, rows, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.future

    async def drain(self) -> None:
        """Wait for the queued requests and stop the thread."""
        while self._worker is not None and not self._worker.done():
            await self._worker
        await asyncio.to_thread(self._pool.shutdown)

    def _group(self, signature: str, inputs: Tensors) -> tuple[tuple[object, ...] | None, int]:
        if self._max_rows <= 1 or not self._model.signatures[signature].is_batched:
            return None, 1
        shapes = tuple((name, array.shape[1:]) for name, array in inputs.items())
        return (signature, *shapes), len(next(iter(inputs.values())))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._take()
            if not batch:
                continue
            results: Sequence[Tensors | Exception]
            try:
                results = await loop.run_in_executor(self._pool, self._run, batch)
            except Exception as error:  # a request must never wait forever
                results = [error] * len(batch)
            for request, result in zip(batch, results, strict=True):
                if request.future.cancelled():
                    continue
                if isinstance(result, BaseException):
                    request.future.set_exception(result)
                else:
                    request.future.set_result(result)

    def _take(self) -> list[_Request]:
        """Take the oldest request, and those that can share its batch."""
        first = self._queue.popleft()
        if first.future.cancelled():
            return []
        batch, rows, others = [first], first.rows, deque[_Request]()
        while first.key is not None and self._queue and rows < self._max_rows:
            request = self._queue.popleft()
            if request.key == first.key and rows + request.rows <= self._max_rows and not request.future.cancelled():
                batch.append(request)
                rows += request.rows
            else:
                others.append(request)
        self._queue.extendleft(reversed(others))
        return batch

    def _run(self, batch: list[_Request]) -> list[Tensors | Exception]:
        """Run a batch; if it fails, run its requests one by one, so that a bad one does not fail the others."""
        if len(batch) == 1:
            return [self._run_one(batch[0])]
        inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in batch[0].inputs}
        rows = [request.rows for request in batch]
        try:
            outputs = self._model.run(batch[0].signature, inputs)
            if any(array.ndim == 0 or len(array) != sum(rows) for array in outputs.values()):
                raise ValueError("an output does not have one row per input")
        except Exception:
            return [self._run_one(request) for request in batch]
        self._on_batch(len(batch), sum(rows))
        ends = np.cumsum(rows).tolist()
        return [
            {name: array[end - count : end] for name, array in outputs.items()}
            for end, count in zip(ends, rows, strict=True)
        ]

    def _run_one(self, request: _Request) -> Tensors | Exception:
        try:
            outputs = self._model.run(request.signature, request.inputs)
        except Exception as error:
            return error
        self._on_batch(1, request.rows)
        return outputs
