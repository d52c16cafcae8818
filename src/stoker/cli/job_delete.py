"""`stoker job delete`: delete the folders of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import Json, parse_value
from stoker.cli.output import format_time, print_json, print_message, print_table

if TYPE_CHECKING:
    from stoker.jobs.run_folder import RunFolder
    from stoker.launchers.run_deletion import RunDeletion


def add_to(app: typer.Typer) -> None:
    """Add this command to `stoker job`."""
    app.command()(delete)


def delete(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Run ID (or a unique prefix), handle, or job name.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Delete all runs that finished more than this long ago, for example 30d or 12h."
        ),
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all", help="Delete all finished runs of the jobs that RUN names.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted without deleting it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete finished runs with their logs and checkpoints.

    Runs that are still running are never deleted. Checkpoints in the run folder (the default) are deleted with it; a
    checkpoint.dir elsewhere is kept.
    """
    from dataclasses import asdict

    from stoker.launchers.run_deletion import delete_run

    deletions = _plan_deletions(
        _select_runs(names or [], older_than, all_runs), skip=all_runs or older_than is not None
    )
    if not as_json:
        _print_deletions(deletions)
    for deletion in () if dry_run else deletions:
        delete_run(deletion)
    if as_json:
        print_json([{**asdict(deletion), "deleted": not dry_run} for deletion in deletions])
    print_message(_summarize(deletions, dry_run))


def _select_runs(names: list[str], older_than: str | None, all_runs: bool) -> list[RunFolder]:
    """Return the runs that the arguments select."""
    from stoker.core.units import parse_age
    from stoker.errors import InputError
    from stoker.jobs.run_lookup import list_runs_of, resolve_exact_run
    from stoker.launchers.run_deletion import find_expired

    if names and older_than is not None:
        raise InputError("RUN cannot be combined with --older-than", hint="pass one of them")
    if not names and older_than is None:
        raise InputError("specify a RUN or --older-than", hint="list runs with: stoker job list")
    if older_than is not None and all_runs:
        raise InputError("--all cannot be combined with --older-than", hint="pass one of them")
    if older_than is not None:
        return find_expired(parse_value("--older-than", parse_age, older_than))
    if all_runs:
        return list(dict.fromkeys(run for name in names for run in list_runs_of(name)))
    return list(dict.fromkeys(map(resolve_exact_run, names)))


def _plan_deletions(runs: Sequence[RunFolder], *, skip: bool) -> list[RunDeletion]:
    """Return what to delete; skip what cannot be deleted, or raise ConflictError for it before any is deleted."""
    from stoker.errors import ConflictError, NotFoundError
    from stoker.launchers.run_deletion import find_checkpoint_users, plan_deletion

    deletions, reasons, users = [], [], find_checkpoint_users()
    for run in runs:
        try:
            deletions.append(plan_deletion(run, users))
        except ConflictError as error:
            reasons.append(str(error))
        except NotFoundError:  # another process has deleted it meanwhile
            if not skip:
                raise
    if reasons and not skip:
        raise ConflictError("; ".join(reasons))
    for reason in reasons:
        print_message(f"Skipped: {reason}")
    return deletions


def _print_deletions(deletions: Sequence[RunDeletion]) -> None:
    from stoker.core.text import join_some
    from stoker.core.units import format_bytes

    if not deletions:
        return
    print_table(
        ("run", "state", "finished", "size", "checkpoints", "not deleted"),
        [
            (
                deletion.run,
                str(deletion.state),
                format_time(deletion.ended),
                format_bytes(deletion.bytes),
                len(deletion.checkpoints),
                "; ".join(deletion.kept) or "–",
            )
            for deletion in deletions
        ],
    )
    for deletion in deletions:
        if deletion.users:
            print_message(f"The checkpoints of {deletion.run} are also those of {join_some(deletion.users)}")


def _summarize(deletions: Sequence[RunDeletion], dry_run: bool) -> str:
    from stoker.core.units import format_bytes, pluralize

    if not deletions:
        return "Nothing to delete"
    checkpoints = sum(len(deletion.checkpoints) for deletion in deletions)
    size = format_bytes(sum(deletion.bytes for deletion in deletions))
    verb = "Would delete" if dry_run else "Deleted"
    return f"{verb} {pluralize(len(deletions), 'run')} with {pluralize(checkpoints, 'checkpoint')} ({size})"
