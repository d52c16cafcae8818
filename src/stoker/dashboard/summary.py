"""Summary of a run for the dashboard: state, progress, goodput, verdict and marks, as values of the API."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from stoker.dashboard.runs import DashboardRun
from stoker.dashboard.series import METRICS
from stoker.jobs.status import JobStatus
from stoker.telemetry.analysis import RunAnalysis, TrainingProgress, Verdict
from stoker.telemetry.run_index import Mark, RunIndex

MAX_MARKS = 2000
USEFUL_PARTS = ("compute", "h2d", "rest")


class Goodput(msgspec.Struct, frozen=True):
    """Where the time of a run went, in seconds; `share` is the useful part."""

    total_s: float
    useful_s: float
    input_wait_s: float
    communication_wait_s: float
    checkpoint_s: float
    restart_s: float
    other_s: float

    @property
    def share(self) -> float | None:
        """The useful share of the time; None before the first step."""
        return self.useful_s / self.total_s if self.total_s > 0 and self.useful_s > 0 else None


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the list of runs."""

    id: str
    name: str
    state: str
    launcher: str
    began: float
    ended: float | None
    elapsed_s: float
    attempts: int
    slots: int
    step: int | None
    total_steps: int | None
    epoch: float | None
    epochs: float | None
    loss: float | None
    samples_per_s: float | None
    val_top1: float | None
    eta_s: float | None
    goodput: float | None
    cost: float | None
    """The price of all slots over the elapsed time; None if the job file has no price."""
    bound_by: str
    verdict: str
    message: str
    last_event: float


class StragglerRow(msgspec.Struct, frozen=True):
    """A rank that the others wait for."""

    slot: str
    rank: int
    ratio: float
    part: str


class AttemptRow(msgspec.Struct, frozen=True):
    """A finished attempt."""

    number: int
    began: float
    ended: float
    cause: str
    code: int
    hung: bool


class MetricRow(msgspec.Struct, frozen=True):
    """A metric of slots."""

    name: str
    title: str
    unit: str


class RunDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run except its series."""

    run: RunRow
    goodput: Goodput
    price_per_hour: float | None
    """The price of all slots, in the currency of the job file."""
    shares: dict[str, float]
    stage: str
    stage_share: float
    step_s: float
    stragglers: list[StragglerRow]
    restarts: int
    restart_idle_s: float
    repeated_steps: int
    remarks: list[str]
    attempts: list[AttemptRow]
    marks: list[Mark]
    scalars: list[str]
    metrics: list[MetricRow]
    since: float
    until: float
    job: str


def describe_row(run: DashboardRun) -> RunRow:
    """Return the row of a run in the list."""
    with run.lock:
        index, status = run.index(), run.status()
        return _row(run, index, status, find_goodput(index, status))


def describe_detail(run: DashboardRun) -> RunDetail:
    """Return everything about a run except its series."""
    with run.lock:
        index, status = run.index(), run.status()
        analysis = index.analysis
        verdict, restarts = analysis.verdict(), analysis.restarts(status.stopped_attempts)
        goodput = find_goodput(index, status)
        marks = index.marks()[0]
        return RunDetail(
            run=_row(run, index, status, goodput),
            goodput=goodput,
            price_per_hour=run.price_per_hour,
            shares=dict(verdict.shares),
            stage=verdict.stage,
            stage_share=verdict.stage_share,
            step_s=verdict.step_s,
            stragglers=[StragglerRow(one.slot, one.rank, one.ratio, one.part) for one in verdict.stragglers[:50]],
            restarts=restarts.count,
            restart_idle_s=restarts.idle_s,
            repeated_steps=restarts.repeated_steps,
            remarks=analysis.remarks()[:50],
            attempts=[
                AttemptRow(one.number, one.began, one.ended, one.cause, one.code, one.hung) for one in status.attempts
            ],
            marks=marks[-MAX_MARKS:],
            scalars=_scalar_names(index),
            metrics=_metrics(index),
            since=analysis.first_t,
            until=analysis.last_t,
            job=run.job_yaml(),
        )


def _row(run: DashboardRun, index: RunIndex, status: JobStatus, goodput: Goodput) -> RunRow:
    analysis: RunAnalysis = index.analysis
    progress: TrainingProgress = analysis.progress()
    verdict: Verdict = analysis.verdict()
    return RunRow(
        id=run.id,
        name=run.folder.name,
        state=str(status.state),
        launcher=_launcher(run),
        began=status.began,
        ended=status.ended,
        elapsed_s=goodput.total_s,
        attempts=status.attempt + 1,
        slots=len(status.slots) or len(index.slots),
        step=progress.step,
        total_steps=progress.total_steps,
        epoch=_finite(progress.epoch),
        epochs=_finite(progress.epochs),
        loss=_finite(progress.loss),
        samples_per_s=_finite(progress.samples_per_s),
        val_top1=_finite(progress.val_top1),
        eta_s=analysis.eta() if not status.state.is_final else None,
        goodput=goodput.share,
        cost=None if run.price_per_hour is None else run.price_per_hour * goodput.total_s / 3600,
        bound_by=verdict.bound_by,
        verdict=verdict.sentence if verdict.bound_by != "unknown" else "",
        message=status.message,
        last_event=analysis.last_t,
    )


def find_goodput(index: RunIndex, status: JobStatus) -> Goodput:
    """Return where the time of a run went; the parts of a step are means over all ranks."""
    total = max(0.0, (status.ended or time.time()) - status.began) if status.began else 0.0
    times = index.analysis.spans.by_rank()
    ranks = max(1, len(times))

    def mean(part: str) -> float:
        return sum(rank.seconds.get(part, 0.0) for rank in times.values()) / ranks

    steps_s = sum(rank.total_s for rank in times.values()) / ranks
    verdict, restarts = index.analysis.verdict(), index.analysis.restarts(status.stopped_attempts)
    waits, sync = mean("loader_wait"), mean("collective_wait")
    repeated = min(restarts.repeated_steps * verdict.step_s, max(0.0, steps_s - waits - sync))
    checkpoint = sum(mark.numbers.get("seconds", 0.0) for mark in index.marks()[0] if mark.name == "checkpoint")
    parts = [max(0.0, steps_s - waits - sync - repeated), waits, sync, checkpoint, restarts.idle_s + repeated]
    scale = min(1.0, total / sum(parts)) if sum(parts) > 0 else 1.0  # overlapping parts must not exceed the whole
    useful, waits, sync, checkpoint, lost = (part * scale for part in parts)
    return Goodput(
        total, useful, waits, sync, checkpoint, lost, max(0.0, total - useful - waits - sync - checkpoint - lost)
    )


def _scalar_names(index: RunIndex) -> list[str]:
    used = set(index.tables["scalar"].read("name").tolist())
    return [name for number, name in enumerate(index.names) if number in used]


def _metrics(index: RunIndex) -> list[MetricRow]:
    has_gpu = index.tables["gpu"].rows > 0
    shown = (name for name in METRICS if has_gpu or not name.startswith("gpu."))
    return [MetricRow(name, METRICS[name].title, METRICS[name].unit) for name in shown]


def _launcher(run: DashboardRun) -> str:
    try:
        return run.folder.handle.partition(":")[0]
    except Exception:  # the handle is missing while a run is created
        return ""


def _finite(value: float | None) -> Any:
    return value if value is not None and abs(value) < float("inf") else None
