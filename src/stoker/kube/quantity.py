"""Amounts as Kubernetes writes them: `100m`, `16Gi`, `1e3`, `8`."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE]?))")
_BINARY = {f"{unit}i": Decimal(2 ** (10 * power)) for power, unit in enumerate("KMGTPE", 1)}
_FACTORS = {
    **{unit: Decimal(f"1e{3 * power}") for power, unit in enumerate(["n", "u", "m", "", *"kMGTPE"], -3)},
    **_BINARY,
}


def parse_quantity(text: str | float) -> Decimal:
    """Read an amount; all that a cluster tells is text."""
    found = _QUANTITY.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, power, unit = found.groups()
    return Decimal(number) * (Decimal(f"1e{power}") if power else _FACTORS[unit])


def quantity_to_bytes(text: object) -> int | None:
    """Read a size, in whole bytes; None: it is none."""
    try:
        return math.ceil(parse_quantity(str(text)))
    except ValueError:
        return None


def format_quantity(size: int) -> str:
    """Write a size as people would: `10Gi` and not its bytes, where that is the same."""
    for unit, factor in reversed(_BINARY.items()):
        if size and size % int(factor) == 0:
            return f"{size // int(factor)}{unit}"
    return str(size)
