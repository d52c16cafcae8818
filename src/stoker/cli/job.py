"""`stoker job`: one file, every place; and `stoker init`, which writes such a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli import job_exec
from stoker.cli.output import print_json, print_table, remark
from stoker.core.units import counted

if TYPE_CHECKING:
    from stoker.jobs.launcher import Launcher
    from stoker.jobs.run_folder import Run
    from stoker.jobs.spec import Job
    from stoker.jobs.status import JobStatus
    from stoker.jobs.topology import Slot
    from stoker.telemetry.events import Event

STOPPED_LINES = 3
"""Of the log, shown after a Ctrl-C: whether there is a last checkpoint."""
HERE = "local"
app = typer.Typer(help="Jobs: one file, every place.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JobFile = Annotated[Path, typer.Argument(metavar="FILE", help="A job file; `-` is standard input.")]
On = Annotated[
    str,
    typer.Option(
        "--on", metavar="PLACE", help="Where to run it: local, ssh, ray[://host:port] or k8s[://context/namespace]."
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="HOSTS", help="For --on ssh: a,b:2 (two workers on b), or @FILE."),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, like resources.gpu=4.")
]
RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="A run's id, the beginning of it, its handle, or a job's name; the newest."),
]
In = Annotated[
    str | None,
    typer.Option("--on", metavar="PLACE", help="k8s[://context/namespace]: look there, also for runs of others."),
]


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The job file to write.")] = Path("job.yaml"),
    name: Annotated[str, typer.Option(metavar="NAME", help="What the job is called.")] = "my-training",
    train: Annotated[str, typer.Option(metavar="URL", help="The training set.")] = "shards/train",
    val: Annotated[
        str | None, typer.Option(metavar="URL", help="The validation set; `val` beside the training set.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented job file to start from."""
    from stoker.errors import ConflictError
    from stoker.jobs.spec import parse_job
    from stoker.jobs.template import template

    beside = str(Path(train).with_name("val")) if "://" not in train else None
    if val is None and beside is not None and (Path(beside).exists() or not Path(train).exists()):
        val = beside
    text = template(name, train, val)
    parse_job(text, path)  # a name that cannot be is told before anything is written
    try:
        with open(path, "w" if force else "x") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConflictError("is there already", where=path, hint="name another file, or give --force") from error
    remark(f"Wrote {path}. Look at it, then: stoker job run {path}")


@app.command()
def plan(
    file: JobFile,
    on: On = HERE,
    hosts: Hosts = None,
    sets: Sets = None,
    rbac: Annotated[
        str | None,
        typer.Option(
            metavar="WHO",
            help="For --on k8s: show the rights that WHO needs: a user, group:NAME or serviceaccount:NAME.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a job would start, and start nothing."""
    job, rendered = _rendered(file, on, with_hosts(on, sets, hosts), quiet=rbac is not None)
    if rbac is not None:
        rendered = _rights(launcher_at(on), job, rbac)
    if as_json:
        print_json(rendered)
        return
    typer.echo(rendered.shown())


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A job file; `-` is standard input.")] = None,
    on: On = HERE,
    hosts: Hosts = None,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it has started.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files into the run folder.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run that failed, was stopped or lost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run, or how it ended, as JSON.")] = False,
) -> None:
    """Start a job, and follow it until its end.

    Ctrl-C ends the job; closing the terminal does not. The last line says how it went and where its time was spent.
    """
    from stoker.jobs.run_folder import create

    if resume is not None:
        started = _resumable(resume, is_changed=bool(file or sets or tensorboard or hosts is not None or on != HERE))
        launcher = _launcher_of(started)
        begin: Callable[[], object] = partial(launcher.restart, started, detach=detach)
    else:
        more = ["tensorboard=true"] if tensorboard else []
        job, rendered = _rendered(_needed(file), on, [*with_hosts(on, sets, hosts), *more])
        started, launcher = create(job, rendered), launcher_at(on)
        begin = partial(launcher.start, rendered, started, detach=detach)
    first = started.read_status().next_attempt  # only what is written from there on is shown
    with _stopping(launcher, started):
        begin()
        remark(f"Run {started.id}; logs in {started.logs}")
        if not detach:
            _follow(started, first=first, quiet=as_json)
    if detach and as_json:
        print_json({"run": started.id, "handle": started.handle, "folder": str(started.folder)})
    elif detach:
        remark(f"Follow it with: stoker job logs -f {started.id}")
    else:
        if as_json:
            print_json(_described(started))
        _status(started).raise_for_state()


@app.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="At most so many, the newest first.")] = 20,
    on: In = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first: those of this machine, or those in a cluster."""
    from stoker.jobs.run_folder import runs

    if on is not None:
        _list_there(on, limit, as_json)
        return
    every = runs()
    rows = [(one, _status(one)) for one in every[:limit]]
    if as_json:
        print_json([{"run": one.id, **_plain(status)} for one, status in rows])
        return
    print_table(
        ("run", "state", "started", "took", "attempts", "message"),
        [
            (one.id, str(status.state), _clock(status.began), _took(status), status.attempt + 1, _short(status.message))
            for one, status in rows
        ],
    )
    if len(every) > limit:
        remark(f"… and {counted(len(every) - limit, 'older run')}; --limit shows more")


def _list_there(on: str, limit: int, as_json: bool) -> None:
    """List the runs in a cluster, as it tells them itself."""
    from stoker.core.units import format_duration

    launcher = _cluster_at(on)
    rows = launcher.runs()[:limit]
    if as_json:
        print_json(rows)
        return
    if not rows:
        remark(f"There are no runs in {on}; k8s://context/namespace names another place")
    print_table(
        ("run", "state", "started", "took", "pods"),
        [
            (
                one["run"],
                one["state"],
                one["started"],
                format_duration(one["took_s"]) if one["took_s"] else "–",
                one["pods"],
            )
            for one in rows
        ],
    )


@app.command()
def status(name: RunName = None, on: In = None, as_json: Json = False) -> None:
    """Tell how a run is doing: its slots, how far it is, and where its time is spent."""
    found = find_run(name, on)
    if as_json:
        print_json(_described(found))
        return
    now = _status(found)
    typer.echo(f"{found.id}: {now.state}, attempt {now.attempt}, {_took(now)}")
    print_table(
        ("slot", "state", "pid", "exit"),
        [(one.slot, str(one.state), str(one.pid or "–"), one.code) for one in now.slots],
    )
    events = _events(found)
    for text in (_progress(events), now.message, *_remarks(events)):
        if text:
            typer.echo(text)


@app.command()
def logs(
    name: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    slot: Annotated[str | None, typer.Option(metavar="SLOT", help="Only this one, like worker/0.")] = None,
    on: In = None,
) -> None:
    """Show or follow the logs of a run."""
    from stoker.errors import InputError
    from stoker.jobs.topology import Slot, slots_of

    found = find_run(name, on)
    known = slots_of(found.job)
    if slot is not None and slot not in map(str, known):
        raise InputError(f"there is no slot {slot!r} in {found.id}", hint=f"known: {', '.join(map(str, known))}")
    _print_logs(found, None if slot is None else Slot.parse(slot), follow=follow)


@app.command()
def stop(name: RunName = None, on: In = None) -> None:
    """End a run: its programs get SIGTERM, time for a last checkpoint, then SIGKILL."""
    found = find_run(name, on)
    before = found.read_status().state
    _launcher_of(found).stop(found.handle)  # also of a run that is over: something may be left elsewhere
    is_over = before.is_final and before != "lost"
    remark(f"{found.id} is over already: {before}" if is_over else f"{found.id}: {_status(found).state}")


@app.command()
def report(
    name: RunName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The archive; <run>.tar.gz here by default.")
    ] = None,
) -> None:
    """Bundle all that is known of a run into one archive, secrets removed."""
    from stoker.jobs.run_folder import find
    from stoker.launchers.report import write_report

    found = find(name)
    path = out or Path(f"{found.id}.tar.gz")
    now = _status(found)
    events = _events(found)
    lines = [f"{found.id}: {now.state}", _progress(events), now.message, *_remarks(events)]
    lines += [f"attempt {one.number}: {one.cause or 'ended'}" for one in now.attempts]
    write_report(found, path, "".join(f"{line}\n" for line in lines if line))
    typer.echo(path)


@app.command("eval")
def evaluate(
    name: RunName = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="WHICH", help="newest, best, or a file or URL of a checkpoint.")
    ] = "best",
    sets: Sets = None,
) -> None:
    """Validate a checkpoint of a run, with the run's own settings."""
    import msgspec

    from stoker.errors import InputError
    from stoker.jobs.run_folder import create, find
    from stoker.jobs.spec import load_job

    found = find(name) if name else _newest_training()
    job = load_job(found.folder / "job.yaml", sets or [])
    if job.program.module != "stoker.trainers.torch_image":
        raise InputError(f"{found.id} runs a program of its own", hint="only stoker.trainers.torch_image can be asked")
    args = (*job.program.args, *_which(checkpoint))
    job = msgspec.structs.replace(
        job,
        name=f"{job.name[:35].rstrip('-')}-eval",
        program=msgspec.structs.replace(job.program, args=args),
        checkpoint=msgspec.structs.replace(job.checkpoint, dir=found.checkpoints),
        retries=0,
    )
    launcher = launcher_at(HERE)
    job = launcher.anchored(job)
    rendered = launcher.render(job)
    started = create(job, rendered)
    with _stopping(launcher, started):
        launcher.start(rendered, started)
        _follow(started)
    _status(started).raise_for_state()


@app.command()
def schema() -> None:
    """Print the job file's JSON Schema, for editors."""
    from stoker.jobs.spec import schema as job_schema

    print_json(job_schema())


job_exec.add_to(app)


def _newest_training() -> Run:
    """Find the newest run that is not itself an evaluation."""
    from stoker.jobs.run_folder import find, runs

    return next((run for run in runs() if "--eval-only" not in run.job.program.args), None) or find(None)


def _which(checkpoint: str) -> tuple[str, ...]:
    """Give the trainer's flags for a checkpoint."""
    if checkpoint in ("best", "newest"):
        return ("--eval-only", checkpoint)
    return ("--eval-only", "--init-from", checkpoint)


def with_hosts(on: str, sets: list[str] | None, hosts: str | None) -> list[str]:
    """Take `--hosts a,b:2` for the key that it stands for."""
    import json

    from stoker.errors import InputError

    if hosts is None:
        return sets or []
    if on.partition("://")[0] != "ssh":
        raise InputError("--hosts is for --on ssh", hint="give both, or neither")
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    if not names:
        raise InputError("--hosts names no host", hint="give --hosts a,b or --hosts @FILE")
    return [*(sets or []), f"ssh.hosts={json.dumps(names)}"]


def _rights(launcher: Launcher[Any], job: Job, who: str) -> Any:
    """Give the objects that let somebody run a job, where the place knows rights."""
    from stoker.errors import InputError

    if not hasattr(launcher, "rights"):
        raise InputError("--rbac is for --on k8s", hint="give both, or neither")
    return launcher.rights(job, who)


def _needed(file: Path | None) -> Path:
    from stoker.errors import InputError

    if file is None:
        raise InputError("no job file was given", hint="write one with: stoker init")
    return file


def _rendered(file: Path, on: str, sets: list[str] | None, *, quiet: bool = False) -> tuple[Job, Any]:
    from stoker.jobs.spec import load_job

    launcher = launcher_at(on)
    job = launcher.anchored(load_job(file, sets or []))
    rendered = launcher.render(job)
    for note in () if quiet else rendered.notes:
        remark(note)
    return job, rendered


def _resumable(name: str, *, is_changed: bool) -> Run:
    """Find a run that can be started again where it was: in its own folder, and so from its own checkpoints."""
    from stoker.errors import ConflictError, InputError
    from stoker.jobs.run_folder import find

    if is_changed:
        hint = "leave FILE, --on, --hosts, --set and --tensorboard away, or start it anew"
        raise InputError("--resume goes on with the job as it was, where it was", hint=hint)
    found = find(name)
    now = _status(found)
    if not now.state.is_final:
        raise ConflictError("runs already", where=found.id, hint=f"follow it with: stoker job logs -f {found.id}")
    if now.state == "succeeded":
        raise ConflictError("is over, and succeeded", where=found.id, hint="start it anew: stoker job run FILE")
    return found


@contextmanager
def _stopping(launcher: Launcher[Any], run: Run) -> Iterator[None]:
    """End a run on Ctrl-C, from the moment it is being started."""
    try:
        yield
    except KeyboardInterrupt:
        if (run.folder / "handle").exists():
            remark("\nEnding the job; Ctrl-C once more ends it at once")
            launcher.stop(run.handle)
            for line in list(launcher.logs(run.handle, None, follow=False))[-STOPPED_LINES:]:
                remark(f"  {line.text}")
            remark(f"Go on with: stoker job run --resume {run.id}")
        raise


def launcher_at(name: str) -> Launcher[Any]:
    """Give the launcher that `--on` names, at its place: `ray://host:8265`."""
    from stoker.errors import InputError
    from stoker.jobs.launcher import LAUNCHERS

    kind, _, place = name.partition("://")
    if kind not in LAUNCHERS.names() and (scheme := kind.partition(":")[0]) in LAUNCHERS.names():
        place = "context/namespace" if scheme == "k8s" else "host:port"
        raise InputError(f"`--on {name}` is no place", hint=f"an address is written {scheme}://{place}")
    launcher: Any = LAUNCHERS.get(kind)
    if place and not launcher.traits.places:
        raise InputError(f"`--on {kind}` takes no address", hint=f"leave {place!r} away")
    return launcher(place) if place else launcher()  # type: ignore[no-any-return]


def find_run(name: str | None, on: str | None) -> Run:
    """Find a run here, or in the cluster that `--on` or the handle names."""
    from stoker.errors import InputError
    from stoker.jobs.run_folder import find

    if on is None and name is not None and name.startswith("k8s://"):
        on, _, name = name.rpartition("/")
    if on is None:
        return find(name)
    if name is None:
        raise InputError("which run there is not said", hint=f"stoker job list --on {on} lists them")
    run: Run = _cluster_at(on).adopt(name)
    return run


def _cluster_at(on: str) -> Any:
    """Give the launcher of a place that knows its runs by itself."""
    from stoker.errors import InputError

    launcher = launcher_at(on)
    if not hasattr(launcher, "runs"):
        raise InputError(
            f"`--on {on}` keeps no list of runs", hint="leave --on away: runs of this machine are known here"
        )
    return launcher


def _launcher_of(run: Run) -> Launcher[Any]:
    return launcher_at(run.handle.partition("://")[0])


def _status(run: Run) -> JobStatus:
    return _launcher_of(run).status(run.handle)


def _follow(run: Run, *, first: int = 0, quiet: bool = False) -> None:
    """Print what a run writes until its end, then one line of verdict."""
    _print_logs(run, None, follow=True, first=first, quiet=quiet)
    now = _status(run)
    if now.state == "succeeded":
        events = _events(run)
        words = [f"succeeded in {_took(now)}", _progress(events), *_remarks(events)]
        remark("; ".join(word for word in words if word))


def _print_logs(run: Run, slot: Slot | None, *, follow: bool, first: int = 0, quiet: bool = False) -> None:
    """Print the text of the attempts from the first one given on."""
    from stoker.jobs.topology import slots_of

    several = slot is None and len(slots_of(run.job)) > 1
    for line in _launcher_of(run).logs(run.handle, slot, follow=follow):
        if line.attempt >= first and not quiet:
            typer.echo(f"[{line.slot}] {line.text}" if several else line.text)


def _described(run: Run) -> dict[str, Any]:
    """Give all that is known of a run as plain values."""
    from stoker.telemetry import analysis

    events = _events(run)
    return {
        "run": run.id,
        "handle": run.handle,
        "folder": str(run.folder),
        **_plain(_status(run)),
        "progress": analysis.progress(events),
        "eta_s": analysis.eta(events),
        "verdict": analysis.verdict(events),
        "restarts": analysis.restarts(events),
        "remarks": analysis.remarks(events),
    }


def _plain(status: JobStatus) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(status)
    return plain


def _progress(events: Sequence[Event]) -> str:
    """Tell how far a run is, as far as it told."""
    from stoker.core.units import format_duration
    from stoker.telemetry import analysis

    now, left = analysis.progress(events), analysis.eta(events)
    total = f" of {now.total_steps:,}" if now.total_steps else ""
    words = [
        f"step {now.step:,}{total}" if now.step is not None else "",
        f"loss {now.loss:.4g}" if now.loss is not None else "",
        f"{now.samples_per_s:,.0f} images/s" if now.samples_per_s else "",
        f"validation top-1 {now.val_top1:.2%}" if now.val_top1 is not None else "",
        f"about {format_duration(round(left))} left" if left and not now.ended else "",
    ]
    return ", ".join(word for word in words if word)


def _remarks(events: Sequence[Event]) -> list[str]:
    """Tell where the time is spent, what restarts cost, and what is odd about the machine."""
    from stoker.telemetry import analysis

    verdict, lost = analysis.verdict(events), analysis.restarts(events)
    known = [verdict.sentence] if verdict.bound_by != "unknown" else []
    return [*known, *([lost.sentence] if lost.count else []), *analysis.remarks(events)]


def _events(run: Run) -> list[Event]:
    from stoker.telemetry.reader import read_events

    return read_events(run.logs)


def _took(status: JobStatus) -> str:
    from stoker.core.units import format_duration

    return format_duration(round((status.ended or time.time()) - status.began)) if status.began else "–"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "–"


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
