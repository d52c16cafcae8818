"""Measure where the time of the steps goes: events on every rank, a progress line on rank 0."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stoker.load.loader import StageTimes
from stoker.telemetry import Recorder

HEARTBEAT_S = 1.0
FIRST_LOG_S = 2.0
STAGES = ("fetch", "read", "decode", "transform")


class HeartbeatSender:
    """Sender of heartbeats, at most one per second; only the training thread calls it, so that a hang is detected."""

    def __init__(self, record: Recorder) -> None:
        self._record, self._at = record, 0.0

    def is_due(self) -> bool:
        """Whether a second has passed since the last heartbeat."""
        return time.monotonic() - self._at >= HEARTBEAT_S

    def __call__(self, step: int, shard: str = "", sample: int = -1) -> None:
        """Send a heartbeat, if one is due."""
        if self.is_due():
            self._at = time.monotonic()
            self._record.heartbeat(step, shard=shard, sample=sample)


@dataclass
class Meter:
    """Sums of the times, samples and losses of the steps, reported every --log-every seconds."""

    args: argparse.Namespace
    record: Recorder
    print_line: Callable[[str], None]
    rank: int
    steps: int = 0
    _spans: dict[str, float] = field(default_factory=dict)
    _local_samples: int = 0
    _global_samples: int = 0
    _loss_sum: Any = 0.0
    _times: StageTimes = field(default_factory=StageTimes)
    _started: float = field(default_factory=time.perf_counter)
    _due_at: float = 0.0
    _total_samples: int = 0
    _total_s: float = 0.0

    def __post_init__(self) -> None:
        self._due_at = self._started + min(FIRST_LOG_S, self.args.log_every)

    @property
    def images_per_s(self) -> float:
        """Images per second of all ranks, over the time spent in steps."""
        return self._total_samples / self._total_s if self._total_s else 0.0

    def add_times(self, **seconds: float) -> None:
        """Add the durations of parts of a step."""
        for name, length in seconds.items():
            self._spans[name] = self._spans.get(name, 0.0) + length

    def add_samples(self, local: int, total: int, loss_sum: Any) -> None:
        """Count a step: the samples of this rank and of all ranks, and this rank's losses, which stay on the device."""
        self.steps += 1
        self._local_samples += local
        self._global_samples += total
        self._loss_sum = self._loss_sum + loss_sum

    def is_due(self) -> bool:
        """Whether it is time to report."""
        return time.perf_counter() >= self._due_at

    def report(self, epoch: int, step: int, total_steps: int, lr: float, epochs: float, times: StageTimes) -> None:
        """Write the events and the progress line, and start over."""
        loss = float(self._loss_sum) / max(1, self._local_samples)  # waits for the device
        now = time.perf_counter()
        step_s = max(self._spans["step"], 1e-9)
        speed = self._global_samples / step_s
        started = time.time() - (now - self._started)
        loader_spans = {f"loader.{name}": getattr(times, name) - getattr(self._times, name) for name in STAGES}
        for name, length in {**self._spans, **loader_spans}.items():
            counts = {"count": self.steps, "samples": self._local_samples}
            self.record.span(name, round(started, 6), round(length, 6), step, **counts)
        if self.rank == 0:
            scalars = {"loss": loss, "lr": lr, "samples_per_s": speed, "epoch": epochs}
            for name, value in scalars.items():
                self.record.scalar(name, value, step)
        wait = 100 * self._spans["loader_wait"] / step_s
        position = f"epoch {epoch} step {step:,}/{total_steps:,}"
        self.print_line(f"{position} loss {loss:.4f} lr {lr:.4g} {speed:,.0f} images/s wait {wait:.0f}%")
        self._total_samples, self._total_s = self._total_samples + self._global_samples, self._total_s + step_s
        self._spans, self._times, self.steps = {}, times, 0
        self._local_samples, self._global_samples, self._loss_sum = 0, 0, 0.0
        self._started, self._due_at = now, now + self.args.log_every
