"""`stoker job list|status|logs|stacks|stop|report`: look at runs and stop them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import Json, RunName, RunTarget, parse_value
from stoker.cli.output import format_time, print_json, print_message, print_table
from stoker.cli.runs import (
    describe_run,
    format_checkpoints,
    format_elapsed,
    format_progress,
    list_insights,
    print_logs,
    status_to_dict,
)

if TYPE_CHECKING:
    from stoker.jobs.status import JobState


def add_to(app: typer.Typer) -> None:
    """Add these commands to `stoker job`."""
    app.command("list")(list_command)
    for command in (status, logs, stacks, stop, report):
        app.command()(command)


def list_command(
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of runs.")] = 20,
    state: Annotated[
        str | None, typer.Option(metavar="STATES", help="List only runs in these states, for example running,failed.")
    ] = None,
    on: RunTarget = None,
    as_json: Json = False,
) -> None:
    """List the runs on this machine or in a cluster, newest first."""
    from stoker import api
    from stoker.core.units import pluralize

    states = _parse_states(state)
    if on is not None:
        _list_cluster_runs(on, limit, states, as_json)
        return
    known = api.runs()
    matching = ((run, status) for run in known if (status := run.status()).state in states)
    rows = list(islice(matching, limit))
    if as_json:
        print_json([{"run": run.id, **status_to_dict(status)} for run, status in rows])
        return
    print_table(
        ("run", "state", "started", "elapsed", "attempts", "message"),
        [
            (
                run.id,
                str(status.state),
                format_time(status.began),
                format_elapsed(status),
                status.attempt + 1,
                _shorten(status.message),
            )
            for run, status in rows
        ],
    )
    older = max(0, len(known) - limit) if state is None else sum(1 for _ in matching)
    if older:
        print_message(f"… and {pluralize(older, 'older run')}; raise --limit to see more")


def _parse_states(text: str | None) -> Collection[JobState]:
    """Parse the value of --state; all states without one."""
    from stoker.errors import InputError
    from stoker.jobs.status import JobState

    names = list(JobState) if text is None else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in list(JobState)]:
        what = f"--state: unknown state {', '.join(map(repr, unknown))}"
        raise InputError(what, hint=f"states: {', '.join(JobState)}")
    return [JobState(name) for name in names]


def _list_cluster_runs(target: str, limit: int, states: Collection[JobState], as_json: bool) -> None:
    """List the runs that a cluster itself knows."""
    from stoker.core.units import format_duration
    from stoker.jobs.run_lookup import open_cluster_launcher

    runs = [run for run in open_cluster_launcher(target).runs() if run["state"] in states][:limit]
    if as_json:
        print_json(runs)
        return
    if not runs:
        print_message(f"No runs found in {target}; to look in another namespace, pass --on k8s://context/namespace")
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
    """Show a run's slots and progress, and where its time goes."""
    from stoker.api import Run
    from stoker.core.units import pluralize

    run = Run.find(name, on=on)
    if as_json:
        print_json(describe_run(run))
        return
    current = run.status()
    typer.echo(f"{run.id}: {current.state}, {pluralize(current.attempt + 1, 'attempt')}, {format_elapsed(current)}")
    print_table(
        ("slot", "state", "pid", "exit code"),
        [(slot.slot, str(slot.state), str(slot.pid or "–"), slot.code) for slot in current.slots],
    )
    analysis = run.analysis()
    progress, checkpoints = format_progress(analysis, current), format_checkpoints(run, analysis)
    for text in (progress, current.message, checkpoints, *list_insights(analysis, current)):
        if text:
            typer.echo(text)


def logs(
    name: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the run finishes.")] = False,
    slot: Annotated[str | None, typer.Option(metavar="SLOT", help="Show only this slot, for example worker/0.")] = None,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Show only the last N lines.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Show only newer lines: a duration (10m) or a time (2030-01-31T18:00)."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Prefix each line with the time it was written (UTC, to the second).")
    ] = False,
    on: RunTarget = None,
) -> None:
    """Show or follow the logs of a run."""
    from stoker.api import Run
    from stoker.core.units import parse_since

    start = 0.0 if since is None else parse_value("--since", parse_since, since)
    print_logs(Run.find(name, on=on), slot, follow=follow, tail=tail, since=start, timestamps=timestamps)


def stacks(name: RunName = None) -> None:
    """Print the Python stacks of the ranks of a run.

    Ranks print them on SIGUSR1 if they use `stoker.telemetry.recorder()` or `faulthandler.register`. Other processes
    are not signalled.
    """
    from stoker.api import Run
    from stoker.launchers.stack_request import request_stacks

    run = Run.find(name)
    text = request_stacks(run.files)
    typer.echo(text, nl=False)
    if not text:
        print_message(f"{run.id}: no process prints its stacks; call stoker.telemetry.recorder() in the program")


def stop(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Run ID (or a unique prefix), handle, or job name. Defaults to the only running run."
        ),
    ] = None,
    on: RunTarget = None,
) -> None:
    """Stop a run with SIGTERM, then SIGKILL after a grace period.

    With a job name, stops the job's active run. If several are running, lists them and stops none.
    """
    from stoker.api import Run
    from stoker.jobs.run_lookup import resolve_run_to_stop

    run = Run(resolve_run_to_stop(name, on).folder)
    before = run.files.read_status().state
    run.stop()  # also a finished run: processes may be left on other machines
    if not before.is_final or before == "lost":
        print_message(f"{run.id}: {run.status().state}")
    else:
        which = "the latest run" if name in (None, run.name) else "run"
        print_message(f"nothing to stop: {which} {run.id} is not running (state: {before})")


def report(
    name: RunName = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Archive to write. Defaults to ./<run>.tar.gz."),
    ] = None,
) -> None:
    """Bundle a run's logs, plan and status into one archive.

    Secrets are redacted.
    """
    from stoker.api import Run
    from stoker.launchers.report import write_report

    run = Run.find(name)
    path = out or Path(f"{run.id}.tar.gz")
    current, analysis = run.status(), run.analysis()
    lines = [
        f"{run.id}: {current.state}",
        format_progress(analysis, current),
        current.message,
        *list_insights(analysis, current),
    ]
    lines += [f"attempt {attempt.number}: {attempt.cause or 'finished'}" for attempt in current.attempts]
    write_report(run.files, path, "".join(f"{line}\n" for line in lines if line))
    typer.echo(path)


def _shorten(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
