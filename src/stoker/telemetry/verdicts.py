"""Verdict: what bounds the step time of a run, and which ranks the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

import msgspec

from stoker.core.units import pluralize
from stoker.telemetry.event_values import percent
from stoker.telemetry.machine_totals import MachineTotals
from stoker.telemetry.segments import ProcessKey, RankKey

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


class _SpanSum(msgspec.Struct):
    """The spans of one name of a process: their number and sums, and the first one, which includes the startup."""

    spans: int = 0
    seconds: float = 0.0
    steps: float = 0.0
    first: tuple[float, int, float, float] = (0.0, 0, 0.0, 0.0)
    """Time, sequence number, seconds and steps of the first span."""


class SpanTotals(msgspec.Struct):
    """Sums of the spans of each process by name."""

    sums: dict[ProcessKey, dict[str, _SpanSum]] = {}

    def add(self, key: ProcessKey, at: tuple[float, int], name: str, seconds: float, steps: float) -> None:
        """Add a span, in any order."""
        span = self.sums.setdefault(key, {}).setdefault(name, _SpanSum())
        if not span.spans or at < span.first[:2]:
            span.first = (*at, seconds, steps)
        span.spans, span.seconds, span.steps = span.spans + 1, span.seconds + seconds, span.steps + steps

    def by_rank(self) -> dict[RankKey, _RankTimes]:
        """Return the times of each rank, without the first span of each process."""
        seconds: dict[RankKey, dict[str, float]] = {}
        counts: dict[RankKey, dict[str, float]] = {}
        for (_, slot, rank, _), names in self.sums.items():
            by_name, steps = seconds.setdefault((slot, rank), {}), counts.setdefault((slot, rank), {})
            for name, span in names.items():
                has_warmup = span.spans >= _WARMUP_SPANS
                by_name[name] = by_name.get(name, 0.0) + span.seconds - has_warmup * span.first[2]
                steps[name] = steps.get(name, 0.0) + span.steps - has_warmup * span.first[3]
        times = {
            rank: _RankTimes(seconds[rank], steps.get("step", max(steps.get(part, 0.0) for part in PARTS)))
            for rank, steps in counts.items()
        }
        return {rank: spent for rank, spent in times.items() if spent.total_s > 0}


def find_verdict(spans: SpanTotals, machines: MachineTotals) -> Verdict:
    """Return what bounds the step time."""
    times = spans.by_rank()
    steps = int(max((rank.steps for rank in times.values()), default=0))
    total_s = sum(rank.total_s for rank in times.values())
    if steps < MIN_STEPS or total_s <= 0:
        return Verdict(_unknown_sentence(steps), "unknown", steps=steps)
    shares = {part: sum(rank.seconds.get(part, 0.0) for rank in times.values()) / total_s for part in PARTS}
    shares["rest"] = max(0.0, 1 - sum(shares.values()))
    stage, stage_share = _busiest_stage(times.values())
    slow = find_stragglers(times)
    bound_by, on_cpu = _bound_by(shares), machines.profiles > 0 and not machines.has_gpu
    sentences: dict[str, Callable[[], str]] = {
        "compute": lambda: _compute_sentence(shares),
        "input": lambda: _input_sentence(shares, stage, stage_share, machines.overall_mean("cpu_pct")),
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


def find_stragglers(times: Mapping[RankKey, _RankTimes]) -> tuple[Straggler, ...]:
    """Return the ranks whose own time per step is well above the median, slowest first."""
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


def _bound_by(shares: Mapping[str, float]) -> str:
    waits = {"input": shares["loader_wait"], "copy": shares["h2d"], "ranks": shares["collective_wait"]}
    if shares["rest"] > shares["compute"]:
        waits["rest"] = shares["rest"]
    longest = max(waits, key=lambda name: waits[name])
    is_compute_bound = shares["compute"] >= COMPUTE_BOUND_SHARE or waits[longest] < NOTABLE_SHARE
    return "compute" if is_compute_bound else longest


# --- Sentences


def _unknown_sentence(steps: int) -> str:
    return f"too few steps for a verdict: {pluralize(steps, 'step')} so far" if steps else "no steps reported yet"


def _compute_sentence(shares: Mapping[str, float]) -> str:
    sentence = f"compute-bound: {percent(shares['compute'])} of step time is spent on compute"
    waiting = f"{percent(shares['loader_wait'])} waiting for input"
    ranks = shares["collective_wait"]
    if ranks < NOTABLE_SHARE:
        return f"{sentence} and {waiting}"
    return f"{sentence}, {waiting} and {percent(ranks)} waiting for other ranks"


def _input_sentence(shares: Mapping[str, float], stage: str, stage_share: float, cpu: float | None) -> str:
    sentence = f"input-bound: {percent(shares['loader_wait'])} of step time is spent waiting for input"
    if not stage:
        return f"{sentence}; the loader does not report its stages"
    advice = _ADVICE[stage]
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
