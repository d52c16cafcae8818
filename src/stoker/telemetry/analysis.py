"""Analysis of a run's events: bottleneck verdict, stragglers, progress, ETA, cost of restarts, remarks on machines.

`RunAnalysis` takes events as they come and keeps only totals, so that it costs the same on the first and on the
thirtieth day. The functions analyze a list of events, in any order and of any slots and attempts. Invalid fields are
ignored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from stoker.telemetry.event_values import is_plausible_time, number, number_or_nan, recent, sort_events
from stoker.telemetry.events import Event
from stoker.telemetry.machine_totals import MachineTotals, ProfileBlock
from stoker.telemetry.profile_rows import ProfileRows
from stoker.telemetry.remarks import find_remarks
from stoker.telemetry.scalar_history import ScalarPoint, add_point, last_up_to
from stoker.telemetry.segments import (
    HeartbeatPosition,
    ProcessKey,
    Restarts,
    Segment,
    StepLog,
    restart_cost,
    seconds_per_step,
)
from stoker.telemetry.verdicts import (
    CAUSES,
    CAUSES_ON_CPU,
    PARTS,
    STAGES,
    SpanTotals,
    Straggler,
    Verdict,
    find_stragglers,
    find_verdict,
)

__all__ = [
    "CAUSES", "CAUSES_ON_CPU", "PARTS", "STAGES", "Restarts", "RunAnalysis", "Straggler", "TrainingProgress", "Verdict",
    "analyze", "eta", "progress", "remarks", "restarts", "stragglers", "verdict",
]  # fmt: skip

CHECKPOINT_MARK = "checkpoint"
"""The mark that a trainer records for each checkpoint that it has written, with its path or URL."""
_PROGRESS_SCALARS = ("epoch", "loss", "samples_per_s", "val_top1")


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a training: the last reported values, None if a value was never reported."""

    attempt: int = 0
    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    epochs: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    val_top1: float | None = None
    ended: bool = False


class _LastMark(msgspec.Struct):
    """The last mark of a name, with the numbers in it."""

    order: tuple[int, float, int]
    numbers: dict[str, float]


class WrittenCheckpoint(msgspec.Struct):
    """The newest checkpoint that a program has reported, by its path or URL, and the slot that wrote it."""

    t: float
    slot: str
    where: str


class _State(msgspec.Struct):
    """The analysis of everything but profiles."""

    attempt: int | None = None
    """The newest attempt of any event."""
    steps: StepLog = msgspec.field(default_factory=StepLog)
    spans: SpanTotals = msgspec.field(default_factory=SpanTotals)
    scalars: dict[str, list[ScalarPoint]] = {}
    marks: dict[str, _LastMark] = {}
    checkpoint: WrittenCheckpoint | None = None
    first_t: float = math.inf
    last_t: float = 0.0


class RunAnalysis:
    """The analysis of all events so far; the events of each process must be added in order."""

    def __init__(self) -> None:
        self._state = _State()
        self.machines = MachineTotals()

    @property
    def steps(self) -> StepLog:
        """The steps and heartbeats of every process."""
        return self._state.steps

    @property
    def spans(self) -> SpanTotals:
        """The sums of the spans of every process."""
        return self._state.spans

    @property
    def first_t(self) -> float:
        """The time of the oldest event; that of the newest if there is none."""
        return min(self._state.first_t, self._state.last_t)

    @property
    def last_t(self) -> float:
        """The time of the newest event."""
        return self._state.last_t

    @property
    def checkpoint(self) -> WrittenCheckpoint | None:
        """The newest checkpoint; None if none was reported."""
        return self._state.checkpoint

    def add(self, event: Event) -> None:
        """Add any event except a profile."""
        if not is_plausible_time(event.t):
            return
        state = self._state
        state.attempt = event.attempt if state.attempt is None else max(state.attempt, event.attempt)
        state.first_t, state.last_t = min(state.first_t, event.t), max(state.last_t, event.t)
        name = event.fields.get("name")
        key, at = (event.attempt, event.slot, event.rank, event.pid), (event.t, event.seq)
        self._add_step(event, key, at, name if event.kind == "mark" else None)
        if event.kind == "span" and isinstance(name, str):
            length, count = number(event.fields.get("length")), number(event.fields.get("count", 1))
            if length is not None and length >= 0:
                state.spans.add(key, at, name, length, count if count is not None and count > 0 else 0.0)
        elif event.kind == "scalar" and name in _PROGRESS_SCALARS:
            value = number_or_nan(event.fields.get("value"))
            if value is not None:
                point = ScalarPoint(event.attempt, event.t, event.seq, number(event.fields.get("step")), value)
                add_point(state.scalars.setdefault(name, []), point)
        elif event.kind == "mark" and name in ("start", "end"):
            self._keep_mark(event, name)
        elif event.kind == "mark" and name == CHECKPOINT_MARK:
            self._keep_checkpoint(event)

    def add_profiles(self, rows: ProfileRows) -> ProfileBlock:
        """Add profiles, in any order; return them as arrays."""
        block = self.machines.add(rows)
        if len(block.t):
            state = self._state
            newest = int(block.attempts.max())
            state.attempt = newest if state.attempt is None else max(state.attempt, newest)
            state.first_t = min(state.first_t, float(block.t.min()))
            state.last_t = max(state.last_t, float(block.t.max()))
        return block

    def verdict(self) -> Verdict:
        """Return what bounds the step time."""
        return find_verdict(self._state.spans, self.machines)

    def stragglers(self) -> tuple[Straggler, ...]:
        """Return the ranks whose own time per step is well above the median, slowest first."""
        return find_stragglers(self._state.spans.by_rank())

    def progress(self) -> TrainingProgress:
        """Return the progress of the newest attempt, with the last value of each scalar up to its step."""
        return self._progress(self._state.steps.segments())

    def eta(self) -> float | None:
        """Return the remaining seconds after the last event, at the pace of the last minutes; None if unknown."""
        segments = self._state.steps.segments()
        current = self._progress(segments)
        if current.ended:
            return 0.0
        if current.total_steps is None or current.step is None or not segments:
            return None
        remaining = current.total_steps - current.step
        if remaining <= 0:
            return 0.0
        pace = seconds_per_step(segments)
        return None if pace is None else remaining * pace

    def restarts(self, stopped: Collection[int] = ()) -> Restarts:
        """Return the cost of restarts: those of whole attempts, and those by torchrun within one.

        Resuming after one of the `stopped` attempts, which were stopped on purpose, is not a restart.
        """
        return restart_cost(self._state.steps.segments(), stopped)

    def remarks(self) -> list[str]:
        """Return what is unusual on the machines, and in the loss."""
        has_steps = any(process.last_point for process in self.steps.processes)
        return find_remarks(self.machines, self._state.scalars.get("loss", []), has_steps=has_steps)

    def dump(self) -> bytes:
        """Return the analysis as bytes, for an index on disk."""
        return msgspec.msgpack.encode([msgspec.msgpack.encode(self._state), self.machines.dump()])

    @classmethod
    def load(cls, data: bytes) -> RunAnalysis:
        """Return the analysis that `dump` has written; raise msgspec.MsgspecError if it is not one."""
        state, machines = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
        analysis = cls()
        analysis._state = msgspec.msgpack.decode(state, type=_State)
        analysis.machines = MachineTotals.load(machines)
        return analysis

    def _add_step(self, event: Event, key: ProcessKey, at: tuple[float, int], mark: object) -> None:
        step = number(event.fields.get("step"))
        is_step = step is not None and step >= 0
        if mark == "start":
            self._state.steps.add_start(key, at)
        elif step is None or not is_step:
            return
        elif mark == "resume":
            self._state.steps.add_resume(key, at, step)
        elif mark is not None:
            self._state.steps.add_mark(key, at)
        else:
            self._state.steps.add_step(key, at, step)
        if event.kind == "heartbeat" and step is not None:
            sample = number(event.fields.get("sample"))
            position = HeartbeatPosition(
                event.t, step, str(event.fields.get("shard", "")), -1 if sample is None else int(sample)
            )
            self._state.steps.add_position(key, at, position)

    def _keep_mark(self, event: Event, name: str) -> None:
        order = (event.attempt, event.t, event.seq)
        known = self._state.marks.get(name)
        if known is None or order >= known.order:
            fields = ("total_steps", "epochs", "val_top1")
            numbers = {field: value for field in fields if (value := number(event.fields.get(field))) is not None}
            self._state.marks[name] = _LastMark(order, numbers)

    def _keep_checkpoint(self, event: Event) -> None:
        known = self._state.checkpoint
        if known is None or event.t >= known.t:
            where = str(event.fields.get("detail", ""))
            self._state.checkpoint = WrittenCheckpoint(event.t, event.slot, where)

    def _progress(self, segments: Sequence[Segment]) -> TrainingProgress:
        state = self._state
        start, end = state.marks.get("start"), state.marks.get("end")
        numbers = start.numbers if start else {}
        step = segments[-1].last_step if segments else None
        last = {name: last_up_to(points, step) for name, points in state.scalars.items()}
        if step == 0 and len(segments) > 1:
            step = None  # it has not loaded its checkpoint yet
        total, top1 = numbers.get("total_steps"), last.get("val_top1")
        newest = segments[-1].attempt if segments else state.attempt or 0
        return TrainingProgress(
            attempt=newest,
            step=None if step is None else int(step),
            total_steps=None if total is None else int(total),
            epoch=last.get("epoch"),
            epochs=numbers.get("epochs"),
            loss=last.get("loss"),
            samples_per_s=last.get("samples_per_s"),
            val_top1=top1 if top1 is not None or end is None else end.numbers.get("val_top1"),
            ended=end is not None and end.order[0] == newest,
        )


def analyze(events: Iterable[Event], *, last_s: float | None = None) -> RunAnalysis:
    """Return the analysis of events, or of those of the last seconds."""
    analysis = RunAnalysis()
    chosen = sort_events(events) if last_s is None else recent(events, last_s)
    profiles = ProfileRows()
    for event in chosen:
        if event.kind == "profile":
            profiles.add_event(event)
        else:
            analysis.add(event)
    analysis.add_profiles(profiles)
    return analysis


def verdict(events: Iterable[Event], *, last_s: float | None = None) -> Verdict:
    """Return what bounds the step time, over the whole run or its last seconds."""
    return analyze(events, last_s=last_s).verdict()


def stragglers(events: Iterable[Event], *, last_s: float | None = None) -> tuple[Straggler, ...]:
    """Return the ranks whose own time per step is well above the median, slowest first."""
    return analyze(events, last_s=last_s).stragglers()


def progress(events: Iterable[Event]) -> TrainingProgress:
    """Return the progress of the newest attempt, with the last value of each scalar up to its step."""
    return analyze(events).progress()


def eta(events: Iterable[Event]) -> float | None:
    """Return the remaining seconds after the last event, at the pace of the last minutes; None if unknown."""
    return analyze(events).eta()


def restarts(events: Iterable[Event], *, stopped: Collection[int] = ()) -> Restarts:
    """Return the cost of restarts: those of whole attempts, and those by torchrun within one."""
    return analyze(events).restarts(stopped)


def remarks(events: Iterable[Event], *, last_s: float | None = None) -> list[str]:
    """Return what is unusual on the machines, and in the loss."""
    return analyze(events, last_s=last_s).remarks()
