"""The learning rate as a function of the samples seen: the same for any batch and any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("multistep", "cosine", "poly", "constant")
POWER = 2.0
"""Of `poly`: what is left of the training, to this power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A warm-up from 0, then one of SCHEDULES; everything is counted in samples."""

    kind: str = "constant"
    total: int
    warmup: int = 0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1

    def factor(self, seen: float) -> float:
        """Tell what the learning rate is multiplied by after so many samples."""
        if seen < self.warmup:
            return seen / self.warmup
        left = 1.0 - min(1.0, (seen - self.warmup) / max(1, self.total - self.warmup))
        match self.kind:
            case "multistep":
                return float(self.gamma ** sum(seen >= milestone for milestone in self.milestones))
            case "cosine":
                return 0.5 * (1.0 - math.cos(math.pi * left))
            case "poly":
                return float(left**POWER)
            case _:
                return 1.0
