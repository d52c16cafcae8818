"""What the events of a run mean, in sentences and numbers: where the time goes, who is slow, how long it will take.

Pure: functions of a list of events, in any order, of any slots and attempts; fields that make no sense are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any, NamedTuple

from stoker.core.units import format_bytes, format_duration
from stoker.telemetry.events import Event

PARTS = ("loader_wait", "h2d", "compute", "collective_wait")
"""The spans that a step is made of."""
STAGES = ("fetch", "read", "decode", "transform")
"""The spans `loader.<stage>`: what the loader's threads spend their time on."""
FEWEST_STEPS = 5
"""Fewer than these say nothing."""
MOSTLY = 0.8
"""From this share on, compute is what a run is bound by, whatever else waits."""
NOTABLE = 0.1
STRAGGLES = 1.15
"""A rank this much above the median is a straggler."""
RECENT_S = 300.0
"""How far back the rate of steps is taken for what is left."""

_WARM_UP = 3
"""With so many spans of a name, the first, which holds the start of everything, is left out."""
_LARGEST = 1e15
_ADVICE = {
    "fetch": "bring the shards nearer with a cache, or fetch more at a time",
    "read": "use a faster disk, or more memory for its cache",
    "decode": "give it more cores, or smaller images",
    "transform": "give it more cores, or do less to each image",
}
_CAUSES = {"loader_wait": "waits for input", "h2d": "is slow to copy", "compute": "is slow to compute"}
_CAUSES_ON_CPU = {**_CAUSES, "h2d": "is slow to make tensors"}

Who = tuple[str, int]
"""A slot and a rank."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others wait for: its own time per step, as a multiple of the median, and what is slow there."""

    slot: str
    rank: int
    ratio: float
    own_s: float
    part: str

    @property
    def name(self) -> str:
        """Name it: `rank 3 (worker/1)`."""
        return f"rank {self.rank} ({self.slot})" if self.slot else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where the time of the steps goes, as one sentence and as numbers."""

    sentence: str
    bound_by: str
    """`compute`, `input`, `copy`, `ranks` or `rest`; `unknown` when there is too little to judge."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of each of `PARTS`, and `rest`: from 0 to 1."""
    steps: int = 0
    step_s: float = 0.0
    """The mean time of one step."""
    stage: str = ""
    """What the loader spends most of its time on, and its share of it."""
    stage_share: float = 0.0
    stragglers: tuple[Straggler, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: what was told last, None for what was not."""

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
    """What restarts cost: how many there were, the time without a step, and steps that were made twice."""

    count: int
    idle_s: float
    repeated_steps: int

    @property
    def sentence(self) -> str:
        """Tell it in one sentence."""
        if not self.count:
            return "no restart"
        times = "1 restart" if self.count == 1 else f"{self.count} restarts"
        steps = "1 step" if self.repeated_steps == 1 else f"{self.repeated_steps:,} steps"
        return f"{times}: {format_duration(self.idle_s)} without a step, {steps} made twice"


class _Sums(NamedTuple):
    """The spans of one rank: seconds by name, and the steps they are of."""

    seconds: dict[str, float]
    steps: float

    def own(self) -> float:
        """Give the rank's own time per step: all but its waiting for others."""
        return max(0.0, self.step_s() - self.seconds.get("collective_wait", 0.0)) / max(self.steps, 1.0)

    def step_s(self) -> float:
        """Give the seconds of all steps; never less than their parts."""
        return max(self.seconds.get("step", 0.0), sum(self.seconds.get(part, 0.0) for part in PARTS))


@dataclass(slots=True)
class _Life:
    """One go at the training: the processes of one attempt, up to the first of them that starts again."""

    attempt: int
    members: set[Who] = field(default_factory=set)
    starters: set[Who] = field(default_factory=set)
    points: list[tuple[float, float]] = field(default_factory=list)
    """When each new step was first told."""
    resumed: list[float] = field(default_factory=list)
    """The step at which it went on, told by who resumed."""
    seen: float = -math.inf
    """When a step was told last."""

    @property
    def reached(self) -> float | None:
        """The last step that it is known to have made, or to have gone on from."""
        return self.points[-1][1] if self.points else max(self.resumed, default=None)

    @property
    def first_progress(self) -> float | None:
        """When a step was first made that was not there at its start."""
        begun = max([*self.resumed, self.points[0][1]]) if self.points else 0.0
        return next((t for t, step in self.points if step > begun), None)


def verdict(events: Iterable[Event], *, last_s: float | None = None) -> Verdict:
    """Judge where the time of the steps goes, over the whole run or the last seconds of it."""
    chosen = recent(events, last_s)
    sums = _sums_by_rank(chosen)
    steps = int(max((one.steps for one in sums.values()), default=0))
    total = sum(one.step_s() for one in sums.values())
    if steps < FEWEST_STEPS or total <= 0:
        return Verdict(_too_little(steps), "unknown", steps=steps)
    shares = {part: sum(one.seconds.get(part, 0.0) for one in sums.values()) / total for part in PARTS}
    shares["rest"] = max(0.0, 1 - sum(shares.values()))
    stage, stage_share = _busiest_stage(sums.values())
    slow = _stragglers(sums)
    bound_by, on_cpu = _bound_by(shares), _is_on_cpu(chosen)
    tell: dict[str, Callable[[], str]] = {
        "compute": lambda: _compute_sentence(shares),
        "input": lambda: _input_sentence(shares, stage, stage_share, chosen),
        "copy": lambda: _copy_sentence(shares, on_cpu=on_cpu),
        "ranks": lambda: _ranks_sentence(shares, slow, len(sums), on_cpu=on_cpu),
        "rest": lambda: _rest_sentence(shares, on_cpu=on_cpu),
    }
    return Verdict(
        tell[bound_by](),
        bound_by,
        shares=shares,
        steps=steps,
        step_s=total / sum(max(one.steps, 1.0) for one in sums.values()),
        stage=stage,
        stage_share=stage_share,
        stragglers=slow,
    )


def stragglers(events: Iterable[Event], *, last_s: float | None = None) -> tuple[Straggler, ...]:
    """Find the ranks whose own time per step is well above the median, the slowest first."""
    return _stragglers(_sums_by_rank(recent(events, last_s)))


def progress(events: Iterable[Event]) -> Progress:
    """Tell how far the newest attempt is, and the last of each number that it told."""
    ordered = _ordered(events)
    lives = _lives(ordered)
    start = _last_mark(ordered, "start")
    scalars = {e.fields.get("name"): e for e in ordered if e.kind == "scalar" and isinstance(e.fields.get("name"), str)}

    def last(name: str) -> float | None:
        return _loose(scalars[name].fields.get("value")) if name in scalars else None

    step = lives[-1].reached if lives else None
    total = _number(start.fields.get("total_steps")) if start else None
    end = _last_mark(ordered, "end")
    newest = lives[-1].attempt if lives else max((event.attempt for event in ordered), default=0)
    top1 = last("val_top1")
    return Progress(
        attempt=newest,
        step=None if step is None else int(step),
        total_steps=None if total is None else int(total),
        epoch=last("epoch"),
        epochs=_number(start.fields.get("epochs")) if start else None,
        loss=last("loss"),
        samples_per_s=last("samples_per_s"),
        val_top1=top1 if top1 is not None or end is None else _number(end.fields.get("val_top1")),
        ended=end is not None and end.attempt == newest,
    )


def eta(events: Iterable[Event]) -> float | None:
    """Tell the seconds that are left, counted from the last event, at the pace of the last minutes; None: unknown."""
    chosen = list(events)
    found = progress(chosen)
    if found.ended:
        return 0.0
    lives = _lives(_ordered(chosen))
    if found.total_steps is None or found.step is None or not lives:
        return None
    left = found.total_steps - found.step
    if left <= 0:
        return 0.0
    points, seen = lives[-1].points, lives[-1].seen
    within = [point for point in points if point[0] >= seen - RECENT_S]
    if not within:  # nothing was made in all that time
        return None
    first = points[max(0, len(points) - len(within) - 1)]
    seconds, steps = seen - first[0], points[-1][1] - first[1]
    return left * seconds / steps if seconds > 0 and steps > 0 else None


def restarts(events: Iterable[Event]) -> Restarts:
    """Tell what restarts cost, those of a whole attempt and those that torchrun made within one."""
    lives = _lives(_ordered(events))
    idle = repeated = 0.0
    furthest = -math.inf
    last_t: float | None = None
    for life in lives:
        began_again = life.first_progress
        if last_t is not None and began_again is not None:
            idle += max(0.0, began_again - last_t)
        # A rank may tell that it lives, as step 0, before it knows where it goes on.
        begun = max(life.resumed, default=life.points[0][1] if life.points else math.inf)
        reached = life.reached
        if reached is not None:
            repeated += max(0.0, min(reached, furthest) - begun)
            furthest = max(furthest, reached)
        if life.points:
            last_t = max(last_t or life.points[-1][0], life.points[-1][0])
    return Restarts(max(0, len(lives) - 1), idle, int(repeated))


def remarks(events: Iterable[Event], *, last_s: float | None = None) -> list[str]:
    """List what is worth a look on the machines, and in the loss."""
    chosen = recent(events, last_s)
    by_slot: dict[str, list[Event]] = {}
    for event in chosen:
        if event.kind == "profile":
            by_slot.setdefault(event.slot, []).append(event)
    found = [text for slot, samples in sorted(by_slot.items()) for text in _machine_remarks(slot, samples)]
    return [*found, *_loss_remarks(chosen)]


def recent(events: Iterable[Event], last_s: float | None) -> list[Event]:
    """Choose the events of the last seconds before the newest; all when None, ordered by attempt and time."""
    ordered = _ordered(events)
    if last_s is None or not ordered:
        return ordered
    since = max(event.t for event in ordered) - last_s
    return [event for event in ordered if event.t >= since]


def _ordered(events: Iterable[Event]) -> list[Event]:
    sane = (event for event in events if abs(event.t) < _LARGEST)
    return sorted(sane, key=lambda event: (event.attempt, event.t, event.seq))


# Steps and their parts


def _sums_by_rank(ordered: Sequence[Event]) -> dict[Who, _Sums]:
    spans: dict[tuple[Who, int, int, str], list[Event]] = {}
    for event in ordered:
        name, length = event.fields.get("name"), _number(event.fields.get("length"))
        if event.kind == "span" and isinstance(name, str) and length is not None and length >= 0:
            spans.setdefault(((event.slot, event.rank), event.attempt, event.pid, name), []).append(event)
    sums: dict[Who, _Sums] = {}
    counted: dict[Who, dict[str, float]] = {}
    for (who, _, _, name), found in spans.items():
        used = found[1:] if len(found) >= _WARM_UP else found
        seconds = sums.setdefault(who, _Sums({}, 0.0)).seconds
        seconds[name] = seconds.get(name, 0.0) + sum(_number(event.fields["length"]) or 0.0 for event in used)
        steps = counted.setdefault(who, {})
        steps[name] = steps.get(name, 0.0) + sum(_count(event) for event in used)
    for who, steps in counted.items():
        own = steps.get("step", max((steps.get(part, 0.0) for part in PARTS), default=0.0))
        sums[who] = sums[who]._replace(steps=own)
    return {who: one for who, one in sums.items() if one.step_s() > 0}


def _count(event: Event) -> float:
    count = _number(event.fields.get("count", 1))
    return count if count is not None and count > 0 else 0.0


def _stragglers(sums: Mapping[Who, _Sums]) -> tuple[Straggler, ...]:
    ranks = {who: one for who, one in sums.items() if one.steps >= FEWEST_STEPS}
    if len(ranks) < 2:
        return ()
    middle = median_low(one.own() for one in ranks.values())
    if middle <= 0:
        return ()
    slow = []
    for (slot, rank), one in ranks.items():
        ratio = one.own() / middle
        if ratio >= STRAGGLES:
            slow.append(Straggler(slot, rank, ratio, one.own(), _slow_part(one, list(ranks.values()))))
    return tuple(sorted(slow, key=lambda one: (-one.ratio, one.rank, one.slot)))


def _slow_part(one: _Sums, ranks: Sequence[_Sums]) -> str:
    """Find which part of a rank's own time is furthest above what is usual."""

    def per_step(sums: _Sums, part: str) -> float:
        return sums.seconds.get(part, 0.0) / max(sums.steps, 1.0)

    over = {part: per_step(one, part) - median_low(per_step(other, part) for other in ranks) for part in _CAUSES}
    part = max(over, key=lambda name: over[name])
    excess = one.own() - median_low(other.own() for other in ranks)
    return part if over[part] > excess / 2 else "rest"


def _busiest_stage(sums: Iterable[_Sums]) -> tuple[str, float]:
    chosen = list(sums)
    seconds = {stage: sum(one.seconds.get(f"loader.{stage}", 0.0) for one in chosen) for stage in STAGES}
    total = sum(seconds.values())
    if total <= 0:
        return "", 0.0
    stage = max(seconds, key=lambda name: seconds[name])
    return stage, seconds[stage] / total


def _is_on_cpu(events: Sequence[Event]) -> bool:
    """Whether machines are known to have no GPU: those that tell of themselves tell of none."""
    told = [event.fields.get("gpu") for event in events if event.kind == "profile"]
    return bool(told) and not any(told)


def _bound_by(shares: Mapping[str, float]) -> str:
    waits = {"input": shares["loader_wait"], "copy": shares["h2d"], "ranks": shares["collective_wait"]}
    if shares["rest"] > shares["compute"]:
        waits["rest"] = shares["rest"]
    worst = max(waits, key=lambda name: waits[name])
    return "compute" if shares["compute"] >= MOSTLY or waits[worst] < NOTABLE else worst


# Sentences


def _too_little(steps: int) -> str:
    if not steps:
        return "too little to judge: no step has been told yet"
    return f"too little to judge: {'1 step' if steps == 1 else f'{steps} steps'} so far"


def _compute_sentence(shares: Mapping[str, float]) -> str:
    text = f"compute-bound: {_percent(shares['compute'])} of the time is compute"
    others = shares["collective_wait"]
    more = f", other ranks {_percent(others)}" if others >= NOTABLE else ""
    return f"{text}, input waits {_percent(shares['loader_wait'])}{more}"


def _input_sentence(shares: Mapping[str, float], stage: str, share: float, events: Sequence[Event]) -> str:
    head = f"{_percent(shares['loader_wait'])} input-bound"
    if not stage:
        return f"{head}: the loader does not keep up; it tells no stage of its work"
    advice = _ADVICE[stage]
    busy = _mean([_number(event.fields.get("cpu_pct")) for event in events if event.kind == "profile"])
    if stage in ("decode", "transform") and busy is not None and busy < 60:
        advice = f"the machine is only {busy:.0f} % busy, so give it more threads"
    return f"{head}: {stage} takes {_percent(share)} of the loader's time; {advice}"


def _copy_sentence(shares: Mapping[str, float], *, on_cpu: bool) -> str:
    if on_cpu:
        return f"{_percent(shares['h2d'])} making tensors of batches: give it more cores, or smaller images"
    return f"{_percent(shares['h2d'])} copying to the device: pin the memory, or send bytes, not floats"


def _ranks_sentence(shares: Mapping[str, float], slow: Sequence[Straggler], ranks: int, *, on_cpu: bool) -> str:
    head = f"{_percent(shares['collective_wait'])} waiting for other ranks"
    if slow:
        first = slow[0]
        text = f"{head}: {first.name} is the straggler, {first.ratio:.1f} × the median step"
        causes = _CAUSES_ON_CPU if on_cpu else _CAUSES
        return f"{text}; it {causes[first.part]}" if first.part in causes else text
    if ranks < 2:
        return f"{head}, which have told nothing of their steps"
    input_too = shares["loader_wait"] >= NOTABLE
    more = f"; input waits {_percent(shares['loader_wait'])}" if input_too else ""
    return f"{head}, and none is slower than the rest: the network between them is slow, or the batches small{more}"


def _rest_sentence(shares: Mapping[str, float], *, on_cpu: bool) -> str:
    moving = "making tensors" if on_cpu else "copying"
    text = f"{_percent(shares['rest'])} of the time is outside of loading, {moving}, compute and waiting"
    return f"{text}: look at what the program does between steps (compute {_percent(shares['compute'])})"


def _percent(share: float) -> str:
    return "under 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


# Lives


def _lives(ordered: Sequence[Event]) -> list[_Life]:
    """Cut a run into its goes: a new attempt, or a rank that is another process within one."""
    lives: list[_Life] = []
    owners: dict[tuple[int, Who, int], _Life] = {}
    for event in ordered:
        name = event.fields.get("name") if event.kind == "mark" else None
        step = _step_of(event)
        if name != "start" and step is None:
            continue
        who = (event.slot, event.rank)
        key = (event.attempt, who, event.pid)
        life = owners.get(key)
        if life is None or (name == "start" and who in life.starters):
            if not lives or event.attempt != lives[-1].attempt or who in lives[-1].members:
                lives.append(_Life(event.attempt))
            life = owners[key] = lives[-1]
            life.members.add(who)
        if name == "start":
            life.starters.add(who)
        elif name == "resume" and step is not None:
            life.resumed.append(step)
        elif name is None and step is not None:
            life.seen = max(life.seen, event.t)
            if not life.points or step > life.points[-1][1]:
                life.points.append((event.t, step))
    return lives


def _step_of(event: Event) -> float | None:
    if event.kind == "profile":
        return None
    step = _number(event.fields.get("step"))
    return step if step is not None and step >= 0 else None


def _last_mark(ordered: Sequence[Event], name: str) -> Event | None:
    return next((e for e in reversed(ordered) if e.kind == "mark" and e.fields.get("name") == name), None)


# Machines


def _machine_remarks(slot: str, samples: Sequence[Event]) -> list[str]:
    where = f"on {slot}" if slot else "on this machine"

    def mean(name: str) -> float | None:
        return _mean([_number(event.fields.get(name)) for event in samples])

    def last(name: str) -> float | None:
        return next((v for e in reversed(samples) if (v := _number(e.fields.get(name))) is not None), None)

    found = _gpu_remarks(where, samples)
    limit, used = last("cgroup_mem_limit"), last("cgroup_mem_used")
    total, free = last("mem_total"), last("mem_available")
    if limit and used is not None and used >= 0.9 * limit:
        found.append(f"memory {where} is at {_percent(used / limit)} of its limit of {format_bytes(limit)}")
    elif total and free is not None and free < 0.05 * total:
        found.append(f"memory {where} is nearly full: {format_bytes(max(0.0, free))} of {format_bytes(total)} are left")
    if kills := max((_number(event.fields.get("oom_kills")) or 0 for event in samples), default=0):
        found.append(f"the kernel killed for want of memory {where}: {kills:.0f} × so far")
    sent, again = mean("tcp_sent_per_s"), mean("tcp_retransmits_per_s")
    if sent and again and again >= 1 and again >= 0.01 * sent:
        share = f"{_percent(min(1.0, again / sent))} of TCP segments"
        found.append(f"{share} are sent again {where}: the network loses packets")
    waiting, busy, throttled = mean("iowait_pct"), mean("cpu_pct"), mean("throttled_pct")
    if waiting is not None and waiting >= 20:
        found.append(f"processors {where} wait for the disk {waiting:.0f} % of the time")
    cores, tree = last("cores"), mean("tree_cpu_pct")
    if throttled is not None and throttled >= 5:
        found.append(f"the quota of processors holds the program back {where} {throttled:.0f} % of the time")
    elif busy is not None and busy >= 95:
        found.append(f"all processors {where} are busy ({busy:.0f} %)")
    elif cores and tree is not None and tree >= 95 * cores:
        found.append(f"the program uses all of its {cores:g} cores {where}")
    return found


def _gpu_remarks(where: str, samples: Sequence[Event]) -> list[str]:
    utils: dict[int, list[float | None]] = {}
    fullest = 0.0
    for event in samples:
        rows = event.fields.get("gpu")
        for row in rows if isinstance(rows, list) else []:
            index = _number(row.get("i")) if isinstance(row, Mapping) else None
            if index is None:
                continue
            utils.setdefault(int(index), []).append(_number(row.get("util_pct")))
            used, total = _number(row.get("mem_used")), _number(row.get("mem_total"))
            if used is not None and total:
                fullest = max(fullest, used / total)
    means = [mean for values in utils.values() if (mean := _mean(values)) is not None]
    idle = [mean for mean in means if mean < 50]
    found = []
    if idle:
        which = "the GPU" if len(means) == 1 else f"{len(idle)} of {len(means)} GPUs"
        verb = "is" if len(means) == 1 or len(idle) == 1 else "are"
        found.append(f"{which} {where} {verb} busy less than half of the time ({fmean(idle):.0f} %)")
    if fullest >= 0.95:
        found.append(f"GPU memory {where} is at {_percent(min(1.0, fullest))}")
    return found


def _loss_remarks(ordered: Sequence[Event]) -> list[str]:
    losses = [event for event in ordered if event.kind == "scalar" and event.fields.get("name") == "loss"]
    if not losses or not _is_broken(losses[-1].fields.get("value")):
        return []
    first = losses[-1]
    for event in reversed(losses):
        if not _is_broken(event.fields.get("value")):
            break
        first = event
    step = _number(first.fields.get("step"))
    since = f" since step {step:,.0f}" if step is not None else ""
    return [f"the loss is no number any more{since}"]


# Numbers


def _number(value: Any) -> float | None:
    """Take a finite number of a sane size; anything else is None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None


def _loose(value: Any) -> float | None:
    """Take any number, NaN too: a loss that is none is worth telling."""
    return float(value) if _is_broken(value) else _number(value)


def _is_broken(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
