"""The buffer pool: memory is reused once no array refers to it, and never before."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stoker.load.buffers import BufferPool
from stoker.load.loader import Loader
from tests.support.trees import make_tree, stoker

SHAPE = (4, 8, 8, 3)


class CountingAllocator:
    """Allocator that records the requested sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> npt.NDArray[np.uint8]:
        self.sizes.append(size)
        return np.zeros(size, dtype=np.uint8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shard set of 120 images."""
    root = tmp_path_factory.mktemp("buffers")
    make_tree(root / "pets", {"ant": 40, "bee": 40, "cat": 40})
    assert stoker("data", "convert", root / "pets", root / "out", "--shard-samples", 30) == 0
    return f"{root}/out/train"


def address(array: npt.NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_returns_to_the_pool_when_the_array_is_deleted() -> None:
    allocate = CountingAllocator()
    buffers = BufferPool(allocate)
    first = buffers.acquire(SHAPE)
    assert (first.shape, first.dtype) == (SHAPE, np.uint8)
    assert first.flags.writeable
    assert first.flags.c_contiguous
    at = address(first)
    second = buffers.acquire(SHAPE)
    assert address(second) != at
    del first
    assert address(buffers.acquire(SHAPE)) == at
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
def test_any_view_keeps_the_memory_alive(part: object) -> None:
    buffers = BufferPool()
    array = buffers.acquire(SHAPE)
    array[:] = 9
    held = part(array)  # type: ignore[operator]
    del array
    gc.collect()
    for _ in range(5):
        buffers.acquire(SHAPE)[:] = 1
    assert (np.asarray(held) == 9).all()


def test_smaller_batches_reuse_larger_memory_and_larger_ones_allocate() -> None:
    allocate = CountingAllocator()
    buffers = BufferPool(allocate)
    del_me = buffers.acquire(SHAPE)
    del del_me
    assert buffers.acquire((1, 8, 8, 3)).shape == (1, 8, 8, 3)
    assert buffers.acquire((0, 8, 8, 3)).shape == (0, 8, 8, 3)
    assert len(allocate.sizes) == 1
    assert buffers.acquire((9, 8, 8, 3)).shape == (9, 8, 8, 3)
    assert allocate.sizes[1] >= 9 * 8 * 8 * 3
    assert buffers.acquire((9, 8, 8, 3)).shape == (9, 8, 8, 3)
    assert len(allocate.sizes) == 2


def test_arrays_outlive_the_pool() -> None:
    array = BufferPool().acquire(SHAPE)
    array[:] = 5
    gc.collect()
    assert (array == 5).all()
    del array


def test_loader_reuses_memory(shards: str) -> None:
    allocate = CountingAllocator()
    loader = Loader(shards, global_batch=4, size=16, prefetch=3, allocate=allocate)
    for _ in range(4):
        for batch in loader:
            assert batch.images.shape[1:] == (16, 16, 3)
    # Three in progress, one with the consumer, one in between: independent of the number of batches.
    assert len(allocate.sizes) <= 6


def test_a_referenced_image_is_not_overwritten(shards: str) -> None:
    loader = Loader(shards, global_batch=4, size=16, prefetch=2)
    batches = iter(loader)
    first = next(batches)
    held, copy = first.images[3], first.images[3].copy()
    del first
    taken = sum(1 for _ in batches) + sum(1 for _ in loader) + sum(1 for _ in loader)
    assert taken >= 50
    assert np.array_equal(held, copy)


def test_all_batches_of_an_epoch_can_be_kept(shards: str) -> None:
    with Loader(shards, global_batch=7, size=16, seed=5) as loader:
        copies = [(batch.images.copy(), batch.labels.copy()) for batch in loader]
    with Loader(shards, global_batch=7, size=16, seed=5) as loader:
        held = list(loader)
    assert len({address(batch.images) for batch in held}) == len(held) == 18
    for (images, labels), batch in zip(copies, held, strict=True):
        assert np.array_equal(batch.images, images)
        assert np.array_equal(batch.labels, labels)


def test_changes_by_the_consumer_do_not_leak_into_later_batches(tmp_path: Path, shards: str) -> None:
    """Every byte of reused memory is overwritten, even if the consumer has changed it."""
    clean = [batch.images.copy() for batch in Loader(shards, global_batch=8, size=16, layout="NCHW")]
    dirty = []
    for batch in Loader(shards, global_batch=8, size=16, layout="NCHW", prefetch=1):
        dirty.append(batch.images.copy())
        batch.images[:] = 0
    assert all(np.array_equal(one, other) for one, other in zip(clean, dirty, strict=True))
