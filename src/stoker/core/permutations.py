"""Seeded shuffles of any length, computed position by position instead of stored."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8

Uint64Array = npt.NDArray[np.uint64]

_ONE = np.uint64(1)
_STEPS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def seed_key(*parts: int | str) -> int:
    """Hash the parts that identify a shuffle to a 64-bit key."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def splitmix64(words: Uint64Array) -> Uint64Array:
    """Mix 64-bit words with the finalizer of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permute(positions: Uint64Array, lengths: Uint64Array | int, keys: Uint64Array | int) -> Uint64Array:
    """Return, for each position, the element at that position in the shuffle of range(length) that its key identifies.

    Lengths and keys may differ between positions. A Feistel network permutes the next power of two, and values outside
    range(length) are permuted again until they fall inside (cycle walking). This needs no memory: a stored shuffle of a
    hundred million samples takes 1.6 GB.
    """
    n = np.broadcast_to(np.asarray(lengths, dtype=np.uint64), positions.shape)
    k = np.broadcast_to(np.asarray(keys, dtype=np.uint64), positions.shape)
    # Very small Feistel networks shuffle unevenly, so at least 6 bits are used.
    bits = np.maximum(_bit_length(n - _ONE), np.uint64(6))
    out = _feistel(positions, bits, k)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _feistel(out[outside], bits[outside], k[outside])
        outside = outside[out[outside] >= n[outside]]
    return out


def _feistel(value: Uint64Array, bits: Uint64Array, keys: Uint64Array) -> Uint64Array:
    low_bits = bits >> _ONE
    high_bits = bits - low_bits
    low = value & ((_ONE << low_bits) - _ONE)
    high = value >> low_bits
    for step in _STEPS:
        # The halves swap, and their widths with them, so that both are mixed.
        word = splitmix64(low ^ (keys + step))
        low, high = high ^ (word & ((_ONE << high_bits) - _ONE)), low
        low_bits, high_bits = high_bits, low_bits
    joined: Uint64Array = (high << low_bits) | low
    return joined


def _bit_length(words: Uint64Array) -> Uint64Array:
    # Exact up to 2^53, more than any number of samples; frexp returns the exponent without a loop.
    return np.frexp(words.astype(np.float64))[1].astype(np.uint64)
