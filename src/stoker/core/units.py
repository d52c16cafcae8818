"""Sizes and durations as people write them: `200Gi`, `1.5GB`, `1h30m`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import ClassVar, Self

from stoker.errors import InputError

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
# Only `k` has two cases: a lone `m` means milli where Kubernetes reads it, so a guess would be off by 10^9.
_SIZE = re.compile(rf"(?P<number>(?:{_NUMBER})(?:[eE][+-]?\d{{1,2}})?)\s*(?P<prefix>[kKMGTP]?)(?P<binary>i?)[bB]?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_LARGEST = 2**63 - 1

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"\s*".join(rf"(?:(?P<{unit}>{_NUMBER})\s*{unit})?" for unit in _SECONDS))
_PLAIN_SECONDS = re.compile(rf"(?:{_NUMBER})(?:[eE][+-]?\d{{1,2}})?")


class Bytes(int):
    """A size in bytes; in settings a number or text such as `200Gi`."""

    wanted: ClassVar[str] = "a size such as 200Gi, 1.5GB or 1048576"

    def __new__(cls, value: str | float) -> Self:
        """Read a size as `parse_bytes` does."""
        return super().__new__(cls, parse_bytes(value))


class Seconds(float):
    """A duration in seconds; in settings a number or text such as `1h30m`."""

    wanted: ClassVar[str] = "a duration such as 30s, 1h30m or 500ms, or a number of seconds"

    def __new__(cls, value: str | float) -> Self:
        """Read a duration as `parse_duration` does."""
        return super().__new__(cls, parse_duration(value))


def parse_bytes(value: str | float) -> int:
    """Read a size: a whole number, or text with k, M, G, T, P (powers of 1000) or Ki … Pi (of 1024)."""
    refusal = InputError(f"expected {Bytes.wanted}, got {value!r}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None or (match["binary"] and not match["prefix"]):
            raise refusal
        size = Decimal(match["number"]) * (1024 if match["binary"] else 1000) ** _POWERS[match["prefix"]]
        # 1.1GiB is no whole number of bytes and still well meant; 1.5 bytes is a mistake.
        whole = bool(match["prefix"]) or size == int(size)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        size = Decimal(value)
        whole = size == int(size)
    else:
        raise refusal
    if not whole or not 0 <= size <= _LARGEST:
        raise refusal
    return int(size)


def format_bytes(size: float) -> str:
    """Write a size for people, in powers of 1024: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        text = f"{_short(size)} {unit}"
        if round(size, 1) < 1024:
            break
        size /= 1024
    return text


def parse_duration(value: str | float) -> float:
    """Read a duration in seconds: a number, or text with d, h, m, s, ms from large to small."""
    seconds = math.nan
    if isinstance(value, str):
        text = value.strip()
        if _PLAIN_SECONDS.fullmatch(text):
            seconds = float(text)
        elif text and (match := _DURATION.fullmatch(text)):
            seconds = sum(float(number) * _SECONDS[unit] for unit, number in match.groupdict("0").items())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise InputError(f"expected {Seconds.wanted}, got {value!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """Write a duration for people, in its two largest units: `1h30m`, `12.3s`, `500ms`."""
    if 0 < seconds < 0.9995:
        return f"{_short(seconds * 1000)}ms"
    if seconds < 59.95:
        return f"{_short(seconds)}s"
    step = 1 if seconds < 3599.5 else 60 if seconds < 86370 else 3600
    rest = round(seconds / step) * step
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, int(_SECONDS[unit]))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _short(number: float) -> str:
    """Round to one decimal and drop a trailing zero."""
    return f"{number:.1f}".removesuffix(".0")


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, one or many."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
