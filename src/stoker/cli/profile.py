"""`stoker profile`: sample what a machine does while a program runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False}
"""Everything after the program's name belongs to the program, options included."""


def profile(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Program to run, with its arguments.")],
    every: Annotated[str, typer.Option(metavar="DURATION", help="Sampling interval; 0 only runs the program.")] = "30s",
) -> None:
    """Run a program and sample GPU, CPU, memory, network and disk.

    Samples are event lines on standard output. The program keeps its standard streams, signals and exit code.
    """
    from stoker.core.units import parse_duration
    from stoker.telemetry import profiler

    seconds = parse_duration(every)
    sys.stdout.flush()
    # Started by path and without `site`: it needs only the standard library, and starts in milliseconds.
    os.execv(sys.executable, [sys.executable, "-I", "-S", profiler.__file__, "--every", repr(seconds), "--", *command])
