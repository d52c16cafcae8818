"""`stoker job eval`: validate a checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import RunName, Sets
from stoker.cli.output import print_message
from stoker.cli.runs import follow_run, stop_on_interrupt
from stoker.jobs.targets import LOCAL

if TYPE_CHECKING:
    from stoker.jobs.run_folder import RunFolder
    from stoker.jobs.spec import JobSpec

PARAMETER_SERVER_TRAINER = "stoker.trainers.tf_ps"
TRAINERS = ("stoker.trainers.torch_image", "stoker.trainers.tf_mirrored", PARAMETER_SERVER_TRAINER)
VAL_FLAGS = ("--val", "--valshards")
"""Flags of the trainers that set the validation set instead of `data.val`."""
ACCEPTED = "--checkpoint takes best, newest, the name of a checkpoint of the run, or the path or URL of a file"


def add_to(app: typer.Typer) -> None:
    """Add this command to `stoker job`."""
    app.command("eval")(evaluate)


def evaluate(
    name: RunName = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="WHICH",
            help="best (the newest if none has been validated yet), newest, a checkpoint of the run by name "
            "(step-0000000100.pt), or the path or URL of a checkpoint.",
        ),
    ] = "best",
    sets: Sets = None,
) -> None:
    """Evaluate a checkpoint of a run with the run's settings."""
    from stoker.api import Job
    from stoker.errors import InputError
    from stoker.jobs.run_lookup import resolve_run
    from stoker.jobs.spec import load_job

    trained = resolve_run(name) if name else _find_newest_training()
    job = load_job(trained.folder / "job.yaml", sets or [])
    if job.program.module not in TRAINERS:
        raise InputError(
            f"`job eval` supports only runs of {', '.join(TRAINERS)}",
            hint=f"run {trained.id} uses another program, so evaluate its checkpoints with that program",
        )
    directory = job.checkpoint.dir or trained.checkpoint_dir
    where, flags = choose_checkpoint(trained, directory, checkpoint)
    if job.data.val is None and not any(arg.partition("=")[0] in VAL_FLAGS for arg in map(str, job.program.args)):
        hint = "pass one with: --set data.val=URL"
        raise InputError(f"run {trained.id} has no validation set", where="data.val", hint=hint)
    planned = Job(make_evaluation(job, directory, flags)).plan()
    print_message(f"Evaluating {where} of run {trained.id}")
    started = planned.create_run()
    with stop_on_interrupt(started):
        planned.start(started, detach=False)
        follow_run(started)
    started.status().raise_for_state()


def make_evaluation(job: JobSpec, directory: str, flags: tuple[str, ...]) -> JobSpec:
    """Return the job that evaluates a checkpoint in this directory, without observers and parameter servers."""
    import msgspec

    from stoker.jobs.topology import OBSERVER_ROLES

    job = msgspec.structs.replace(
        job,
        name=f"{job.name[:35].rstrip('-')}-eval",
        program=msgspec.structs.replace(job.program, args=(*job.program.args, *flags)),
        roles={name: role for name, role in job.roles.items() if name not in OBSERVER_ROLES},
        checkpoint=msgspec.structs.replace(job.checkpoint, dir=directory),
        retries=0,
    )
    if job.program.module != PARAMETER_SERVER_TRAINER:
        return job
    return msgspec.structs.replace(job, topology="single", workers=1, roles={})


def _find_newest_training() -> RunFolder:
    """Return the newest run that is not itself an evaluation."""
    from stoker.jobs.run_folder import find_run, list_runs

    return next((run for run in list_runs() if "--eval-only" not in run.job.program.args), None) or find_run(None)


def choose_checkpoint(trained: RunFolder, directory: str, which: str) -> tuple[str, tuple[str, ...]]:
    """Return the path or URL of the checkpoint and the trainer's flags for it; raise NotFoundError if there is none."""
    from stoker.errors import NotFoundError
    from stoker.launchers.checkpoint_location import locate_checkpoints
    from stoker.storage import join_url, open_store, redacted, split_url
    from stoker.telemetry.run_index import open_index
    from stoker.trainers.checkpoint_files import BEST_NAMES, find_checkpoint

    is_file = which not in ("best", "newest") and ("/" in which or Path(which).exists())
    found = None if is_file else find_checkpoint(directory, which)
    if found is None and which not in ("best", "newest"):
        path = which if "://" in which else str(Path.cwd() / which)
        folder, name = split_url(path)
        try:
            open_store(folder).head(name)
        except NotFoundError as error:
            raise NotFoundError(error.what, where=error.where, hint=ACCEPTED) from error
        return redacted(path), ("--eval-only", "--init-from", path)
    if found is None:
        hint, kind = None, trained.handle.partition("://")[0]
        if kind != LOCAL and "://" not in directory:
            location = locate_checkpoints(trained, open_index(trained.logs).analysis)
            source = f" from {location}" if location else ""
            hint = f"it ran on {kind}: copy a checkpoint{source} to this machine and pass --checkpoint FILE"
        raise NotFoundError(f"run {trained.id} has no checkpoint in this directory", where=directory, hint=hint)
    if which == "best" and found not in BEST_NAMES:
        print_message("No checkpoint has been validated yet: using the newest")
    # By name, because a training that is still running may write a newer one before the trainer reads it. An empty
    # --init-from overrides that of a training which began with other weights.
    name = "best" if found in BEST_NAMES else found
    return redacted(join_url(directory, found)), ("--eval-only", name, "--init-from=")
