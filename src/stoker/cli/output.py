"""What commands print: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

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


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, one or many."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    from stoker.core.spec import to_json

    typer.echo(to_json(value).decode(), nl=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headings; numbers go to the right, and a pipe is never wrapped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    numeric = [all(isinstance(row[i], int | None) for row in rows) for i in range(len(columns))]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def counter(label: str) -> Iterator[Callable[[int], None]]:
    """Show a running count of things found, when someone is watching."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    console = _stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda count: bar.advance(task, count)


@contextmanager
def byte_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes with rate and time left; into a log, a line now and then."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = _stderr()
    if not console.is_terminal:
        yield _LogLines(label, total).advance
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
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
