"""Drill of the launchers: hundreds of seeded random kills leave no process, exact logs and bit-identical weights.

`STOKER_DRILL_SEEDS=ssh:17,local:3 pytest -m '' tests/e2e/test_launcher_drill.py` runs single seeds again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.drill.drill import Drill
from tests.support.drill.place import Place
from tests.support.drill.places import open_places
from tests.support.drill.training import train_reference
from tests.support.ssh_runs import machine

SEEDS = {"local": 8, "mpi": 4, "ssh": 6, "ssh-mpi": 2, "slurm": 5, "ray": 2}
"""How many jobs run on each launcher."""
FAULTS = {"local": 10, "mpi": 8, "ssh": 10, "ssh-mpi": 8, "slurm": 3, "ray": 8}
"""How many faults hit each of these jobs."""
MIN_FAULTS = 200
SAMPLE = ("local", 0, 2)
"""Launcher, seed and faults of the drill in the default suite."""
CHOSEN = os.environ.get("STOKER_DRILL_SEEDS", "")


def list_seeds() -> list[Any]:
    """List launchers with seeds, and the number of faults: those chosen, or all and a sample for the default suite."""
    if CHOSEN:
        pairs = (text.partition(":") for text in CHOSEN.split(","))
        return [pytest.param(name, int(seed), FAULTS[name], id=f"{name}:{seed}") for name, _, seed in pairs]
    seeds = [(name, seed, FAULTS[name]) for name, count in SEEDS.items() for seed in range(1, count + 1)]
    slow = [pytest.param(*seed, marks=pytest.mark.slow, id=f"{seed[0]}:{seed[1]}") for seed in seeds]
    return [pytest.param(*SAMPLE, id=f"{SAMPLE[0]}:{SAMPLE[1]}"), *slow]


class Tally:
    """What the drills of this session have done."""

    def __init__(self) -> None:
        self.hits: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.log_bytes, self.began = 0, time.monotonic()

    def __str__(self) -> str:
        lines = [
            f"{name}: {counts.total()} faults ({', '.join(f'{kind} {n}' for kind, n in counts.most_common())})"
            for name, counts in self.hits.items()
        ]
        total = sum(counts.total() for counts in self.hits.values())
        lines += [f"{total} faults, {self.log_bytes:,} log bytes, {time.monotonic() - self.began:.0f} s"]
        return "\n".join(lines)


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Count the faults of all drills, and print the counts at the end."""
    counts = Tally()
    yield counts
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write(f"\n{counts}\n")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def place_type(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[random.Random], Place]]:
    with open_places(request.param, tmp_path_factory.mktemp(request.param)) as place_type:
        yield place_type


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place_type", "seed", "faults"), list_seeds(), indirect=["place_type"])
def test_random_kills(
    place_type: Callable[[random.Random], Place],
    seed: int,
    faults: int,
    reference: Path,
    workspace: Path,
    tally: Tally,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.params["place_type"]
    with machine() as launching:
        drill = Drill(place_type(random.Random(f"{name}:{seed}")), launching, workspace)
        try:
            drill.run(reference, faults)
        finally:
            tally.hits[name] += drill.hits
            tally.log_bytes += drill.log_bytes


@pytest.mark.slow
@pytest.mark.skipif(bool(CHOSEN), reason="only some seeds were chosen")
def test_there_were_enough_kills(tally: Tally) -> None:
    assert sum(counts.total() for counts in tally.hits.values()) >= MIN_FAULTS
