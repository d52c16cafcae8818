"""A pool of batch buffers, which are reused once no array or tensor refers to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.load.decode import Pixels

Allocator = Callable[[int], npt.NDArray[np.uint8]]


class _LeasedMemory:
    """Memory that returns to the pool when the last array that refers to it is gone."""

    def __init__(self, memory: Pixels, free: deque[Pixels]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


class BufferPool:
    """A pool that grows to the number of batches in use at the same time."""

    def __init__(self, allocate: Allocator | None = None) -> None:
        self._allocate: Allocator = allocate or (lambda size: np.empty(size, dtype=np.uint8))
        self._free: deque[Pixels] = deque()

    def acquire(self, shape: tuple[int, ...]) -> Pixels:
        """Return an uninitialized array; its memory returns to the pool once no array or tensor refers to it."""
        size = int(np.prod(shape))
        try:
            memory = self._free.popleft()
        except IndexError:
            memory = self._allocate(size)
        if memory.nbytes < size:
            memory = self._allocate(size)
        leased: Pixels = np.asarray(_LeasedMemory(memory, self._free))
        return leased[:size].reshape(shape)
