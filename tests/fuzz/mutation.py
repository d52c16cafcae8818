"""Mutate bytes at random: flip, cut, repeat, overwrite with edge values, and insert words of the format."""

from __future__ import annotations

import random
from collections.abc import Sequence

EDGE_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
MAX_LENGTH = 1 << 20


def mutate(data: bytes, source: random.Random, tokens: Sequence[bytes] = ()) -> bytes:
    """Return the data with one to eight random changes."""
    result = bytearray(data)
    for _ in range(source.randint(1, 8)):
        _change(result, source, tokens)
    return bytes(result[:MAX_LENGTH])


def _change(data: bytearray, source: random.Random, tokens: Sequence[bytes]) -> None:
    at = source.randint(0, len(data))
    length = min(len(data) - at, 1 << source.randint(0, 9))
    match source.randint(0, 6):
        case 0 if at < len(data):
            data[at] ^= 1 << source.randint(0, 7)
        case 1:
            del data[at : at + length]
        case 2:
            data[at:at] = data[at : at + length] * source.choice((1, 1, 1, 2, 40))
        case 3:
            data[at : at + length] = source.randbytes(length)
        case 4:
            size = source.choice((1, 2, 4, 8))
            number = source.choice(EDGE_NUMBERS) & ((1 << 8 * size) - 1)
            data[at : at + size] = number.to_bytes(size, source.choice(("little", "big")))
        case 5:
            data[at : at + length * source.randint(0, 1)] = str(
                source.choice((-1, 1)) * source.choice(EDGE_NUMBERS)
            ).encode()
        case _ if tokens:
            data[at:at] = source.choice(tokens)
