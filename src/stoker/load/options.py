"""Check the options of the loader, and report every invalid one at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import SupportsIndex

from stoker.core.units import parse_bytes
from stoker.errors import Fault, InputError
from stoker.load.native import DECODERS
from stoker.load.transforms import MAX_SIZE, TRANSFORMS

LAYOUTS = ("NHWC", "NCHW")


def integer_faults(required: Mapping[str, object], optional: Mapping[str, object], rank: object) -> list[Fault]:
    """Return a fault for each option that must be an integer and is not, such as a string from the environment."""
    options = {**required, **{name: value for name, value in optional.items() if value is not None}}
    faults = [
        Fault(name, f"must be an integer, got {value!r}") for name, value in options.items() if not _is_int(value)
    ]
    if rank is not None and not (isinstance(rank, tuple) and len(rank) in (2, 3) and all(map(_is_int, rank))):
        faults.append(Fault("rank", f"must be a tuple of integers (rank, world size), got {rank!r}"))
    return faults


def option_faults(
    transform: object, size: int, layout: str, prefetch: int, threads: int | None, max_bad: float, decoder: str
) -> list[Fault]:
    """Return a fault for each option whose value is out of range or unknown."""
    checks = {
        "transform": (
            transform is None or callable(transform) or transform in TRANSFORMS,
            f"must be one of {', '.join(TRANSFORMS)}, a function or None, got {transform!r}",
        ),
        "size": (1 <= size <= MAX_SIZE, f"must be between 1 and {MAX_SIZE}, got {size}"),
        "layout": (
            layout in LAYOUTS and not (layout != LAYOUTS[0] and not isinstance(transform, str)),
            f"must be one of {', '.join(LAYOUTS)}, got {layout!r}"
            if layout not in LAYOUTS
            else "applies to built-in transforms only: the results of a function are stacked as is",
        ),
        "decoder": (
            decoder in DECODERS and not (decoder == "native" and not isinstance(transform, str)),
            f"must be one of {', '.join(DECODERS)}, got {decoder!r}"
            if decoder not in DECODERS
            else "the native decoder supports built-in transforms only, not a function or None; use python",
        ),
        "prefetch": (prefetch >= 1, f"must be >= 1, got {prefetch}"),
        "threads": (threads is None or threads >= 1, f"must be >= 1, got {threads}"),
        "max_bad": (
            isinstance(max_bad, int | float) and 0 <= max_bad <= 1,
            f"must be between 0 and 1, got {max_bad}",
        ),
    }
    return [Fault(path, what) for path, (is_valid, what) in checks.items() if not is_valid]


def parse_cache_size(size: int | str | None) -> tuple[int | None, list[Fault]]:
    """Return the size limit of the cache in bytes, by default from STOKER_CACHE_SIZE; None means no limit."""
    name = "cache_size" if size is not None else "STOKER_CACHE_SIZE"
    size = size if size is not None else os.environ.get(name) or None
    try:
        return None if size is None else parse_bytes(size), []
    except InputError as error:
        return None, [Fault(name, error.what)]


def _is_int(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)
