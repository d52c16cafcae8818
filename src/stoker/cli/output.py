"""What commands print: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

LOG_EVERY_S = 30.0


def remark(text: str) -> None:
    """Tell the user something beside the result."""
    typer.echo(text, err=True)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    from stoker.core.spec import to_json

    typer.echo(to_json(value).decode(), nl=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headings; numbers go to the right."""
    cells = [columns, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [all(isinstance(row[i], int | None) for row in rows) for i in range(len(columns))]
    for row in cells:
        words = zip(row, widths, right, strict=True)
        line = "  ".join(word.rjust(width) if numeric else word.ljust(width) for word, width, numeric in words)
        typer.echo(line.rstrip())


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def counter(label: str) -> Iterator[Callable[[int], None]]:
    """Show a running count of things found, when someone is watching."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,}"))
    with Progress(*columns, console=_stderr(), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count: bar.advance(task, count)


@contextmanager
def byte_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes with rate and time left; into a log, a line now and then."""
    if not sys.stderr.isatty():
        yield _LogLines(label, total).advance
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_stderr(), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


class _LogLines:
    """Progress for a log: one line every half minute, from whichever thread comes by."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._lock = threading.Lock()
        self._next = time.monotonic() + LOG_EVERY_S

    def advance(self, count: int) -> None:
        from stoker.core.units import format_bytes

        with self._lock:
            self._done += count
            if time.monotonic() < self._next:
                return
            self._next += LOG_EVERY_S
        share = min(99, 100 * self._done // max(1, self._total))
        remark(f"{self._label}: {share} %, {format_bytes(self._done)} of about {format_bytes(self._total)}")


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
