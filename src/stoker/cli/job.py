"""`stoker init` and `stoker job plan|run|schema`; registers the other job commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import job_eval, job_exec, job_forward, job_status
from stoker.cli.options import LOCAL, Hosts, JobFile, Json, On, Sets
from stoker.cli.output import print_json, print_message
from stoker.cli.runs import describe_run, follow_run, stop_on_interrupt

if TYPE_CHECKING:
    from stoker.jobs.launcher import Launcher
    from stoker.jobs.run_folder import Run
    from stoker.jobs.spec import Job

app = typer.Typer(help="Plan, run, monitor and stop jobs.", no_args_is_help=True)


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Job file to write.")] = Path("job.yaml"),
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job.")] = "my-training",
    train: Annotated[str, typer.Option(metavar="URL", help="Training set.")] = "shards/train",
    val: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Validation set. Defaults to `val` beside the training set, if it exists."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented job file to start from."""
    from stoker.errors import ConflictError
    from stoker.jobs.spec import parse_job
    from stoker.jobs.template import render_template

    sibling = str(Path(train).with_name("val")) if "://" not in train else None
    if val is None and sibling is not None and (Path(sibling).exists() or not Path(train).exists()):
        val = sibling
    text = render_template(name, train, val)
    parse_job(text, path)  # an invalid name is refused before anything is written
    try:
        with open(path, "w" if force else "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConflictError("file already exists", where=path, hint="choose another name or pass --force") from error
    print_message(f"Wrote {path}. Edit it, then run: stoker job run {path}")


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
    from stoker.jobs.run_lookup import open_launcher

    job, rendered = _render(file, on, add_hosts(on, sets, hosts), quiet=rbac is not None)
    if rbac is not None:
        rendered = _render_rbac(open_launcher(on), job, rbac)
    if as_json:
        print_json(rendered)
        return
    typer.echo(rendered.to_text())


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Job file; `-` reads standard input.")] = None,
    on: On = LOCAL,
    hosts: Hosts = None,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once the job has started.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files to the run folder.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Resume a run that failed, was stopped or was lost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run and its outcome as JSON.")] = False,
) -> None:
    """Start a job and follow it until it finishes.

    Ctrl-C stops the job; closing the terminal does not. The last line is the outcome, and where the time went.
    """
    from stoker.jobs.run_folder import create_run
    from stoker.jobs.run_lookup import get_status, launcher_of, open_launcher

    if resume is not None:
        _reject_with_resume(
            {
                "FILE": file,
                "--on": on != LOCAL,
                "--hosts": hosts is not None,
                "--set": sets,
                "--tensorboard": tensorboard,
            }
        )
        started = _find_resumable(resume)
        launcher = launcher_of(started)
        start: Callable[[], object] = partial(launcher.restart, started, detach=detach)
    else:
        overrides = [*add_hosts(on, sets, hosts), *(["tensorboard=true"] if tensorboard else [])]
        job, rendered = _render(_require_file(file), on, overrides)
        started, launcher = create_run(job, rendered), open_launcher(on)
        start = partial(launcher.start, rendered, started, detach=detach)
    first = started.read_status().next_attempt  # earlier attempts of a resumed run are not printed again
    with stop_on_interrupt(launcher, started):
        start()
        print_message(f"Run {started.id}; logs in {started.logs}")
        if not detach:
            follow_run(started, first=first, quiet=as_json)
    if detach and as_json:
        print_json({"run": started.id, "handle": started.handle, "folder": str(started.folder)})
    elif detach:
        print_message(f"Follow it with: stoker job logs -f {started.id}")
    else:
        if as_json:
            print_json(describe_run(started))
        get_status(started).raise_for_state()


@app.command()
def schema() -> None:
    """Print the JSON Schema of the job file, for editors."""
    from stoker.jobs.spec import job_schema

    print_json(job_schema())


job_status.add_to(app)
job_eval.add_to(app)
job_exec.add_to(app)
job_forward.add_to(app)


def add_hosts(on: str, sets: list[str] | None, hosts: str | None) -> list[str]:
    """Return the overrides with `--hosts a,b:2` added as `ssh.hosts`."""
    import json

    from stoker.errors import InputError

    if hosts is None:
        return sets or []
    if on.partition("://")[0] != "ssh":
        raise InputError("--hosts requires --on ssh", hint="pass both or neither")
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    if not names:
        raise InputError("--hosts is empty", hint="use --hosts a,b or --hosts @FILE")
    return [*(sets or []), f"ssh.hosts={json.dumps(names)}"]


def _render(file: Path, on: str, sets: list[str] | None, *, quiet: bool = False) -> tuple[Job, Any]:
    from stoker.jobs.run_lookup import open_launcher
    from stoker.jobs.spec import load_job

    launcher = open_launcher(on)
    job = launcher.resolve_paths(load_job(file, sets or []))
    rendered = launcher.render(job)
    for note in () if quiet else rendered.notes:
        print_message(note)
    return job, rendered


def _render_rbac(launcher: Launcher[Any], job: Job, subject: str) -> Any:
    """Return the objects that allow a subject to run a job."""
    from stoker.errors import InputError

    if not hasattr(launcher, "render_rbac"):
        raise InputError("--rbac requires --on k8s", hint="pass both or neither")
    return launcher.render_rbac(job, subject)


def _require_file(file: Path | None) -> Path:
    from stoker.errors import InputError

    if file is None:
        raise InputError("job file required", hint="write one with: stoker init")
    return file


def _reject_with_resume(arguments: Mapping[str, object]) -> None:
    """Raise InputError if an argument was passed that a resumed run cannot change."""
    from stoker.errors import InputError

    if passed := [name for name, value in arguments.items() if value]:
        names = " and ".join(passed)
        raise InputError(
            f"{names} cannot be combined with --resume: a run is resumed with its own job file on its own target",
            hint=f"omit {names}, or start a new run",
        )


def _find_resumable(name: str) -> Run:
    """Return a finished, unsuccessful run, which can be restarted in its own folder from its own checkpoints."""
    from stoker.errors import ConflictError
    from stoker.jobs.run_lookup import get_status, resolve_run

    finished = resolve_run(name)
    state = get_status(finished).state
    if not state.is_final:
        raise ConflictError(
            f"run {finished.id} is still running", hint=f"follow it with: stoker job logs -f {finished.id}"
        )
    if state == "succeeded":
        raise ConflictError(f"run {finished.id} already succeeded", hint="start a new run: stoker job run FILE")
    return finished
