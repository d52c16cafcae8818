"""Live updates of a run: what its index gained after a position, which is the ID of the last message.

The tables of an index are append-only, so a client that reconnects with the ID of the last message that it received
gets everything after it, once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stoker.dashboard.runs import DashboardRun
from stoker.dashboard.series import to_numbers
from stoker.dashboard.summary import RunRow, describe_row
from stoker.telemetry.run_index import Mark

MAX_ROWS = 5000


class StreamPosition(msgspec.Struct, frozen=True):
    """How much of an index a client has: the generation, the rows of scalars, and the bytes of marks."""

    generation: str
    scalars: int
    marks: int

    @classmethod
    def parse(cls, text: str) -> StreamPosition | None:
        """Parse the ID of a message; None if it is none."""
        generation, _, rest = text.partition(":")
        scalars, _, marks = rest.partition(":")
        if not (scalars.isascii() and scalars.isdecimal() and marks.isascii() and marks.isdecimal()):
            return None
        return cls(generation, int(scalars[:15]), int(marks[:15]))

    def __str__(self) -> str:
        return f"{self.generation}:{self.scalars}:{self.marks}"


class ScalarRow(msgspec.Struct, frozen=True):
    """A scalar that was reported."""

    name: str
    t: float
    step: float
    value: float | None


class Update(msgspec.Struct, frozen=True):
    """A message: the run as it is now, and the scalars and marks since the last message.

    With `is_reset`, the logs were replaced, and everything before does not count.
    """

    run: RunRow
    scalars: list[ScalarRow]
    marks: list[Mark]
    is_reset: bool = False


def current_position(run: DashboardRun) -> StreamPosition:
    """Return the position after everything that is known now."""
    with run.lock:
        index = run.index()
        return StreamPosition(index.generation, index.tables["scalar"].rows, index.marks()[1])


def read_update(run: DashboardRun, position: StreamPosition) -> tuple[Update, StreamPosition]:
    """Return what came after a position, and the position after that."""
    with run.lock:
        index = run.index()
        is_reset = position.generation != index.generation
        first, first_mark = (0, 0) if is_reset else (position.scalars, position.marks)
        table = index.tables["scalar"]
        names, t, step, value = (table.read(column, first)[:MAX_ROWS] for column in ("name", "t", "step", "value"))
        rows = [
            ScalarRow(index.names[name], *numbers)
            for name, *numbers in zip(names.tolist(), t.tolist(), step.tolist(), to_numbers(value), strict=True)
        ]
        marks, after = index.marks(first_mark)
        update = Update(describe_row(run), rows, marks, is_reset)
        return update, StreamPosition(index.generation, min(first, table.rows) + len(rows), max(after, 0))


def format_message(update: Any, position: StreamPosition) -> bytes:
    """Return a server-sent event."""
    return b"id: %b\nevent: update\ndata: %b\n\n" % (str(position).encode(), msgspec.json.encode(update))
