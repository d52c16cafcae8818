"""Output of commands: results on standard output, messages and progress on standard error."""

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


def print_message(text: str) -> None:
    """Print a message beside the result, on standard error."""
    typer.echo(text, err=True)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    from stoker.core.spec import to_json

    typer.echo(to_json(value).decode(), nl=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, err: bool = False) -> None:
    """Print rows under column headings, on standard error with `err`; numeric columns are right-aligned."""
    cells = [columns, *([_format_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    is_numeric = [all(isinstance(row[i], int | None) for row in rows) for i in range(len(columns))]
    for row in cells:
        padded = [
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(row, widths, is_numeric, strict=True)
        ]
        typer.echo("  ".join(padded).rstrip(), err=err)


def format_time(timestamp: float) -> str:
    """Return a timestamp in local time, to the minute; a dash for 0."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp)) if timestamp else "–"


def _format_cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def show_counter(label: str) -> Iterator[Callable[[int], None]]:
    """Show a running count on a terminal; show nothing in a log."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed:,}"))
    with Progress(*columns, console=_stderr(), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda count: progress.advance(task, count)


@contextmanager
def show_byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar with rate and time left on a terminal; in a log, one line every half minute."""
    if not sys.stderr.isatty():
        yield _ProgressLog(label, total).advance
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_stderr(), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


class _ProgressLog:
    """Progress for a log file: one line every `LOG_EVERY_S`; thread-safe."""

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
        percent = min(99, 100 * self._done // max(1, self._total))
        print_message(f"{self._label}: {percent}%, {format_bytes(self._done)} of about {format_bytes(self._total)}")


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
