"""The ranks of a training, whatever connects them: what each trainer asks of its world."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from stoker.errors import StokerError
from stoker.sampling.rank import Rank

T = TypeVar("T")


class RankGroup(ABC):
    """The ranks that train together, and collectives over all of them."""

    sampling_rank: Rank
    device_type: str
    """The kind of device that the ranks train on: `cpu`, `cuda` or `gpu`."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.sampling_rank.number

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.sampling_rank.world_size

    @abstractmethod
    def all_gather(self, number: int) -> list[int]:
        """Return the number of each rank."""

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; if it fails on some, the first of them raises the error and all exit."""
        error: StokerError | None = None
        try:
            result = function()
        except StokerError as caught:
            error = caught
        codes = self.all_gather(error.exit_code if error is not None else 0)
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed:
            return result
        if error is not None and failed[0] == self.rank:
            raise error
        raise SystemExit(codes[failed[0]])

    def run_on_rank0(self, function: Callable[[], T]) -> T | None:
        """Call a function on rank 0 only; if it fails, all ranks exit."""
        return self.run_on_all(lambda: function() if self.rank == 0 else None)


class SingleRank(RankGroup):
    """A training that one process controls."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.sampling_rank, self.device_type = Rank(), device_type

    def all_gather(self, number: int) -> list[int]:
        """Return the number of the only rank."""
        return [number]

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value

    def close(self) -> None:
        """Do nothing: there is no other rank."""
