"""Learning rate schedules, as functions of the samples seen: they do not depend on the batch size or world size."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("multistep", "cosine", "poly", "constant")
POLY_POWER = 2.0
"""Exponent of `poly`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up from 0, then one of SCHEDULES; all fields are in samples."""

    kind: str = "constant"
    total: int
    warmup: int = 0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def factor(self, samples_seen: float) -> float:
        """Return the factor of the learning rate after `samples_seen` samples."""
        if samples_seen < self.warmup:
            return samples_seen / self.warmup
        remaining = 1.0 - min(1.0, (samples_seen - self.warmup) / max(1, self.total - self.warmup))
        match self.kind:
            case "multistep":
                return float(self.gamma ** sum(samples_seen >= milestone for milestone in self.milestones))
            case "cosine":
                return 0.5 * (1.0 - math.cos(math.pi * remaining))
            case "poly":
                return float(remaining**POLY_POWER)
            case _:
                return 1.0
