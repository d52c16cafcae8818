"""Values in events: numbers that can be trusted, and the events of the last seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from stoker.telemetry.events import Event

MAX_NUMBER = 1e15
"""Numbers of this size and above are not plausible."""


def recent(events: Iterable[Event], last_s: float | None) -> list[Event]:
    """Return the events of the last seconds before the newest one, or all; sorted by attempt and time."""
    ordered = sort_events(events)
    if last_s is None or not ordered:
        return ordered
    since = max(event.t for event in ordered) - last_s
    return [event for event in ordered if event.t >= since]


def sort_events(events: Iterable[Event]) -> list[Event]:
    """Return the events with a plausible time, sorted by attempt and time."""
    valid = (event for event in events if is_plausible_time(event.t))
    return sorted(valid, key=lambda event: (event.attempt, event.t, event.seq))


def is_plausible_time(t: float) -> bool:
    """Whether a time can be that of an event."""
    return abs(t) < MAX_NUMBER


def number(value: Any) -> float | None:
    """Return a finite number of a plausible size, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MAX_NUMBER < value < MAX_NUMBER else None


def number_or_nan(value: Any) -> float | None:
    """Return any number, NaN and infinity included: a broken loss is worth showing."""
    return float(value) if is_nonfinite(value) else number(value)


def is_nonfinite(value: Any) -> bool:
    """Whether a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"
