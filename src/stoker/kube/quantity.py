"""Kubernetes resource quantities: parse and format `100m`, `16Gi`, `1e3`, `8`.

lightkube's parser is not used: it rejects `100n`, `5u` and `12E6`, which are valid in Kubernetes, and rounds up to
thousandths.
"""

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
    """Parse a quantity; raise ValueError if it is malformed."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity")
    number, power, unit = match.groups()
    return Decimal(number) * (Decimal(f"1e{power}") if power else _FACTORS[unit])


def quantity_to_bytes(text: object) -> int | None:
    """Return a quantity in bytes, rounded up; None if it is malformed."""
    try:
        return math.ceil(parse_quantity(str(text)))
    except ValueError:
        return None


def format_quantity(size: int) -> str:
    """Format bytes as the shortest exact quantity with a binary suffix, such as `10Gi`."""
    for unit, factor in reversed(_BINARY.items()):
        if size and size % int(factor) == 0:
            return f"{size // int(factor)}{unit}"
    return str(size)
