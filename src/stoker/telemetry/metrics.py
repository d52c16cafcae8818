"""Metrics table: the scalars of a run as rows, one for each step that a rank reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from stoker.telemetry.events import Event

COLUMNS = ("time", "slot", "rank", "attempt", "step")
"""Columns that every row has, in this order."""
MetricsRow: TypeAlias = dict[str, float | str]
"""The columns that every row has, and each scalar under its name."""


def build_table(events: Iterable[Event]) -> list[MetricsRow]:
    """Return one row per attempt, rank and step, in order of time; a scalar that was not reported there is absent."""
    rows: dict[tuple[int, str, int, int], MetricsRow] = {}
    for event in sorted(events, key=lambda event: event.t):
        name, value, step = (event.fields.get(key) for key in ("name", "value", "step"))
        if event.kind != "scalar" or not isinstance(name, str) or not isinstance(value, int | float):
            continue
        if not isinstance(step, int):
            continue
        row = rows.setdefault(
            (event.attempt, event.slot, event.rank, step),
            {"time": event.t, "slot": event.slot, "rank": event.rank, "attempt": event.attempt, "step": step},
        )
        if name not in COLUMNS:
            row[name] = value
    return list(rows.values())
