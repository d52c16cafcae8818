"""Steps of a run: where each process stands, what restarts cost, and the pace of the last minutes.

The state is bounded for each process, however long it runs: its first points, those of the last minutes, and its last
heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from stoker.core.units import format_duration, pluralize

ETA_WINDOW_S = 300.0
"""The ETA is based on the steps of this last interval."""

_HEAD_POINTS = 16
_POINT_INTERVAL_S = ETA_WINDOW_S / 60
"""After the first points, those that follow each other faster are merged."""

RankKey = tuple[str, int]
"""A slot and a rank."""
ProcessKey = tuple[int, str, int, int]
"""An attempt, a slot, a rank and a process ID."""


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


class HeartbeatPosition(msgspec.Struct):
    """The last heartbeat of a process: its time, step, shard and sample."""

    t: float
    step: float
    shard: str = ""
    sample: int = -1


class ProcessSteps(msgspec.Struct):
    """The steps that one process has reported, from its start to its exit."""

    attempt: int
    slot: str
    rank: int
    pid: int
    began: tuple[float, int]
    """Time and sequence number of its first event."""
    is_started: bool = False
    """Whether it has written a `start` mark."""
    resumed: float | None = None
    """The highest step of its `resume` marks."""
    last_report: float = -math.inf
    """When a step was last reported."""
    position: HeartbeatPosition | None = None
    head: list[tuple[float, float]] = []
    tail: list[tuple[float, float]] = []

    @property
    def points(self) -> list[tuple[float, float]]:
        """When it first reported a step, for each new step; the middle of a long run is left out."""
        return [*self.head, *self.tail]

    @property
    def last_point(self) -> tuple[float, float] | None:
        """When it reported its highest step, and that step."""
        return self.tail[-1] if self.tail else self.head[-1] if self.head else None

    def add_step(self, t: float, step: float) -> None:
        """Add a report of a step."""
        self.last_report = max(self.last_report, t)
        last = self.last_point
        if last is not None and step <= last[1]:
            return
        if len(self.head) < _HEAD_POINTS:
            self.head.append((t, step))
            return
        before = self.tail[-2] if len(self.tail) > 1 else self.head[-1]
        if self.tail and t - before[0] < _POINT_INTERVAL_S:
            self.tail[-1] = (t, step)
        else:
            self.tail.append((t, step))
        while len(self.tail) > 1 and self.tail[1][0] < t - ETA_WINDOW_S:
            self.tail.pop(0)


class StepLog(msgspec.Struct):
    """The steps of all processes of a run; the reports of each process must be added in order."""

    processes: list[ProcessSteps] = []
    current: dict[ProcessKey, int] = {}
    """The number, in `processes`, of the newest process with this key: pids are reused in containers."""

    def add_start(self, key: ProcessKey, began: tuple[float, int]) -> None:
        """Add a `start` mark; the second one of a process is that of a new process with the same pid."""
        process = self._find(key, began)
        if process.is_started:
            process = self._append(key, began)
        process.is_started = True

    def add_resume(self, key: ProcessKey, began: tuple[float, int], step: float) -> None:
        """Add a `resume` mark."""
        process = self._find(key, began)
        process.resumed = step if process.resumed is None else max(process.resumed, step)

    def add_mark(self, key: ProcessKey, began: tuple[float, int]) -> None:
        """Add another mark with a step: the process exists."""
        self._find(key, began)

    def add_step(self, key: ProcessKey, began: tuple[float, int], step: float) -> None:
        """Add the report of a step by any other event."""
        self._find(key, began).add_step(began[0], step)

    def add_position(self, key: ProcessKey, began: tuple[float, int], position: HeartbeatPosition) -> None:
        """Keep the last heartbeat of a process."""
        process = self._find(key, began)
        if process.position is None or position.t >= process.position.t:
            process.position = position

    def segments(self) -> list[Segment]:
        """Split the run at restarts: a new attempt, or a rank that is another process within one."""
        segments: list[Segment] = []
        for process in sorted(self.processes, key=lambda process: (process.attempt, process.began)):
            rank = (process.slot, process.rank)
            if not segments or process.attempt != segments[-1].attempt or rank in segments[-1].ranks:
                segments.append(Segment(process.attempt))
            segments[-1].ranks.add(rank)
            segments[-1].members.append(process)
        return segments

    def _find(self, key: ProcessKey, began: tuple[float, int]) -> ProcessSteps:
        number = self.current.get(key)
        return self._append(key, began) if number is None else self.processes[number]

    def _append(self, key: ProcessKey, began: tuple[float, int]) -> ProcessSteps:
        self.current[key] = len(self.processes)
        self.processes.append(ProcessSteps(*key, began))
        return self.processes[-1]


@dataclass(slots=True)
class Segment:
    """Uninterrupted training: the processes of one attempt, until the first of them restarts."""

    attempt: int
    ranks: set[RankKey] = field(default_factory=set)
    members: list[ProcessSteps] = field(default_factory=list)
    _points: list[tuple[float, float]] | None = None

    @property
    def points(self) -> list[tuple[float, float]]:
        """The time at which each new step was first reported."""
        if self._points is None:
            self._points = []
            for t, step in sorted(point for member in self.members for point in member.points):
                if not self._points or step > self._points[-1][1]:
                    self._points.append((t, step))
        return self._points

    @property
    def resumed(self) -> float | None:
        """The highest step of the `resume` marks."""
        return max((member.resumed for member in self.members if member.resumed is not None), default=None)

    @property
    def last_report(self) -> float:
        """When a step was last reported."""
        return max(member.last_report for member in self.members)

    @property
    def last_step(self) -> float | None:
        """The last step that was reported or resumed from."""
        known = [self.resumed, *(step for _, step in self.points[-1:])]
        return max((step for step in known if step is not None), default=None)

    @property
    def first_progress(self) -> float | None:
        """When the first step after the start was reported."""
        if not self.points:
            return None
        first_step = max(self.points[0][1], self.resumed or 0.0)
        return next((t for t, step in self.points if step > first_step), None)

    @property
    def first_step(self) -> float:
        """The step at which it began; a rank may send a heartbeat of step 0 before it knows where it resumes."""
        if self.resumed is not None:
            return self.resumed
        return self.points[0][1] if self.points else math.inf


def restart_cost(segments: Sequence[Segment], stopped: Collection[int]) -> Restarts:
    """Return the cost of restarts; resuming after one of the `stopped` attempts is not a restart."""
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
        last_step = segment.last_step
        if last_step is not None:
            repeated += max(0.0, min(last_step, furthest) - segment.first_step)
            furthest = max(furthest, last_step)
        if segment.points:
            last_progress = max(last_progress or segment.points[-1][0], segment.points[-1][0])
    return Restarts(max(0, len(segments) - 1 - resumptions), idle_s, int(repeated))


def seconds_per_step(segments: Sequence[Segment]) -> float | None:
    """Return the pace of the last minutes of the last segment; None if no step was made in them."""
    points, last_report = _points_at_pace(segments), segments[-1].last_report
    window = [point for point in points if point[0] >= last_report - ETA_WINDOW_S]
    if not window:  # no new step in all that time
        return None
    first = points[max(0, len(points) - len(window) - 1)]
    seconds, steps = last_report - first[0], points[-1][1] - first[1]
    return seconds / steps if seconds > 0 and steps > 0 else None


def _points_at_pace(segments: Sequence[Segment]) -> list[tuple[float, float]]:
    """Return the points of the last segment without a step that was reported before the training was resumed."""
    points, resumed = segments[-1].points, segments[-1].resumed or 0.0
    made = [point for point in points if point[1] >= resumed]
    # Without a `resume` mark, a first step of 0 may be that of a program that has not loaded its checkpoint yet.
    may_have_resumed = len(segments) > 1 or len(made) > 2
    return made[1:] if made and made[0][1] == 0 and may_have_resumed else made
