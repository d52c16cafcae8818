"""`stoker job plan|run|schema`; registers the other job commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import job_delete, job_eval, job_exec, job_forward, job_status
from stoker.cli.options import Hosts, JobFile, Json, On, Sets
from stoker.cli.output import print_json, print_message
from stoker.cli.runs import describe_run, follow_run, stop_on_interrupt
from stoker.jobs.targets import LOCAL

if TYPE_CHECKING:
    from stoker.api import Plan

app = typer.Typer(help="Plan, run, monitor and stop jobs.", no_args_is_help=True)


@app.command()
def plan(
    file: JobFile,
    on: On = LOCAL,
    hosts: Hosts = None,
    sets: Sets = None,
    rbac: Annotated[
        str | None,
        typer.Option(
            metavar="SUBJECT",
            help="With --on k8s: print the Role that SUBJECT (user, group:NAME, serviceaccount:NAME) needs.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a job would start, without starting it."""
    if rbac is not None:
        _require_rbac(on)
    planned = _plan(file, on, hosts, sets)
    if rbac is None:
        _print_notes(planned)
    launcher: Any = planned.launcher
    _print_plan(planned.rendered if rbac is None else launcher.render_rbac(planned.job, rbac), as_json)


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Job file; `-` reads standard input.")] = None,
    on: On = LOCAL,
    hosts: Hosts = None,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return as soon as the job has started.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files to the run folder.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --on ray --hosts: leave the Ray cluster running after the run.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Resume a run that failed, was stopped or was lost.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, as `job plan` does.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run and its outcome as JSON.")] = False,
) -> None:
    """Start a job and follow it until it finishes.

    Ctrl-C stops the job; closing the terminal does not. The last line reports the outcome and where the
    time went.
    """
    from stoker.api import Run

    if resume is not None:
        _reject_with_resume(
            {
                "FILE": file,
                "--on": on != LOCAL,
                "--hosts": hosts is not None,
                "--set": sets,
                "--tensorboard": tensorboard,
                "--keep": keep,
                "--dry-run": dry_run,
            }
        )
        started = Run.find(resume)
        first = started.status().next_attempt  # earlier attempts are not printed again
        start: Callable[[], object] = partial(started.resume, detach=detach)
    else:
        planned = _plan(_require_file(file), on, hosts, [*(sets or []), *_option_assignments(tensorboard, keep)])
        if dry_run:
            _print_notes(planned)
            _print_plan(planned.rendered, as_json)
            return
        started, first = planned.create_run(), 0
        _print_notes(planned, started.id)
        start = partial(planned.start, started, detach=detach)
    with stop_on_interrupt(started):
        start()
        verb = "Started" if resume is None else "Resumed"
        print_message(f"{verb} run {started.id}; logs: {started.folder / 'logs'}")
        if not detach:
            follow_run(started, first=first, quiet=as_json)
            if started.files.kept:
                print_message(started.files.kept)
    if detach and as_json:
        print_json({"run": started.id, "handle": started.handle, "folder": str(started.folder)})
    elif detach:
        print_message(f"Follow it with: stoker job logs -f {started.id}")
    else:
        if as_json:
            print_json(describe_run(started))
        started.status().raise_for_state()


@app.command()
def schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    from stoker.jobs.spec import job_schema

    print_json(job_schema())


job_status.add_to(app)
job_delete.add_to(app)
job_eval.add_to(app)
job_exec.add_to(app)
job_forward.add_to(app)


def _plan(file: Path, on: str, hosts: str | None, sets: list[str] | None) -> Plan:
    from stoker.api import Job

    return Job.load(file, sets or [], on=on, hosts=hosts).plan(on)


def _print_notes(planned: Plan, run_id: str | None = None) -> None:
    """Print the notes of a plan, with the ID of its run if there is one already."""
    from stoker.jobs.launcher import RUN_PLACEHOLDER

    for note in planned.notes:
        print_message(note.replace(RUN_PLACEHOLDER, run_id or RUN_PLACEHOLDER))


def _print_plan(rendered: Any, as_json: bool) -> None:
    """Print what would be started: as shell commands or manifests, or as JSON."""
    if as_json:
        print_json(rendered)
    else:
        typer.echo(rendered.to_text())


def _require_rbac(on: str) -> None:
    """Raise InputError for a target without roles."""
    from stoker.errors import InputError
    from stoker.jobs.run_lookup import open_launcher

    if not open_launcher(on).traits.has_rbac:
        raise InputError("--rbac requires --on k8s", hint="pass both or neither")


def _option_assignments(tensorboard: bool, keep: bool) -> list[str]:
    """Return the keys of the job file that options of their own set."""
    from stoker.jobs.overrides import OptionAssignment

    keys = {"tensorboard": ("--tensorboard", tensorboard), "ray.keep": ("--keep", keep)}
    return [OptionAssignment(f"{key}=true", option) for key, (option, is_set) in keys.items() if is_set]


def _require_file(file: Path | None) -> Path:
    from stoker.errors import InputError

    if file is None:
        raise InputError("no job file specified", hint="to create one, run: stoker init")
    return file


def _reject_with_resume(arguments: Mapping[str, object]) -> None:
    """Raise InputError if an argument was passed that a resumed run cannot change."""
    from stoker.errors import InputError

    if passed := [name for name, value in arguments.items() if value]:
        names = " and ".join(passed)
        raise InputError(
            f"{names} cannot be combined with --resume: a resumed run uses its original job file and target",
            hint=f"omit {names}, or start a new run",
        )
