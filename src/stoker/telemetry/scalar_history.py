"""The last values of a scalar, by time: every value of late, and ever fewer of the past."""

from __future__ import annotations

import math
from bisect import insort
from typing import NamedTuple

_LIMIT = 512
_RECENT = 64


class ScalarPoint(NamedTuple):
    """One report of a scalar; sorted by attempt and time."""

    attempt: int
    t: float
    seq: int
    step: float | None
    value: float

    @property
    def order(self) -> tuple[int, float, int]:
        """The sort key."""
        return self.attempt, self.t, self.seq


def add_point(points: list[ScalarPoint], point: ScalarPoint) -> None:
    """Insert a point in order; if there are too many, drop every second old one.

    Points where the value becomes finite, NaN or infinite stay.
    """
    insort(points, point, key=lambda one: one.order)
    if len(points) > _LIMIT:
        old, recent = points[:-_RECENT], points[-_RECENT:]
        points[:] = [one for number, one in enumerate(old) if number % 2 == 0 or _is_change(old, number)] + recent


def _is_change(points: list[ScalarPoint], number: int) -> bool:
    return math.isfinite(points[number].value) != math.isfinite(points[number - 1].value)


def last_up_to(points: list[ScalarPoint], step: float | None) -> float | None:
    """Return the last value up to a step: after a restart, a value of a later step is that of an earlier attempt."""
    for point in reversed(points):
        if step is None or (point.step or 0.0) <= step:
            return point.value
    return None
