"""Batch memory that is used again, but never while anyone still looks at it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.load.decode import Pixels

Allocate = Callable[[int], npt.NDArray[np.uint8]]


class _Lease:
    """Memory on loan: arrays made of it hold it, and when the last of them is gone it goes back to the pool."""

    def __init__(self, memory: Pixels, pool: deque[Pixels]) -> None:
        self._memory, self._pool = memory, pool
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.append(self._memory)


class Buffers:
    """A pool of batch memory, as large as the number of batches that are in use at once."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate: Allocate = allocate or (lambda size: np.empty(size, dtype=np.uint8))
        self._free: deque[Pixels] = deque()

    def take(self, shape: tuple[int, ...]) -> Pixels:
        """Give an array of this shape; its memory comes back by itself once no array or tensor refers to it."""
        size = int(np.prod(shape))
        try:
            memory = self._free.popleft()
        except IndexError:
            memory = self._allocate(size)
        if memory.nbytes < size:
            memory = self._allocate(size)
        lent: Pixels = np.asarray(_Lease(memory, self._free))
        return lent[:size].reshape(shape)
