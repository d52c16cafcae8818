"""Options and arguments that several commands share, and the checks of their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print the output as JSON.")]
JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="Job file; `-` reads standard input.")]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Where to run the job: local, ssh, slurm, ray[://host:port] or k8s[://context/namespace].",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="HOSTS",
        help="With --on ssh or --on ray: comma-separated hosts (HOST:N runs N workers on HOST), or @FILE to read them "
        "from a file. With --on ray, a Ray cluster is started on them for the run.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key in the job file, for example resources.gpu=4. Repeatable."
    ),
]
RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Run ID (or a unique prefix), handle, or job name. Defaults to the latest run."),
]
RunTarget = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Cluster that holds the run: k8s[://context/namespace]. Also finds other users' runs.",
    ),
]
Url = Annotated[str, typer.Argument(metavar="URL", help="Shard set, or brace pattern that matches shards.")]
Jobs = Annotated[str, typer.Option(metavar="N", help="Number of threads; `auto` uses one per core.")]


def parse_value(option: str, parse: Callable[[str], T], text: str) -> T:
    """Parse the value of an option; an error names the option."""
    from stoker.errors import InputError

    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option} {error.what}", hint=error.hint) from error


@contextmanager
def name_options(options: Mapping[str, str], defaults: Collection[str] = ()) -> Iterator[None]:
    """Report the faults of settings as faults of the options that set them: `--world-size must be >= 1, got 0`."""
    from stoker.errors import Fault, SpecError

    try:
        yield
    except SpecError as error:
        faults = [
            Fault("", f"{options[fault.path]} {fault.what}{' (the default)' if fault.path in defaults else ''}")
            if fault.path in options
            else fault
            for fault in error.faults
        ]
        raise SpecError(faults, where=error.where, hint=error.hint) from error


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether a parameter was passed on the command line, instead of its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def parse_threads(text: str, option: str = "--jobs") -> int:
    """Return the number of threads that an option names; `auto` is one per usable core."""
    from stoker.errors import InputError

    if text == "auto":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise InputError(f"{option} must be `auto` or an integer between 1 and 1024, got {text!r}")
    return int(text)
