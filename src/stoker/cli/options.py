"""Options and arguments that several commands share, and the checks of their values."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

LOCAL = "local"
T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="Job file; `-` reads standard input.")]
On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Where to run the job: local, ssh, ray[://host:port] or k8s[://context/namespace].",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="HOSTS",
        help="With --on ssh: comma-separated hosts, all of which are used; b:2 runs two workers on b; or @FILE.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file, for example resources.gpu=4."),
]
RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Run ID, unique prefix of it, handle, or job name. Defaults to the latest run."),
]
RunTarget = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Cluster that holds the run: k8s[://context/namespace]. Finds runs of others too.",
    ),
]
Url = Annotated[str, typer.Argument(metavar="URL", help="Shard set, or brace pattern of shards.")]
Jobs = Annotated[str, typer.Option(metavar="N", help="Number of threads; `auto` uses one per core.")]


def parse_value(option: str, parse: Callable[[str], T], text: str) -> T:
    """Parse the value of an option; an error names the option."""
    from stoker.errors import InputError

    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option} {error.what}", hint=error.hint) from error


def parse_threads(text: str, option: str = "--jobs") -> int:
    """Return the number of threads that an option names; `auto` is one per usable core."""
    from stoker.errors import InputError

    if text == "auto":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise InputError(f"{option} must be `auto` or an integer between 1 and 1024, got {text!r}")
    return int(text)
