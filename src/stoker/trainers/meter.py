"""Where the steps' time goes: events by every rank, a line for people by rank 0."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.load.loader import Times
from stoker.telemetry import Recorder

HEARTBEAT_S = 1.0
FIRST_LOG_S = 2.0
STAGES = ("fetch", "read", "decode", "transform")


class Heartbeat:
    """Says that this rank is alive, once a second at most; only the training thread calls it: so a hang is seen."""

    def __init__(self, record: Recorder) -> None:
        self._record, self._at = record, 0.0

    def due(self) -> bool:
        """Whether a second has passed."""
        return time.monotonic() - self._at >= HEARTBEAT_S

    def __call__(self, step: int, shard: str = "", sample: int = -1) -> None:
        """Tell the step, if it is time."""
        if self.due():
            self._at = time.monotonic()
            self._record.heartbeat(step, shard=shard, sample=sample)


@dataclass
class Meter:
    """Adds up where the steps' time goes, and tells it from time to time: events by all ranks, a line by rank 0."""

    args: argparse.Namespace
    record: Recorder
    say: Callable[[str], None]
    world: int
    rank: int
    steps: int = 0
    _spans: dict[str, float] = field(default_factory=dict)
    _mine: int = 0
    _all: int = 0
    _loss: Any = 0.0
    _times: Times = field(default_factory=Times)
    _begun: float = field(default_factory=time.perf_counter)
    _due: float = 0.0
    _ever: int = 0
    _ever_s: float = 0.0

    def __post_init__(self) -> None:
        self._due = self._begun + min(FIRST_LOG_S, self.args.log_every)

    @property
    def overall(self) -> float:
        """Images a second of all ranks while steps were made."""
        return self._ever / self._ever_s if self._ever_s else 0.0

    def add(self, **seconds: float) -> None:
        """Add the parts of a step."""
        for name, length in seconds.items():
            self._spans[name] = self._spans.get(name, 0.0) + length

    def count(self, mine: int, everyone: int, loss: torch.Tensor) -> None:
        """Add a step's samples, and the sum of this rank's losses, which stays where it is until it is told."""
        self.steps += 1
        self._mine, self._all, self._loss = self._mine + mine, self._all + everyone, self._loss + loss

    def due(self) -> bool:
        """Whether it is time to tell."""
        return time.perf_counter() >= self._due

    def tell(self, epoch: int, step: int, total: int, rate: float, epochs: float, times: Times) -> None:
        """Write the events and the line, and begin anew."""
        loss = float(self._loss) / max(1, self._mine)  # waits for the device
        now = time.perf_counter()
        stepping = max(self._spans["step"], 1e-9)
        speed = self._all / stepping
        begun = time.time() - (now - self._begun)
        spent = {f"loader.{name}": getattr(times, name) - getattr(self._times, name) for name in STAGES}
        for name, length in {**self._spans, **spent}.items():
            more = {"count": self.steps, "samples": self._mine}
            self.record.span(name, round(begun, 6), round(length, 6), step, **more)
        if self.rank == 0:
            told = {"loss": loss, "lr": rate, "samples_per_s": speed, "epoch": epochs}
            for name, value in told.items():
                self.record.scalar(name, value, step)
        wait = 100 * self._spans["loader_wait"] / stepping
        at = f"epoch {epoch} step {step:,}/{total:,}"
        self.say(f"{at} loss {loss:.4f} lr {rate:.4g} {speed:,.0f} images/s wait {wait:.0f} %")
        self._ever, self._ever_s = self._ever + self._all, self._ever_s + stepping
        self._spans, self._times, self.steps = {}, times, 0
        self._mine, self._all, self._loss = 0, 0, 0.0
        self._begun, self._due = now, now + self.args.log_every
