"""Benchmark the order of a very large epoch, computed on demand, against a stored permutation."""

from __future__ import annotations

from pathlib import Path

import time_plan
from measure import BenchContext, BenchResult, Comparison, Implementation, Limit, run_rounds, time_script

SCRIPT = Path(time_plan.__file__)
OURS = "stoker, 1,000,000 shards × 1,000"
STORED = "numpy permutation of 10,000,000"


def run(context: BenchContext) -> BenchResult:
    implementations = [
        Implementation(name=OURS, run=lambda: time_script(SCRIPT, "stoker"), ours=True),
        Implementation(name=STORED, run=lambda: time_script(SCRIPT, "permutation")),
    ]
    speeds, peaks = run_rounds(implementations, context.rounds, 1)
    slowest = 1 / min(speeds[OURS])
    return BenchResult(
        name="plan",
        title="Compute the order of an epoch, up to its first batch",
        unit="epochs/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[Comparison(ours=OURS, peer=STORED, note="100 times as many samples")],
        limits=[
            Limit(what="Slowest round", value=1000 * slowest, bound=1000, unit="ms"),
            Limit(what="Peak memory of the process", value=peaks[OURS] / 1e6, bound=200, unit="MB"),
        ],
        notes=[
            "Rank 3 of 8, global batch size 256; each run in a new process, without imports. The permutation is what "
            "the samplers of other loaders store, for one hundredth of the samples.",
        ],
    )
