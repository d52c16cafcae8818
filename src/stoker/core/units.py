"""Parse and format sizes and durations in human units: `200Gi`, `1.5GB`, `1h30m`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, Self

from stoker.errors import Fault, InputError

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
# Only `k` may be upper or lower case: in a Kubernetes quantity `m` means milli, so guessing would be off by 10^9.
_SIZE = re.compile(rf"(?P<number>(?:{_NUMBER})(?:[eE][+-]?\d{{1,2}})?)\s*(?P<prefix>[kKMGTP]?)(?P<binary>i?)[bB]?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_MAX_BYTES = 2**63 - 1
MIN_SIZE_BYTES = 2**20

_UNIT_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"\s*".join(rf"(?:(?P<{unit}>{_NUMBER})\s*{unit})?" for unit in _UNIT_SECONDS))
_PLAIN_SECONDS = re.compile(rf"(?:{_NUMBER})(?:[eE][+-]?\d{{1,2}})?")


class Bytes(int):
    """A size in bytes; in settings a number or a string such as `200Gi`."""

    expected: ClassVar[str] = "a size such as 200Gi, 1.5GB or 1048576"

    def __new__(cls, value: str | float) -> Self:
        """Parse a size, see `parse_bytes`."""
        return super().__new__(cls, parse_bytes(value))


class Seconds(float):
    """A duration in seconds; in settings a number or a string such as `1h30m`."""

    expected: ClassVar[str] = "a duration such as 30s, 1h30m or 500ms, or a number of seconds"

    def __new__(cls, value: str | float) -> Self:
        """Parse a duration, see `parse_duration`."""
        return super().__new__(cls, parse_duration(value))


def parse_bytes(value: str | float) -> int:
    """Parse a size: a whole number, or a string with k, M, G, T, P (powers of 1000) or Ki … Pi (powers of 1024)."""
    error = InputError(f"must be {Bytes.expected}, got {value!r}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None or (match["binary"] and not match["prefix"]):
            raise error
        size = Decimal(match["number"]) * (1024 if match["binary"] else 1000) ** _POWERS[match["prefix"]]
        # 1.1GiB is accepted although it is not a whole number of bytes; 1.5 bytes is a mistake.
        is_whole = bool(match["prefix"]) or size == int(size)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        size = Decimal(value)
        is_whole = size == int(size)
    else:
        raise error
    if not is_whole or not 0 <= size <= _MAX_BYTES:
        raise error
    return int(size)


def format_bytes(size: float) -> str:
    """Format a size for humans, in powers of 1024: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        text = f"{_round(size)} {unit}"
        if round(size, 1) < 1024:
            break
        size /= 1024
    return text


def check_min_size(key: str, size: int | None) -> Iterator[Fault]:
    """Yield a fault for a size of less than 1 MiB: its unit was forgotten."""
    if size is not None and size < MIN_SIZE_BYTES:
        example = f"{size}Gi" if 0 < size < 1024 else "8Gi"
        yield Fault(key, f"must be >= 1 MiB, got {format_bytes(size)}; add a unit, for example {example}")


def parse_duration(value: str | float) -> float:
    """Parse a duration in seconds: a number, or a string with d, h, m, s, ms in this order."""
    seconds = math.nan
    if isinstance(value, str):
        text = value.strip()
        if _PLAIN_SECONDS.fullmatch(text):
            seconds = float(text)
        elif text and (match := _DURATION.fullmatch(text)):
            seconds = sum(float(number) * _UNIT_SECONDS[unit] for unit, number in match.groupdict("0").items())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise InputError(f"must be {Seconds.expected}, got {value!r}")
    return seconds


def parse_age(text: str) -> float:
    """Parse a duration that selects what is deleted: a number without a unit is refused, not taken as seconds."""
    is_plain = _PLAIN_SECONDS.fullmatch(text.strip())
    with suppress(InputError):
        if not is_plain:
            return parse_duration(text)
    raise InputError(f"must be a duration with a unit, for example 30d or 12h, got {text!r}")


def parse_since(text: str) -> float:
    """Parse the start of a period, as a timestamp: a duration before now, or a date and time, local by default."""
    try:
        return time.time() - parse_duration(text)
    except InputError:
        pass
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError as error:
        raise InputError(f"must be a duration such as 10m or a time such as 2030-01-31T18:00, got {text!r}") from error


def format_duration(seconds: float) -> str:
    """Format a duration for humans, in its two largest units: `1h30m`, `12.3s`, `500ms`."""
    if 0 < seconds < 0.9995:
        return f"{_round(seconds * 1000)}ms"
    if seconds < 59.95:
        return f"{_round(seconds)}s"
    step = 1 if seconds < 3599.5 else 60 if seconds < 86370 else 3600
    rest = round(seconds / step) * step
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, int(_UNIT_SECONDS[unit]))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _round(number: float) -> str:
    """Round to one decimal place, without a trailing zero."""
    return f"{number:.1f}".removesuffix(".0")


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun, singular or plural: `1 shard`, `2 shards`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def to_unit(unit: type, value: Any) -> object:
    """Decode a `Bytes` or `Seconds` (a `dec_hook` of msgspec)."""
    if issubclass(unit, Bytes | Seconds):
        return unit(value)
    raise NotImplementedError(f"no decoder for {unit}")


def to_number(value: object) -> int | float:
    """Encode a `Bytes` or `Seconds` as a plain number (an `enc_hook` of msgspec)."""
    if isinstance(value, Bytes):
        return int(value)
    if isinstance(value, Seconds):
        return float(value)
    raise NotImplementedError(f"no encoder for {type(value)}")
