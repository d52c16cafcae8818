"""Find a run and its launcher, follow its logs, and describe its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from stoker.cli.output import print_message

if TYPE_CHECKING:
    from stoker.jobs.launcher import Launcher
    from stoker.jobs.run_folder import Run
    from stoker.jobs.status import JobStatus
    from stoker.jobs.topology import Slot
    from stoker.telemetry.events import Event

STOPPED_LINES = 3
"""Log lines shown after Ctrl-C: they say whether a last checkpoint was written."""


def open_launcher(target: str) -> Launcher[Any]:
    """Return the launcher that `--on` names, for example `local` or `ray://host:8265`."""
    from stoker.errors import InputError
    from stoker.jobs.launcher import LAUNCHERS

    kind, _, address = target.partition("://")
    if kind not in LAUNCHERS.names() and (scheme := kind.partition(":")[0]) in LAUNCHERS.names():
        example = "context/namespace" if scheme == "k8s" else "host:port"
        raise InputError(f"--on {target} is not a valid target", hint=f"use {scheme}://{example}")
    launcher: Any = LAUNCHERS.get(kind)
    if address and not launcher.traits.has_targets:
        raise InputError(f"--on {kind} takes no address", hint=f"remove {address!r}")
    return launcher(address) if address else launcher()  # type: ignore[no-any-return]


def open_cluster_launcher(target: str) -> Any:
    """Return the launcher of a cluster that lists its own runs; raise InputError for other targets."""
    from stoker.errors import InputError

    launcher = open_launcher(target)
    if not hasattr(launcher, "runs"):
        raise InputError(
            f"--on {target} does not support listing runs", hint="omit --on to see the runs started from here"
        )
    return launcher


def launcher_of(run: Run) -> Launcher[Any]:
    """Return the launcher that started a run."""
    return open_launcher(run.handle.partition("://")[0])


def resolve_run(name: str | None, target: str | None) -> Run:
    """Return a run of this machine, or of the cluster that `--on` or the handle names."""
    from stoker.errors import InputError
    from stoker.jobs.run_folder import find_run

    if target is None and name is not None and name.startswith("k8s://"):
        target, _, name = name.rpartition("/")
    if target is None:
        return find_run(name)
    if name is None:
        raise InputError("RUN is required with --on", hint=f"list runs with: stoker job list --on {target}")
    run: Run = open_cluster_launcher(target).adopt(name)
    return run


def get_status(run: Run) -> JobStatus:
    """Return the current status of a run."""
    return launcher_of(run).status(run.handle)


def follow_run(run: Run, *, first: int = 0, quiet: bool = False) -> None:
    """Print the logs of a run until it finishes, then a one-line summary if it succeeded."""
    print_logs(run, None, follow=True, first=first, quiet=quiet)
    status = get_status(run)
    if status.state == "succeeded":
        events = read_run_events(run)
        parts = [f"succeeded in {format_elapsed(status)}", format_progress(events), *list_insights(events)]
        print_message("; ".join(part for part in parts if part))


def print_logs(run: Run, slot: Slot | None, *, follow: bool, first: int = 0, quiet: bool = False) -> None:
    """Print the log lines of a run from attempt `first` on."""
    from stoker.jobs.topology import list_slots

    has_prefix = slot is None and len(list_slots(run.job)) > 1
    for line in launcher_of(run).logs(run.handle, slot, follow=follow):
        if line.attempt >= first and not quiet:
            typer.echo(f"[{line.slot}] {line.text}" if has_prefix else line.text)


@contextmanager
def stop_on_interrupt(launcher: Launcher[Any], run: Run) -> Iterator[None]:
    """Stop a run on Ctrl-C, also while it is being started."""
    try:
        yield
    except KeyboardInterrupt:
        if (run.folder / "handle").exists():
            print_message("\nStopping the job; press Ctrl-C again to kill it")
            launcher.stop(run.handle)
            for line in list(launcher.logs(run.handle, None, follow=False))[-STOPPED_LINES:]:
                print_message(f"  {line.text}")
            print_message(f"Resume with: stoker job run --resume {run.id}")
        raise


def read_run_events(run: Run) -> list[Event]:
    """Return all events in the logs of a run."""
    from stoker.telemetry.reader import read_events

    return read_events(run.logs)


def format_progress(events: Sequence[Event]) -> str:
    """Return step, loss, throughput, accuracy and time left as one line; empty if the program reports none."""
    from stoker.core.units import format_duration
    from stoker.telemetry import analysis

    progress, left_s = analysis.progress(events), analysis.eta(events)
    total = f" of {progress.total_steps:,}" if progress.total_steps else ""
    parts = [
        f"step {progress.step:,}{total}" if progress.step is not None else "",
        f"loss {progress.loss:.4g}" if progress.loss is not None else "",
        f"{progress.samples_per_s:,.0f} images/s" if progress.samples_per_s else "",
        f"validation top-1 {progress.val_top1:.2%}" if progress.val_top1 is not None else "",
        f"about {format_duration(round(left_s))} left" if left_s and not progress.ended else "",
    ]
    return ", ".join(part for part in parts if part)


def list_insights(events: Sequence[Event]) -> list[str]:
    """Return the verdict, the cost of restarts, and warnings about the machine."""
    from stoker.telemetry import analysis

    verdict, restarts = analysis.verdict(events), analysis.restarts(events)
    verdicts = [verdict.sentence] if verdict.bound_by != "unknown" else []
    return [*verdicts, *([restarts.sentence] if restarts.count else []), *analysis.remarks(events)]


def format_elapsed(status: JobStatus) -> str:
    """Return how long a run has taken so far."""
    from stoker.core.units import format_duration

    return format_duration(round((status.ended or time.time()) - status.began)) if status.began else "–"


def describe_run(run: Run) -> dict[str, Any]:
    """Return everything known about a run as plain values, for `--json`."""
    from stoker.telemetry import analysis

    events = read_run_events(run)
    return {
        "run": run.id,
        "handle": run.handle,
        "folder": str(run.folder),
        **status_to_dict(get_status(run)),
        "progress": analysis.progress(events),
        "eta_s": analysis.eta(events),
        "verdict": analysis.verdict(events),
        "restarts": analysis.restarts(events),
        "remarks": analysis.remarks(events),
    }


def status_to_dict(status: JobStatus) -> dict[str, Any]:
    """Return a status as plain values."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(status)
    return fields
