"""`stoker doctor`: preflight checks of a machine, and of a job on its target."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import Hosts, Json, Sets
from stoker.cli.output import print_json, print_message, print_table
from stoker.errors import InputError, JobFailedError, MissingError, StokerError, UnavailableError
from stoker.jobs.targets import LOCAL

if TYPE_CHECKING:
    from stoker.doctor.checks import Check

MARKS = {True: "✓", False: "✗", None: "–"}
MAX_PASSED_ROWS = 4
"""Rows shown for one check that passed with different values on different hosts."""
MAX_HOSTS = 3
PRECEDENCE: tuple[type[StokerError], ...] = (UnavailableError, InputError, MissingError, JobFailedError)
"""Error classes in the order in which they decide the exit code, when several checks fail."""


def doctor(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Job file. Defaults to a small test job.")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="TARGET",
            help="Where the job will run: local, ssh, slurm, ray[://host:port] or k8s[://context/namespace].",
        ),
    ] = None,
    hosts: Hosts = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Find problems that would make a job fail or run slowly.

    Suggests a fix for each problem. Without options, checks this machine. With --on, checks all hosts of a job and the
    network between them, and runs a small probe job there that reads the data and performs an all-reduce. On
    Kubernetes, checks permissions, capacity, quota, claims and every object that the job references, and pulls its
    image in a small pod.
    """
    if file is None and on is None and hosts is None and not sets:
        _check_this_machine(as_json)
        return
    on = on or LOCAL
    from stoker.api import host_overrides
    from stoker.doctor.run import default_job, run_doctor
    from stoker.jobs.run_lookup import open_launcher
    from stoker.jobs.spec import load_job

    launcher, (name, _, address) = open_launcher(on), on.partition("://")
    overrides = [*(sets or []), *host_overrides(on, hosts)]
    job = default_job(name, address, overrides) if file is None else load_job(file, overrides)
    if name == "k8s":
        from stoker.doctor.kubernetes.collect import check_kubernetes_job
        from stoker.kube.config import KubeTarget

        checks = check_kubernetes_job(job, KubeTarget.parse(address), print_message, is_given=file is not None)
    else:
        checks = run_doctor(job, launcher, address, print_message)
    if as_json:
        print_json([_to_dict(check) for check in checks])
    else:
        for line in format_checks(checks, shutil.get_terminal_size((120, 24)).columns):
            typer.echo(line)
    raise_for_checks(checks)


def _check_this_machine(as_json: bool) -> None:
    from stoker.doctor.checks import check_machine

    checks = check_machine()
    if as_json:
        print_json([_to_dict(check) for check in checks])
    else:
        print_table(("", "check", "result", "fix"), [(MARKS[c.fine], c.what, c.found, c.fix) for c in checks])
    if failed := [check.what for check in checks if check.fine is False]:
        raise MissingError(f"checks failed: {', '.join(failed)}")


def _to_dict(check: Check) -> dict[str, object]:
    return {name: value for name, value in check._asdict().items() if name != "code"}


def raise_for_checks(checks: Sequence[Check]) -> None:
    """Raise the error of the failed check that takes precedence, naming every failed check."""
    failed = [check for check in checks if check.fine is False]
    if not failed:
        return
    kind = next(kind for kind in PRECEDENCE if kind.exit_code in {check.code for check in failed})
    hosts: dict[str, list[str]] = {}
    for check in failed:
        hosts.setdefault(check.what, []).extend([check.host] if check.host else [])
    names = [f"{what} ({', '.join(dict.fromkeys(where))})" if where else what for what, where in hosts.items()]
    skipped = sum(check.fine is None and not check.fix for check in checks)
    note = f" ({skipped} skipped)" if skipped else ""
    raise kind(f"{len(failed)} of {len(checks) - skipped} checks failed{note}: {', '.join(names)}")


def format_checks(checks: Sequence[Check], width: int) -> Iterator[str]:
    """Yield the lines of a table of checks: hosts with equal results are grouped, a fix follows what failed."""
    total = len({check.host for check in checks if check.host})
    rows = [row for what in dict.fromkeys(check.what for check in checks) for row in _rows(checks, what, total)]
    what_width = max(len(what) for _, what, _, _, _ in rows)
    hosts_width = max(len(hosts) for _, _, hosts, _, _ in rows)
    indent = 4 + what_width + (2 + hosts_width if hosts_width else 0)
    for mark, what, hosts, found, fix in rows:
        head = f"{mark} {what.ljust(what_width)}  " + (f"{hosts.ljust(hosts_width)}  " if hosts_width else "")
        yield from _wrap(found, width, head, " " * indent)
        if fix:
            yield from _wrap(fix, width, " " * indent + "→ ", " " * (indent + 2))


def _rows(checks: Sequence[Check], what: str, total: int) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of one check, hosts grouped by result."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for check in checks:
        if check.what == what:
            mark = "!" if check.fine is None and check.fix else MARKS[check.fine]
            groups.setdefault((mark, check.found, check.fix), []).append(check.host)
    fine = [key for key in groups if key[0] == MARKS[True]]
    hidden = fine[MAX_PASSED_ROWS:] if len(fine) > MAX_PASSED_ROWS + 1 else []
    rows = [
        (mark, what, _format_hosts(hosts, total), found, fix)
        for (mark, found, fix), hosts in groups.items()
        if (mark, found, fix) not in hidden
    ]
    if hidden:
        rows.append((MARKS[True], what, f"{len(hidden)} more", "passed; show all with --json", ""))
    return rows


def _format_hosts(hosts: Sequence[str], total: int) -> str:
    names = list(dict.fromkeys(host for host in hosts if host))
    if len(names) == total > 1:
        return f"all {total}"
    if len(names) > MAX_HOSTS:
        return f"{', '.join(names[: MAX_HOSTS - 1])} + {len(names) - MAX_HOSTS + 1}"
    return ", ".join(names)


def _wrap(text: str, width: int, first: str, rest: str) -> list[str]:
    """Wrap a text; leave it unwrapped where fewer than 20 columns are left."""
    if width - len(rest) < 20:
        return [f"{first}{text}"]
    options = {"width": width, "initial_indent": first, "subsequent_indent": rest}
    return textwrap.wrap(text, break_long_words=False, break_on_hyphens=False, **options) or [first.rstrip()]  # type: ignore[arg-type]
