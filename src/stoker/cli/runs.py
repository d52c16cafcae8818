"""Follow the logs of a run, and describe its progress."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from stoker.cli.log_view import LogView
from stoker.cli.output import print_message

if TYPE_CHECKING:
    from stoker.api import Run
    from stoker.jobs.launcher import SlotLogLine
    from stoker.jobs.status import JobStatus
    from stoker.telemetry.analysis import RunAnalysis

STOPPED_LINES = 3
"""Log lines shown after Ctrl-C: they say whether a last checkpoint was written."""


def follow_run(run: Run, *, first: int = 0, quiet: bool = False) -> None:
    """Print the logs of a run until it finishes, then a one-line summary if it succeeded."""
    import stoker.telemetry.run_index  # noqa: F401 (for the summary; importing it takes a while, and now the job starts)

    print_logs(run, None, follow=True, first=first, quiet=quiet, fold=True)
    status = run.status()
    if status.state == "succeeded":
        analysis = run.analysis()
        parts = [
            f"succeeded in {format_elapsed(status)}",
            format_progress(analysis, status),
            format_checkpoints(run, analysis),
            *list_insights(analysis, status),
        ]
        print_message("; ".join(part for part in parts if part))


def print_logs(
    run: Run,
    slot: str | None,
    *,
    follow: bool,
    first: int = 0,
    quiet: bool = False,
    fold: bool = False,
    tail: int | None = None,
    since: float = 0.0,
    timestamps: bool = False,
) -> None:
    """Print the log lines of a run from attempt `first` on: the last `tail`, and of those the ones after `since`.

    On a terminal, or with `fold`, the output of torchrun and mpirun is left out: it hides the error of the program.
    """
    from stoker.core.units import pluralize
    from stoker.jobs.topology import list_slots

    if fold or sys.stdout.isatty():
        lines = _read_folded(run, slot, follow=follow, tail=tail)
    else:
        lines = run.logs(slot, follow=follow, tail=tail, partial=True)
    view = LogView(slots=slot is None and len(list_slots(run.job.spec)) > 1, timestamps=timestamps)
    untimed = 0
    try:
        for line in lines:
            untimed += bool(since and not line.time)
            if line.attempt >= first and line.time >= since and not quiet:
                view.print(line)
    finally:
        view.clear()
    if untimed:
        print_message(f"Left out {pluralize(untimed, 'line')} without a time: logs of earlier versions have none")


def _fold_lines(lines: Iterable[SlotLogLine]) -> Iterator[SlotLogLine]:
    """Yield the log lines of a run without those of torchrun and harmless warnings of mpirun."""
    from stoker.launchers.supervise.mpirun_output import drop_mpirun_warnings
    from stoker.launchers.supervise.torchrun_output import fold_torchrun_output

    return fold_torchrun_output(drop_mpirun_warnings(lines))


def _read_folded(run: Run, slot: str | None, *, follow: bool, tail: int | None) -> Iterator[SlotLogLine]:
    """Yield the folded log lines, or the last `tail` of what is left of them."""
    lines = _fold_lines(run.logs(slot, follow=follow, partial=True))
    if tail is None:
        return lines
    if not follow:
        return iter(deque(lines, maxlen=tail))
    count = sum(1 for _ in _fold_lines(run.logs(slot)))
    return islice(lines, max(0, count - tail), None)


@contextmanager
def stop_on_interrupt(run: Run) -> Iterator[None]:
    """Stop a run on Ctrl-C, also while it is being started."""
    try:
        yield
    except KeyboardInterrupt:
        if (run.folder / "handle").exists():
            print_message("\nStopping the job; press Ctrl-C again to kill it")
            run.stop()
            for line in list(_fold_lines(run.logs()))[-STOPPED_LINES:]:
                print_message(f"  {line.text}")
            print_message(f"Resume with: stoker job run --resume {run.id}")
        raise


def format_progress(analysis: RunAnalysis, status: JobStatus) -> str:
    """Return step, loss, throughput, accuracy and time left as one line; empty if the program reports none."""
    from stoker.core.units import format_duration

    progress, left_s = analysis.progress(), _estimate_time_left(analysis, status)
    total = f" of {progress.total_steps:,}" if progress.total_steps else ""
    parts = [
        f"step {progress.step:,}{total}" if progress.step is not None and (progress.step or total) else "",
        f"loss {progress.loss:.4g}" if progress.loss is not None else "",
        f"{progress.samples_per_s:,.0f} images/s" if progress.samples_per_s else "",
        f"validation top-1 {progress.val_top1:.2%}" if progress.val_top1 is not None else "",
        f"about {format_duration(round(left_s))} left" if left_s and not progress.ended else "",
    ]
    return ", ".join(part for part in parts if part)


def format_checkpoints(run: Run, analysis: RunAnalysis) -> str:
    """Return where the checkpoints of a run are; empty if it has reported none."""
    from stoker.launchers.checkpoint_location import locate_checkpoints

    location = locate_checkpoints(run.files, analysis)
    return f"checkpoints: {location}" if location else ""


def _estimate_time_left(analysis: RunAnalysis, status: JobStatus) -> float | None:
    """Return the remaining seconds of a run; None if it is not running."""
    return analysis.eta() if status.state == "running" else None


def list_insights(analysis: RunAnalysis, status: JobStatus) -> list[str]:
    """Return the verdict, the cost of restarts, and warnings about the machine."""
    verdict, restarts = analysis.verdict(), analysis.restarts(status.stopped_attempts)
    verdicts = [verdict.sentence] if verdict.bound_by != "unknown" else []
    return [*verdicts, *([restarts.sentence] if restarts.count else []), *analysis.remarks()]


def format_elapsed(status: JobStatus) -> str:
    """Return how long a run has taken so far."""
    from stoker.core.units import format_duration

    return format_duration(round((status.ended or time.time()) - status.began)) if status.began else "–"


def describe_run(run: Run) -> dict[str, Any]:
    """Return everything known about a run as plain values, for `--json`."""
    from stoker.launchers.checkpoint_location import locate_checkpoints

    analysis, status = run.analysis(), run.status()
    return {
        "run": run.id,
        "handle": run.handle,
        "folder": str(run.folder),
        **status_to_dict(status),
        "progress": analysis.progress(),
        "checkpoints": locate_checkpoints(run.files, analysis),
        "eta_s": _estimate_time_left(analysis, status),
        "verdict": analysis.verdict(),
        "restarts": analysis.restarts(status.stopped_attempts),
        "remarks": analysis.remarks(),
    }


def status_to_dict(status: JobStatus) -> dict[str, Any]:
    """Return a status as plain values."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(status)
    return fields
