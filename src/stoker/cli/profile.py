"""`stoker profile`: what the machine does while a program runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False}
"""Whatever follows the program's name is the program's, options too."""


def profile(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="The program, with its arguments.")],
    every: Annotated[str, typer.Option(metavar="DURATION", help="How often to look; 0 only runs the program.")] = "30s",
) -> None:
    """Run a program and tell what the machine does: GPU, CPU, memory, network and disk, as events on standard output.

    The program keeps its standard streams, its signals and its exit code.
    """
    from stoker.core.units import parse_duration
    from stoker.telemetry import profiler

    seconds = parse_duration(every)
    sys.stdout.flush()
    # By its path and without site: it needs nothing of ours, and is there in a blink.
    os.execv(sys.executable, [sys.executable, "-I", "-S", profiler.__file__, "--every", repr(seconds), "--", *command])
