"""`stoker doctor`: what would fail, before it burns hours."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.cli.output import print_json, print_table
from stoker.errors import MissingError

MARKS = {True: "✓", False: "✗", None: "–"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Look at this machine, and say what would fail or be slow, and how to mend it."""
    from stoker.doctor.checks import check_machine

    checks = check_machine()
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        print_table(("", "what", "found", "fix"), [(MARKS[c.fine], c.what, c.found, c.fix) for c in checks])
    if failed := [check.what for check in checks if check.fine is False]:
        raise MissingError(f"not as it should be: {', '.join(failed)}")
