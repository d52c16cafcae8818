"""Time the first batch of an epoch: `time_plan.py stoker|permutation` prints seconds and peak bytes."""

from __future__ import annotations

import sys
import time

import numpy as np

from peer_loaders import peak_bytes
from stoker.sampling.plan import SamplingPlan
from stoker.sampling.rank import Rank
from stoker.shards.manifest import default_lanes

SHARDS, SAMPLES = 1_000_000, 1_000
STORED = 10_000_000
"""Samples of the stored permutation: a hundredth of the above, because all of them would take 8 GB."""


def stoker() -> None:
    sizes = np.full(SHARDS, SAMPLES, dtype=np.int64)
    epoch = SamplingPlan(data="bench", sizes=sizes, lanes=default_lanes(SHARDS)).epoch(0, Rank(3, 8))
    epoch.locate(next(epoch.steps(0, 256)).positions)


def permutation() -> None:
    np.random.default_rng(0).permutation(STORED)[3:256:8]


if __name__ == "__main__":
    start = time.perf_counter()
    {"stoker": stoker, "permutation": permutation}[sys.argv[1]]()
    print(time.perf_counter() - start, peak_bytes())
