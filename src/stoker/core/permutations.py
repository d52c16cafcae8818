"""Seeded shuffles of any length that are computed, not stored."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8

Words = npt.NDArray[np.uint64]

_ONE = np.uint64(1)
_STEPS = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def key(*parts: int | str) -> int:
    """Make 64 bits of whatever names a shuffle."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mix(words: Words) -> Words:
    """Scatter 64 bits: the finaliser of splitmix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permute(positions: Words, lengths: Words | int, keys: Words | int) -> Words:
    """Tell, for each position, which element stands there in the shuffle of range(length) that its key names.

    Lengths and keys may differ from position to position. A Feistel network permutes the next power of two, and what
    falls outside of range(length) goes through it again until it falls inside. It holds nothing: a stored shuffle of a
    hundred million samples takes 1.6 GB.
    """
    n = np.broadcast_to(np.asarray(lengths, dtype=np.uint64), positions.shape)
    k = np.broadcast_to(np.asarray(keys, dtype=np.uint64), positions.shape)
    # Very small networks shuffle visibly unevenly, so that none has fewer than 6 bits.
    bits = np.maximum(_bit_length(n - _ONE), np.uint64(6))
    out = _feistel(positions, bits, k)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _feistel(out[outside], bits[outside], k[outside])
        outside = outside[out[outside] >= n[outside]]
    return out


def _feistel(value: Words, bits: Words, keys: Words) -> Words:
    low_bits = bits >> _ONE
    high_bits = bits - low_bits
    low = value & ((_ONE << low_bits) - _ONE)
    high = value >> low_bits
    for step in _STEPS:
        # The halves swap places, and with them their widths, so that both are mixed.
        word = mix(low ^ (keys + step))
        low, high = high ^ (word & ((_ONE << high_bits) - _ONE)), low
        low_bits, high_bits = high_bits, low_bits
    joined: Words = (high << low_bits) | low
    return joined


def _bit_length(words: Words) -> Words:
    # Exact up to 2^53, far more samples than there are; frexp gives the exponent without a loop.
    return np.frexp(words.astype(np.float64))[1].astype(np.uint64)
