"""Analysis of a run's events: bottleneck verdict, stragglers, progress, ETA, cost of restarts, remarks on machines.

Pure functions of a list of events, in any order and of any slots and attempts; invalid fields are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from stoker.core.units import format_duration, pluralize
from stoker.telemetry.event_values import mean, number, number_or_nan, percent, recent, sort_events
from stoker.telemetry.events import Event
from stoker.telemetry.remarks import remarks as remarks

PARTS = ("loader_wait", "h2d", "compute", "collective_wait")
"""The spans that a step consists of."""
STAGES = ("fetch", "read", "decode", "transform")
"""The spans `loader.<stage>`: where the loader's threads spend their time."""
MIN_STEPS = 5
"""With fewer steps there is no verdict."""
COMPUTE_BOUND_SHARE = 0.8
"""From this share of compute, a run is compute-bound, whatever else it waits for."""
NOTABLE_SHARE = 0.1
STRAGGLER_RATIO = 1.15
"""A rank whose time per step is at least this multiple of the median is a straggler."""
ETA_WINDOW_S = 300.0
"""The ETA is based on the steps of this last interval."""

_WARMUP_SPANS = 3
"""From this many spans of a name, the first one is skipped: it includes the startup."""
_ADVICE = {
    "fetch": "cache the shards closer to the machine, or fetch more of them in parallel",
    "read": "use a faster disk, or more memory for the page cache",
    "decode": "use more cores, or smaller images",
    "transform": "use more cores, or cheaper transforms",
}
CAUSES = {"loader_wait": "it waits for input", "h2d": "its copies are slow", "compute": "its compute is slow"}
CAUSES_ON_CPU = {**CAUSES, "h2d": "it is slow to create tensors"}

RankKey = tuple[str, int]
"""A slot and a rank."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for: its own time per step, the ratio to the median, and its slow part."""

    slot: str
    rank: int
    ratio: float
    own_s: float
    part: str

    @property
    def name(self) -> str:
        """The rank and its slot: `rank 3 (worker/1)`."""
        return f"rank {self.rank} ({self.slot})" if self.slot else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where the step time goes, as one sentence and as numbers."""

    sentence: str
    bound_by: str
    """`compute`, `input`, `copy`, `ranks` or `rest`; `unknown` with too few steps."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of step time of each of `PARTS` and of `rest`, from 0 to 1."""
    steps: int = 0
    step_s: float = 0.0
    """The mean time of a step."""
    stage: str = ""
    """The loader stage that takes most of the loader's time, and its share of it."""
    stage_share: float = 0.0
    stragglers: tuple[Straggler, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Restarts:
    """The cost of restarts: their number, the time without a step, and the steps that were repeated."""

    count: int
    idle_s: float
    repeated_steps: int

    @property
    def sentence(self) -> str:
        """The cost in one sentence."""
        if not self.count:
            return "no restarts"
        idle, steps = format_duration(self.idle_s), pluralize(self.repeated_steps, "step")
        return f"{pluralize(self.count, 'restart')}: {idle} without a step, {steps} repeated"


class _RankTimes(NamedTuple):
    """The spans of one rank: seconds by name, and the number of steps."""

    seconds: dict[str, float]
    steps: float

    @property
    def own_step_s(self) -> float:
        """The rank's own time per step, without waiting for other ranks."""
        return max(0.0, self.total_s - self.seconds.get("collective_wait", 0.0)) / max(self.steps, 1.0)

    @property
    def total_s(self) -> float:
        """The time of all steps; never less than the sum of their parts."""
        return max(self.seconds.get("step", 0.0), sum(self.seconds.get(part, 0.0) for part in PARTS))

    def part_step_s(self, part: str) -> float:
        """Return the time of one part per step."""
        return self.seconds.get(part, 0.0) / max(self.steps, 1.0)


@dataclass(slots=True)
class _Segment:
    """Uninterrupted training: the processes of one attempt, until the first of them restarts."""

    attempt: int
    ranks: set[RankKey] = field(default_factory=set)
    started_ranks: set[RankKey] = field(default_factory=set)
    points: list[tuple[float, float]] = field(default_factory=list)
    """The time at which each new step was first reported."""
    resumed_steps: list[float] = field(default_factory=list)
    """The steps of `resume` marks."""
    last_report: float = -math.inf
    """When a step was last reported."""

    @property
    def last_step(self) -> float | None:
        """The last step that was reported or resumed from."""
        return max([*self.resumed_steps, *(step for _, step in self.points[-1:])], default=None)

    @property
    def first_progress(self) -> float | None:
        """When the first step after the start was reported."""
        first_step = max([*self.resumed_steps, self.points[0][1]]) if self.points else 0.0
        return next((t for t, step in self.points if step > first_step), None)


def verdict(events: Iterable[Event], *, last_s: float | None = None) -> Verdict:
    """Return what bounds the step time, over the whole run or its last seconds."""
    chosen = recent(events, last_s)
    times = _times_by_rank(chosen)
    steps = int(max((rank.steps for rank in times.values()), default=0))
    total_s = sum(rank.total_s for rank in times.values())
    if steps < MIN_STEPS or total_s <= 0:
        return Verdict(_unknown_sentence(steps), "unknown", steps=steps)
    shares = {part: sum(rank.seconds.get(part, 0.0) for rank in times.values()) / total_s for part in PARTS}
    shares["rest"] = max(0.0, 1 - sum(shares.values()))
    stage, stage_share = _busiest_stage(times.values())
    slow = _find_stragglers(times)
    bound_by, on_cpu = _bound_by(shares), _has_no_gpu(chosen)
    sentences: dict[str, Callable[[], str]] = {
        "compute": lambda: _compute_sentence(shares),
        "input": lambda: _input_sentence(shares, stage, stage_share, chosen),
        "copy": lambda: _copy_sentence(shares, on_cpu=on_cpu),
        "ranks": lambda: _ranks_sentence(shares, slow, len(times), on_cpu=on_cpu),
        "rest": lambda: _rest_sentence(shares, on_cpu=on_cpu),
    }
    return Verdict(
        sentences[bound_by](),
        bound_by,
        shares=shares,
        steps=steps,
        step_s=total_s / sum(max(rank.steps, 1.0) for rank in times.values()),
        stage=stage,
        stage_share=stage_share,
        stragglers=slow,
    )


def stragglers(events: Iterable[Event], *, last_s: float | None = None) -> tuple[Straggler, ...]:
    """Return the ranks whose own time per step is well above the median, slowest first."""
    return _find_stragglers(_times_by_rank(recent(events, last_s)))


def progress(events: Iterable[Event]) -> TrainingProgress:
    """Return the progress of the newest attempt, with the last value of each scalar up to its step."""
    ordered = sort_events(events)
    segments = _segments(ordered)
    start, end = _last_mark(ordered, "start"), _last_mark(ordered, "end")
    step = segments[-1].last_step if segments else None
    scalars = {
        event.fields.get("name"): event
        for event in ordered
        if event.kind == "scalar"
        and isinstance(event.fields.get("name"), str)
        # After a restart, a value of a later step is that of an earlier attempt.
        and (step is None or (_get_step(event) or 0.0) <= step)
    }
    if step == 0 and len(segments) > 1:
        step = None  # it has not loaded its checkpoint yet

    def last(name: str) -> float | None:
        return number_or_nan(scalars[name].fields.get("value")) if name in scalars else None

    total = number(start.fields.get("total_steps")) if start else None
    newest = segments[-1].attempt if segments else max((event.attempt for event in ordered), default=0)
    top1 = last("val_top1")
    return TrainingProgress(
        attempt=newest,
        step=None if step is None else int(step),
        total_steps=None if total is None else int(total),
        epoch=last("epoch"),
        epochs=number(start.fields.get("epochs")) if start else None,
        loss=last("loss"),
        samples_per_s=last("samples_per_s"),
        val_top1=top1 if top1 is not None or end is None else number(end.fields.get("val_top1")),
        ended=end is not None and end.attempt == newest,
    )


def eta(events: Iterable[Event]) -> float | None:
    """Return the remaining seconds after the last event, at the pace of the last minutes; None if unknown."""
    chosen = list(events)
    current = progress(chosen)
    if current.ended:
        return 0.0
    segments = _segments(sort_events(chosen))
    if current.total_steps is None or current.step is None or not segments:
        return None
    remaining = current.total_steps - current.step
    if remaining <= 0:
        return 0.0
    points, last_report = _points_at_pace(segments), segments[-1].last_report
    window = [point for point in points if point[0] >= last_report - ETA_WINDOW_S]
    if not window:  # no new step in all that time
        return None
    first = points[max(0, len(points) - len(window) - 1)]
    seconds, steps = last_report - first[0], points[-1][1] - first[1]
    return remaining * seconds / steps if seconds > 0 and steps > 0 else None


def _points_at_pace(segments: Sequence[_Segment]) -> list[tuple[float, float]]:
    """Return the points of the last segment without a step that was reported before the training was resumed."""
    points, resumed = segments[-1].points, max(segments[-1].resumed_steps, default=0.0)
    made = [point for point in points if point[1] >= resumed]
    # Without a `resume` mark, a first step of 0 may be that of a program that has not loaded its checkpoint yet.
    may_have_resumed = len(segments) > 1 or len(made) > 2
    return made[1:] if made and made[0][1] == 0 and may_have_resumed else made


def restarts(events: Iterable[Event], *, stopped: Collection[int] = ()) -> Restarts:
    """Return the cost of restarts: those of whole attempts, and those by torchrun within one.

    Resuming after one of the `stopped` attempts, which were stopped on purpose, is not a restart.
    """
    segments = _segments(sort_events(events))
    idle_s = repeated = 0.0
    furthest = -math.inf
    last_progress: float | None = None
    resumptions = 0
    for before, segment in zip([None, *segments], segments, strict=False):
        if before and before.attempt in stopped and segment.attempt != before.attempt:
            resumptions += 1
            furthest, last_progress = -math.inf, None
        if last_progress is not None and segment.first_progress is not None:
            idle_s += max(0.0, segment.first_progress - last_progress)
        # A rank may send a heartbeat with step 0 before it knows where it resumes.
        first_step = max(segment.resumed_steps, default=segment.points[0][1] if segment.points else math.inf)
        last_step = segment.last_step
        if last_step is not None:
            repeated += max(0.0, min(last_step, furthest) - first_step)
            furthest = max(furthest, last_step)
        if segment.points:
            last_progress = max(last_progress or segment.points[-1][0], segment.points[-1][0])
    return Restarts(max(0, len(segments) - 1 - resumptions), idle_s, int(repeated))


# --- Step times


def _times_by_rank(ordered: Sequence[Event]) -> dict[RankKey, _RankTimes]:
    """Sum up the spans of each rank, without the first span of each process, which includes its startup."""
    spans: dict[tuple[RankKey, int, int, str], list[Event]] = {}
    for event in ordered:
        name, length = event.fields.get("name"), number(event.fields.get("length"))
        if event.kind == "span" and isinstance(name, str) and length is not None and length >= 0:
            spans.setdefault(((event.slot, event.rank), event.attempt, event.pid, name), []).append(event)
    seconds: dict[RankKey, dict[str, float]] = {}
    counts: dict[RankKey, dict[str, float]] = {}
    for (rank, _, _, name), group in spans.items():
        used = group[1:] if len(group) >= _WARMUP_SPANS else group
        lengths = sum(number(event.fields["length"]) or 0.0 for event in used)
        for sums, value in ((seconds, lengths), (counts, sum(_step_count(event) for event in used))):
            by_name = sums.setdefault(rank, {})
            by_name[name] = by_name.get(name, 0.0) + value
    times = {
        rank: _RankTimes(seconds[rank], steps.get("step", max(steps.get(part, 0.0) for part in PARTS)))
        for rank, steps in counts.items()
    }
    return {rank: spent for rank, spent in times.items() if spent.total_s > 0}


def _step_count(event: Event) -> float:
    count = number(event.fields.get("count", 1))
    return count if count is not None and count > 0 else 0.0


def _find_stragglers(times: Mapping[RankKey, _RankTimes]) -> tuple[Straggler, ...]:
    ranks = {rank: spent for rank, spent in times.items() if spent.steps >= MIN_STEPS}
    if len(ranks) < 2:
        return ()
    median_s = median_low(spent.own_step_s for spent in ranks.values())
    if median_s <= 0:
        return ()
    slow = []
    for (slot, rank), spent in ranks.items():
        ratio = spent.own_step_s / median_s
        if ratio >= STRAGGLER_RATIO:
            slow.append(Straggler(slot, rank, ratio, spent.own_step_s, _slow_part(spent, list(ranks.values()))))
    return tuple(sorted(slow, key=lambda straggler: (-straggler.ratio, straggler.rank, straggler.slot)))


def _slow_part(slow: _RankTimes, ranks: Sequence[_RankTimes]) -> str:
    """Return the part that is furthest above its median, if it explains at least half of the difference."""
    excess = {part: slow.part_step_s(part) - median_low(other.part_step_s(part) for other in ranks) for part in CAUSES}
    part = max(excess, key=lambda name: excess[name])
    total = slow.own_step_s - median_low(other.own_step_s for other in ranks)
    return part if excess[part] > total / 2 else "rest"


def _busiest_stage(times: Iterable[_RankTimes]) -> tuple[str, float]:
    """Return the loader stage that takes most time, and its share of the loader's time."""
    ranks = list(times)
    seconds = {stage: sum(times.seconds.get(f"loader.{stage}", 0.0) for times in ranks) for stage in STAGES}
    total = sum(seconds.values())
    if total <= 0:
        return "", 0.0
    stage = max(seconds, key=lambda name: seconds[name])
    return stage, seconds[stage] / total


def _has_no_gpu(events: Sequence[Event]) -> bool:
    """Whether the machines are known to have no GPU: there are profiles, and none has a GPU in it."""
    gpus = [event.fields.get("gpu") for event in events if event.kind == "profile"]
    return bool(gpus) and not any(gpus)


def _bound_by(shares: Mapping[str, float]) -> str:
    waits = {"input": shares["loader_wait"], "copy": shares["h2d"], "ranks": shares["collective_wait"]}
    if shares["rest"] > shares["compute"]:
        waits["rest"] = shares["rest"]
    longest = max(waits, key=lambda name: waits[name])
    is_compute_bound = shares["compute"] >= COMPUTE_BOUND_SHARE or waits[longest] < NOTABLE_SHARE
    return "compute" if is_compute_bound else longest


# --- Sentences


def _unknown_sentence(steps: int) -> str:
    reported = f"{pluralize(steps, 'step')} so far" if steps else "no step reported yet"
    return f"too few steps for a verdict: {reported}"


def _compute_sentence(shares: Mapping[str, float]) -> str:
    sentence = f"compute-bound: {percent(shares['compute'])} of step time is spent on compute"
    waiting = f"{percent(shares['loader_wait'])} waiting for input"
    ranks = shares["collective_wait"]
    if ranks < NOTABLE_SHARE:
        return f"{sentence} and {waiting}"
    return f"{sentence}, {waiting} and {percent(ranks)} waiting for other ranks"


def _input_sentence(shares: Mapping[str, float], stage: str, stage_share: float, events: Sequence[Event]) -> str:
    sentence = f"input-bound: {percent(shares['loader_wait'])} of step time is spent waiting for input"
    if not stage:
        return f"{sentence}; the loader does not report its stages"
    advice = _ADVICE[stage]
    cpu = mean([number(event.fields.get("cpu_pct")) for event in events if event.kind == "profile"])
    if stage in ("decode", "transform") and cpu is not None and cpu < 60:
        advice = f"CPU utilization is only {cpu:.0f}%: use more loader threads"
    return f"{sentence}, {stage} takes {percent(stage_share)} of the loader's time; {advice}"


def _copy_sentence(shares: Mapping[str, float], *, on_cpu: bool) -> str:
    share = f"{percent(shares['h2d'])} of step time is spent"
    if on_cpu:
        return f"copy-bound: {share} creating tensors from batches; use more cores, or smaller images"
    return f"copy-bound: {share} copying batches to the device; pin memory, or copy uint8 instead of float32"


def _ranks_sentence(shares: Mapping[str, float], slow: Sequence[Straggler], ranks: int, *, on_cpu: bool) -> str:
    sentence = (
        f"synchronization-bound: {percent(shares['collective_wait'])} of step time is spent waiting for other ranks"
    )
    if slow:
        first = slow[0]
        sentence += f"; {first.name} is a straggler with {first.ratio:.1f}× the median step time"
        causes = CAUSES_ON_CPU if on_cpu else CAUSES
        return f"{sentence}: {causes[first.part]}" if first.part in causes else sentence
    if ranks < 2:
        return f"{sentence}, which report no steps"
    if shares["loader_wait"] >= NOTABLE_SHARE:
        sentence += f", {percent(shares['loader_wait'])} waiting for input"
    return f"{sentence}; there is no straggler: the network is slow, or the batches are small"


def _rest_sentence(shares: Mapping[str, float], *, on_cpu: bool) -> str:
    copying = "creating tensors" if on_cpu else "copying"
    sentence = (
        f"{percent(shares['rest'])} of step time is spent outside loading, {copying}, compute and synchronization"
    )
    return f"overhead-bound: {sentence}, and {percent(shares['compute'])} on compute; profile the code between steps"


# --- Segments


def _segments(ordered: Sequence[Event]) -> list[_Segment]:
    """Split a run at restarts: a new attempt, or a rank that is another process within one."""
    segments: list[_Segment] = []
    owners: dict[tuple[int, RankKey, int], _Segment] = {}
    for event in ordered:
        name = event.fields.get("name") if event.kind == "mark" else None
        step = _get_step(event)
        if name != "start" and step is None:
            continue
        rank = (event.slot, event.rank)
        process = (event.attempt, rank, event.pid)
        segment = owners.get(process)
        if segment is None or (name == "start" and rank in segment.started_ranks):
            if not segments or event.attempt != segments[-1].attempt or rank in segments[-1].ranks:
                segments.append(_Segment(event.attempt))
            segment = owners[process] = segments[-1]
            segment.ranks.add(rank)
        if name == "start":
            segment.started_ranks.add(rank)
        elif name == "resume" and step is not None:
            segment.resumed_steps.append(step)
        elif name is None and step is not None:
            segment.last_report = max(segment.last_report, event.t)
            if not segment.points or step > segment.points[-1][1]:
                segment.points.append((event.t, step))
    return segments


def _get_step(event: Event) -> float | None:
    if event.kind == "profile":
        return None
    step = number(event.fields.get("step"))
    return step if step is not None and step >= 0 else None


def _last_mark(ordered: Sequence[Event], name: str) -> Event | None:
    return next((e for e in reversed(ordered) if e.kind == "mark" and e.fields.get("name") == name), None)
