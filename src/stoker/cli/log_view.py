"""Print the log lines of a run; on a terminal, progress bars are updated in place."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

import typer

from stoker.cli.output import LOG_EVERY_S

if TYPE_CHECKING:
    from stoker.jobs.launcher import SlotLogLine

_CLEAR_LINE = "\r\x1b[K"


class LogView:
    """Printer of log lines on standard output."""

    def __init__(self, *, slots: bool, timestamps: bool = False) -> None:
        """Print lines with their slots, or their times, in front of them."""
        self._slots, self._timestamps = slots, timestamps
        self._is_terminal = sys.stdout.isatty()
        self._has_partial = False
        self._next_partial_at = time.monotonic() + LOG_EVERY_S

    def print(self, line: SlotLogLine) -> None:
        """Print a line, or the current state of one that is not finished."""
        text = self._format(line)
        if not line.is_partial:
            self.clear()
            typer.echo(text)
        elif self._is_terminal:
            from stoker.telemetry.progress_bars import strip_colours

            width = shutil.get_terminal_size().columns - 1
            typer.echo(_CLEAR_LINE + strip_colours(text)[:width], nl=False)
            self._has_partial = True
        elif time.monotonic() >= self._next_partial_at:
            self._next_partial_at = time.monotonic() + LOG_EVERY_S
            typer.echo(text)

    def clear(self) -> None:
        """Remove the line that is updated in place."""
        if self._has_partial:
            typer.echo(_CLEAR_LINE, nl=False)
            self._has_partial = False

    def _format(self, line: SlotLogLine) -> str:
        prefixes = [f"[{line.slot}] "] * self._slots + [f"{_format_timestamp(line.time)} "] * self._timestamps
        return "".join(prefixes) + line.text


def _format_timestamp(timestamp: float) -> str:
    """Return a timestamp as RFC 3339 in UTC, to the second; `-` if it is not known."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(timestamp)) if timestamp else "-"
