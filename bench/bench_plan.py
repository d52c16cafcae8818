"""The order of a very large epoch: computed where it is asked for, beside a shuffle that is stored."""

from __future__ import annotations

from pathlib import Path

import call_plan
from measure import Contestant, Lab, Limit, Result, Versus, call, take_turns

SCRIPT = Path(call_plan.__file__)
OURS = "stoker, 1,000,000 shards × 1,000"
STORED = "numpy permutation of 10,000,000"


def run(lab: Lab) -> Result:
    contestants = [
        Contestant(name=OURS, act=lambda: call(SCRIPT, "stoker"), ours=True),
        Contestant(name=STORED, act=lambda: call(SCRIPT, "permutation")),
    ]
    speeds, peaks = take_turns(contestants, lab.rounds, 1)
    slowest = 1 / min(speeds[OURS])
    return Result(
        name="plan",
        title="Drawing an epoch, up to its first batch",
        unit="epochs/s",
        contestants=contestants,
        speeds=speeds,
        versus=[Versus(ours=OURS, peer=STORED, note="a hundred times as many samples")],
        limits=[
            Limit(what="The slowest of the rounds", value=1000 * slowest, bound=1000, unit="ms"),
            Limit(what="Peak memory of the process", value=peaks[OURS] / 1e6, bound=200, unit="MB"),
        ],
        notes=[
            "Rank 3 of 8, a global batch of 256; a fresh process each, imports left out of the seconds. The "
            "permutation is what samplers of other loaders store, of a hundredth of the samples.",
        ],
    )
