"""`stoker profile`: run a program, sample what the machine does meanwhile, and summarize it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from stoker.cli.options import parse_value
from stoker.cli.output import print_message, print_table

SETTINGS = {"allow_interspersed_args": False}
"""Everything after the program's name belongs to the program, options included."""


def profile(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="Program to run, and its arguments.")],
    every: Annotated[str, typer.Option(metavar="DURATION", help="Sampling interval; 0 disables sampling.")] = "30s",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write each sample to standard output as an event line, without a summary.")
    ] = False,
) -> None:
    """Run a program and sample its GPU, CPU, memory and I/O usage.

    Prints a summary to standard error at the end. The program's standard streams, signals and exit code are passed
    through.
    """
    from stoker.core.units import parse_duration

    seconds = parse_value("--every", parse_duration, every)
    sys.stdout.flush()
    if as_json or "STOKER_RUN" in os.environ:
        _replace_with_profiler(command, seconds)
    raise typer.Exit(_run_with_summary(command, seconds))


def _replace_with_profiler(command: list[str], every_s: float) -> NoReturn:
    """Become the profiler, which writes events, as a job needs them."""
    from stoker.remote import profiler

    # Started by path and without `site`: it needs only the standard library, and starts in milliseconds.
    os.execv(sys.executable, [sys.executable, "-I", "-S", profiler.__file__, "--every", repr(every_s), "--", *command])


def _run_with_summary(command: list[str], every_s: float) -> int:
    """Run the program, print means and peaks of its samples, and return its exit code."""
    from stoker.remote import profiler
    from stoker.telemetry.profile_summary import ProfileSummary

    summary = ProfileSummary()
    code = profiler.run(command, every_s, summary)
    if summary.sentence:
        print_message(f"stoker profile: {summary.sentence}")
    if summary.rows:
        print_table(("metric", "mean", "peak"), summary.rows, err=True)
    return code
