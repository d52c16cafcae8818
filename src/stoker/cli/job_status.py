"""`stoker job list|status|logs|stop|report`: look at runs and stop them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import Json, RunName, RunTarget, parse_value
from stoker.cli.output import print_json, print_message, print_table
from stoker.cli.runs import (
    describe_run,
    format_elapsed,
    format_progress,
    list_insights,
    print_logs,
    status_to_dict,
)


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker job`."""
    app.command("list")(list_command)
    for command in (status, logs, stop, report):
        app.command()(command)


def list_command(
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of runs.")] = 20,
    on: RunTarget = None,
    as_json: Json = False,
) -> None:
    """List runs of this machine or of a cluster, newest first."""
    from stoker import api
    from stoker.core.units import pluralize

    if on is not None:
        _list_cluster_runs(on, limit, as_json)
        return
    known = api.runs()
    rows = [(run, run.status()) for run in known[:limit]]
    if as_json:
        print_json([{"run": run.id, **status_to_dict(status)} for run, status in rows])
        return
    print_table(
        ("run", "state", "started", "elapsed", "attempts", "message"),
        [
            (
                run.id,
                str(status.state),
                _format_time(status.began),
                format_elapsed(status),
                status.attempt + 1,
                _shorten(status.message),
            )
            for run, status in rows
        ],
    )
    if len(known) > limit:
        print_message(f"… and {pluralize(len(known) - limit, 'older run')}; raise --limit to see more")


def _list_cluster_runs(target: str, limit: int, as_json: bool) -> None:
    """List the runs that a cluster itself knows."""
    from stoker.core.units import format_duration
    from stoker.jobs.run_lookup import open_cluster_launcher

    runs = open_cluster_launcher(target).runs()[:limit]
    if as_json:
        print_json(runs)
        return
    if not runs:
        print_message(f"No runs found in {target}; use k8s://context/namespace for another namespace")
    print_table(
        ("run", "state", "started", "elapsed", "pods"),
        [
            (
                run["run"],
                run["state"],
                run["started"],
                format_duration(run["took_s"]) if run["took_s"] else "–",
                run["pods"],
            )
            for run in runs
        ],
    )


def status(name: RunName = None, on: RunTarget = None, as_json: Json = False) -> None:
    """Show a run's slots, progress, and where its time goes."""
    from stoker.api import Run

    run = Run.find(name, on=on)
    if as_json:
        print_json(describe_run(run))
        return
    current = run.status()
    typer.echo(f"{run.id}: {current.state}, attempt {current.attempt}, {format_elapsed(current)}")
    print_table(
        ("slot", "state", "pid", "exit code"),
        [(slot.slot, str(slot.state), str(slot.pid or "–"), slot.code) for slot in current.slots],
    )
    events = run.events()
    for text in (format_progress(events), current.message, *list_insights(events)):
        if text:
            typer.echo(text)


def logs(
    name: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the run finishes.")] = False,
    slot: Annotated[str | None, typer.Option(metavar="SLOT", help="Show only this slot, for example worker/0.")] = None,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Show only the last N lines.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Show only lines since then: a duration (10m) or a time (2030-01-31T18:00)."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print when each line was written, in UTC, to the second.")
    ] = False,
    on: RunTarget = None,
) -> None:
    """Show or follow the logs of a run."""
    from stoker.api import Run
    from stoker.core.units import parse_since

    start = 0.0 if since is None else parse_value("--since", parse_since, since)
    print_logs(Run.find(name, on=on), slot, follow=follow, tail=tail, since=start, timestamps=timestamps)


def stop(name: RunName = None, on: RunTarget = None) -> None:
    """Stop a run: SIGTERM, a grace period, then SIGKILL.

    With a job name, stops the run of that job that is running; if several are, lists them and stops none.
    """
    from stoker.api import Run
    from stoker.jobs.run_lookup import resolve_run_to_stop

    run = Run(resolve_run_to_stop(name, on).folder)
    before = run.files.read_status().state
    run.stop()  # also a finished run: processes may be left on other machines
    if not before.is_final or before == "lost":
        print_message(f"{run.id}: {run.status().state}")
    else:
        which = "the newest run" if name in (None, run.name) else "run"
        print_message(f"nothing to stop: {which} {run.id} is not running (state: {before})")


def report(
    name: RunName = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Archive to write. Defaults to ./<run>.tar.gz."),
    ] = None,
) -> None:
    """Write logs, plan and status of a run to one archive.

    Secrets are removed.
    """
    from stoker.api import Run
    from stoker.launchers.report import write_report

    run = Run.find(name)
    path = out or Path(f"{run.id}.tar.gz")
    current, events = run.status(), run.events()
    lines = [f"{run.id}: {current.state}", format_progress(events), current.message, *list_insights(events)]
    lines += [f"attempt {attempt.number}: {attempt.cause or 'finished'}" for attempt in current.attempts]
    write_report(run.files, path, "".join(f"{line}\n" for line in lines if line))
    typer.echo(path)


def _format_time(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(timestamp)) if timestamp else "–"


def _shorten(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
