"""Requests form batches while the model is busy, and one bad request does not fail the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError
from stoker.model_server.batching import Batcher, OverloadedError
from stoker.model_server.signatures import Tensors
from tests.support.model_servers import NumpyModel


def row(*numbers: float) -> Tensors:
    return {"x": np.array([[number, 0] for number in numbers], dtype=np.float32)}


def run_while_busy(model: NumpyModel, *requests: tuple[str, Tensors], **options: Any) -> list[Any]:
    """Submit requests while the model is busy with a first one, and return their results or errors."""

    async def run() -> list[Any]:
        batcher = Batcher(model, **options)
        model.gate.clear()
        tasks = [asyncio.create_task(_await(batcher.submit("serving_default", row(0))))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(_await(batcher.submit(name, inputs))) for name, inputs in requests]
        await asyncio.sleep(0)
        model.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await batcher.drain()
        return list(results[1:])

    return asyncio.run(run())


async def _await(awaitable: Awaitable[Tensors]) -> Tensors:
    return await awaitable


def test_waiting_requests_run_together() -> None:
    model = NumpyModel()
    results = run_while_busy(model, *(("serving_default", row(number, number + 10)) for number in range(5)))
    assert model.batches == [1, 10]
    assert [result["sum"].tolist() for result in results] == [[100 + n, 110 + n] for n in range(5)]


def test_a_lone_request_does_not_wait() -> None:
    async def run() -> None:
        batcher = Batcher(NumpyModel())
        assert (await batcher.submit("serving_default", row(1)))["sum"].tolist() == [101]
        await batcher.drain()

    asyncio.run(run())


def test_batches_are_bounded_and_a_large_request_runs_alone() -> None:
    model = NumpyModel()
    rows = [2, 2, 2, 9, 1]
    results = run_while_busy(model, *(("serving_default", row(*range(count))) for count in rows), max_rows=4)
    assert sorted(model.batches[1:]) == [3, 4, 9]
    assert [len(result["sum"]) for result in results] == rows


def test_one_row_per_batch_disables_batching() -> None:
    model = NumpyModel()
    run_while_busy(model, *(("serving_default", row(number)) for number in range(4)), max_rows=1)
    assert model.batches == [1] * 5


def test_only_equal_signatures_share_a_batch() -> None:
    model = NumpyModel()
    data = {"data": np.array([b"abc"], dtype=object)}
    results = run_while_busy(
        model,
        *[("serving_default", row(1)), ("bytes", data), ("serving_default", row(2)), ("bytes", data)],
        *[("total", row(1)), ("total", row(2))],
    )
    assert model.batches == [1, 2, 2, 1, 1]  # the outputs of `total` have no rows
    assert [next(iter(result.values())).tolist() for result in results] == [[101], [3], [102], [3], 1, 2]


def test_a_rejected_request_does_not_fail_the_others() -> None:
    model = NumpyModel()
    results = run_while_busy(model, *(("serving_default", row(number)) for number in (1, 666, 2)))
    assert [results[0]["sum"].tolist(), results[2]["sum"].tolist()] == [[101], [102]]
    assert isinstance(results[1], InputError)


def test_the_queue_is_bounded() -> None:
    results = run_while_busy(
        NumpyModel(), *(("serving_default", row(number)) for number in range(4)), max_queued=2, max_rows=1
    )
    assert [isinstance(result, OverloadedError) for result in results] == [False, False, True, True]


def test_a_cancelled_request_is_not_run() -> None:
    async def run() -> None:
        model = NumpyModel()
        batcher = Batcher(model)
        model.gate.clear()
        first = asyncio.create_task(_await(batcher.submit("serving_default", row(1))))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(_await(batcher.submit("serving_default", row(2))))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        model.gate.set()
        assert (await first)["sum"].tolist() == [101]
        await batcher.drain()
        assert model.batches == [1]

    asyncio.run(run())
