"""Amounts as Kubernetes writes them: `100m`, `16Gi`, `1e3`, `8`."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkKMGTPE]?)(i?)")
_POWERS = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def quantity(text: str | float) -> Decimal:
    """Read an amount; all that a cluster tells is text."""
    found = _QUANTITY.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, prefix, binary = found.groups()
    return Decimal(number) * Decimal(1024 if binary else 1000) ** _POWERS[prefix]
