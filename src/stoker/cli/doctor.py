"""`stoker doctor`: what would fail, before it burns hours."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.job import HERE, Hosts, Sets, launcher_at, with_hosts
from stoker.cli.output import print_json, print_table, remark
from stoker.errors import InputError, JobFailedError, MissingError, StokerError, UnavailableError

if TYPE_CHECKING:
    from stoker.doctor.checks import Check

MARKS = {True: "✓", False: "✗", None: "–"}
SHOWN = 4
"""Of rows about the same that are all fine, but not alike."""
NAMED = 3
WEIGHTIEST: tuple[type[StokerError], ...] = (UnavailableError, InputError, MissingError, JobFailedError)
"""Whose exit code it is, when checks of several kinds fail."""


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A job file; a small job of its own if absent.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="PLACE",
            help="Where the job is to run: local, ssh, ray[://host:port] or k8s[://context/namespace].",
        ),
    ] = None,
    hosts: Hosts = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what would fail or be slow, and how to mend it.

    Alone, it looks at this machine. With --on it looks at all hosts of a job and between them, and sends a small job
    there that reads the data and adds up tensors. In a Kubernetes cluster it looks at rights, room, quota, claims and
    all that the job names, and has a small pod pull its image.
    """
    if file is None and on is None and hosts is None and not sets:
        _this_machine(as_json)
        return
    on = on or HERE
    from stoker.doctor.run import default_job, examine
    from stoker.jobs.spec import load_job

    launcher, (name, _, place) = launcher_at(on), on.partition("://")
    given = with_hosts(on, sets, hosts)
    job = default_job(name, place, given) if file is None else load_job(file, given)
    if name == "k8s":
        from stoker.doctor.kubernetes.collect import examine_cluster
        from stoker.kube.config import Place

        checks = examine_cluster(job, Place.parse(place), remark, is_given=file is not None)
    else:
        checks = examine(job, launcher, place, remark)
    if as_json:
        print_json([_plain(check) for check in checks])
    else:
        for line in table(checks, shutil.get_terminal_size((120, 24)).columns):
            typer.echo(line)
    _raise(checks)


def _this_machine(as_json: bool) -> None:
    from stoker.doctor.checks import check_machine

    checks = check_machine()
    if as_json:
        print_json([_plain(check) for check in checks])
    else:
        print_table(("", "what", "found", "fix"), [(MARKS[c.fine], c.what, c.found, c.fix) for c in checks])
    if failed := [check.what for check in checks if check.fine is False]:
        raise MissingError(f"not as it should be: {', '.join(failed)}")


def _plain(check: Check) -> dict[str, object]:
    return {name: value for name, value in check._asdict().items() if name != "code"}


def _raise(checks: Sequence[Check]) -> None:
    """Fail by the weightiest class of what is not fine."""
    failed = [check for check in checks if check.fine is False]
    if not failed:
        return
    kind = next(kind for kind in WEIGHTIEST if kind.exit_code in {check.code for check in failed})
    hosts: dict[str, list[str]] = {}
    for check in failed:
        hosts.setdefault(check.what, []).extend([check.host] if check.host else [])
    names = [f"{what} ({', '.join(dict.fromkeys(where))})" if where else what for what, where in hosts.items()]
    raise kind(f"{len(failed)} of {len(checks)} checks failed: {', '.join(names)}")


# --- The table


def table(checks: Sequence[Check], width: int) -> Iterator[str]:
    """Write checks as rows, hosts with the same outcome together, and a fix below what needs one."""
    total = len({check.host for check in checks if check.host})
    rows = [row for what in dict.fromkeys(check.what for check in checks) for row in _rows(checks, what, total)]
    whats = max(len(what) for _, what, _, _, _ in rows)
    places = max(len(hosts) for _, _, hosts, _, _ in rows)
    indent = 4 + whats + (2 + places if places else 0)
    for mark, what, hosts, found, fix in rows:
        head = f"{mark} {what.ljust(whats)}  " + (f"{hosts.ljust(places)}  " if places else "")
        yield from _wrapped(found, width, head, " " * indent)
        if fix:
            yield from _wrapped(fix, width, " " * indent + "→ ", " " * (indent + 2))


def _rows(checks: Sequence[Check], what: str, total: int) -> list[tuple[str, str, str, str, str]]:
    """Group the checks of one name by their outcome."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for check in checks:
        if check.what == what:
            mark = "!" if check.fine is None and check.fix else MARKS[check.fine]
            groups.setdefault((mark, check.found, check.fix), []).append(check.host)
    fine = [key for key in groups if key[0] == MARKS[True]]
    hidden = fine[SHOWN:] if len(fine) > SHOWN + 1 else []
    rows = [
        (mark, what, _hosts(hosts, total), found, fix)
        for (mark, found, fix), hosts in groups.items()
        if (mark, found, fix) not in hidden
    ]
    if hidden:
        rows.append((MARKS[True], what, f"{len(hidden)} more", "fine as well; --json has them all", ""))
    return rows


def _hosts(hosts: Sequence[str], total: int) -> str:
    names = list(dict.fromkeys(host for host in hosts if host))
    if len(names) == total > 1:
        return f"all {total}"
    if len(names) > NAMED:
        return f"{', '.join(names[: NAMED - 1])} + {len(names) - NAMED + 1}"
    return ", ".join(names)


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    """Break a text into lines; where hardly any room is left, it is not broken."""
    if width - len(rest) < 20:
        return [f"{first}{text}"]
    room = {"width": width, "initial_indent": first, "subsequent_indent": rest}
    return textwrap.wrap(text, break_long_words=False, break_on_hyphens=False, **room) or [first.rstrip()]  # type: ignore[arg-type]
