"""A seeded shuffle of any length that is computed, not stored."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8

Index = npt.NDArray[np.uint64]


class Permutation:
    """A permutation of range(n) that depends on the seed alone and takes no memory.

    A Feistel network permutes the next power of two, and results that fall outside range(n) go through it again
    until they fall inside. A stored permutation would be simpler, and 1.6 GB for a hundred million samples.
    """

    def __init__(self, n: int, seed: int, salt: str) -> None:
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._high_bits = np.uint64(bits - bits // 2)
        digest = hashlib.shake_256(f"{seed}/{salt}/{n}".encode()).digest(8 * ROUNDS)
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def at(self, positions: Index) -> Index:
        """Tell which element stands at each of the positions."""
        out = self._once(positions)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            out[outside] = self._once(out[outside])
            outside = outside[out[outside] >= self.n]
        return out

    def span(self, start: int, stop: int) -> Index:
        """Tell which elements stand at the positions from `start` up to `stop`."""
        return self.at(np.arange(start, stop, dtype=np.uint64))

    def _once(self, value: Index) -> Index:
        one = np.uint64(1)
        low_bits, high_bits = self._low_bits, self._high_bits
        low = value & ((one << low_bits) - one)
        high = value >> low_bits
        for key in self._keys:
            # The halves swap places, and with them their widths, so that both are mixed.
            low, high = high ^ (_mix(low ^ key) & ((one << high_bits) - one)), low
            low_bits, high_bits = high_bits, low_bits
        return (high << low_bits) | low


def _mix(value: Index) -> Index:
    """Scatter 64 bits: the finaliser of splitmix64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
