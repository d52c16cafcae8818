"""Batch memory: used again once nobody looks at it, and never before."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stoker.load.buffers import Buffers
from stoker.load.loader import Loader
from tests.support.trees import make_tree, stoker

SHAPE = (4, 8, 8, 3)


class Counter:
    """Memory that is counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> npt.NDArray[np.uint8]:
        self.sizes.append(size)
        return np.zeros(size, dtype=np.uint8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A set of 120 images."""
    root = tmp_path_factory.mktemp("buffers")
    make_tree(root / "pets", {"ant": 40, "bee": 40, "cat": 40})
    assert stoker("data", "convert", root / "pets", root / "out", "--shard-samples", 30) == 0
    return f"{root}/out/train"


def address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_the_array_is_dropped() -> None:
    allocate = Counter()
    buffers = Buffers(allocate)
    first = buffers.take(SHAPE)
    assert (first.shape, first.dtype) == (SHAPE, np.uint8)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    at = address(first)
    second = buffers.take(SHAPE)
    assert address(second) != at
    del first
    assert address(buffers.take(SHAPE)) == at
    assert len(allocate.sizes) == 2


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array[3],
        lambda array: array[::2, 1:, :, 0],
        lambda array: array.transpose(0, 3, 1, 2),
        lambda array: array.reshape(-1).view(np.int8),
        lambda array: memoryview(array)[1:],
        lambda array: np.frombuffer(array, dtype=np.uint8),
    ],
    ids=["row", "stride", "transposed", "reshaped", "memoryview", "frombuffer"],
)
def test_any_view_keeps_the_memory(part: object) -> None:
    buffers = Buffers()
    array = buffers.take(SHAPE)
    array[:] = 9
    held = part(array)  # type: ignore[operator]
    del array
    gc.collect()
    for _ in range(5):
        buffers.take(SHAPE)[:] = 1
    assert (np.asarray(held) == 9).all()


def test_smaller_batches_use_larger_memory_and_larger_ones_get_their_own() -> None:
    allocate = Counter()
    buffers = Buffers(allocate)
    del_me = buffers.take(SHAPE)
    del del_me
    assert buffers.take((1, 8, 8, 3)).shape == (1, 8, 8, 3)
    assert buffers.take((0, 8, 8, 3)).shape == (0, 8, 8, 3)
    assert len(allocate.sizes) == 1
    assert buffers.take((9, 8, 8, 3)).shape == (9, 8, 8, 3)
    assert allocate.sizes[1] >= 9 * 8 * 8 * 3
    assert buffers.take((9, 8, 8, 3)).shape == (9, 8, 8, 3)
    assert len(allocate.sizes) == 2


def test_the_arrays_outlive_the_pool() -> None:
    array = Buffers().take(SHAPE)
    array[:] = 5
    gc.collect()
    assert (array == 5).all()
    del array


def test_a_loader_uses_memory_again(shards: str) -> None:
    allocate = Counter()
    loader = Loader(shards, global_batch=4, size=16, prefetch=3, allocate=allocate)
    for _ in range(4):
        for batch in loader:
            assert batch.images.shape[1:] == (16, 16, 3)
    # Three in the making, one with the consumer, one on its way, and no more however many batches there were.
    assert len(allocate.sizes) <= 6


def test_a_single_image_that_is_held_stays_as_it_was(shards: str) -> None:
    loader = Loader(shards, global_batch=4, size=16, prefetch=2)
    batches = iter(loader)
    first = next(batches)
    held, copy = first.images[3], first.images[3].copy()
    del first
    taken = sum(1 for _ in batches) + sum(1 for _ in loader) + sum(1 for _ in loader)
    assert taken >= 50
    assert np.array_equal(held, copy)


def test_all_batches_of_an_epoch_can_be_held(shards: str) -> None:
    with Loader(shards, global_batch=7, size=16, seed=5) as loader:
        copies = [(batch.images.copy(), batch.labels.copy()) for batch in loader]
    with Loader(shards, global_batch=7, size=16, seed=5) as loader:
        held = list(loader)
    assert len({address(batch.images) for batch in held}) == len(held) == 18
    for (images, labels), batch in zip(copies, held, strict=True):
        assert np.array_equal(batch.images, images)
        assert np.array_equal(batch.labels, labels)


def test_the_consumers_changes_do_not_come_back(tmp_path: Path, shards: str) -> None:
    """Memory that was written to by the consumer is filled anew in every byte."""
    clean = [batch.images.copy() for batch in Loader(shards, global_batch=8, size=16, layout="NCHW")]
    dirty = []
    for batch in Loader(shards, global_batch=8, size=16, layout="NCHW", prefetch=1):
        dirty.append(batch.images.copy())
        batch.images[:] = 0
    assert all(np.array_equal(one, other) for one, other in zip(clean, dirty, strict=True))
