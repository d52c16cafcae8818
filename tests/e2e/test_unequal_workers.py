"""Trainings on workers with different numbers of ranks: every sample once, and the weights of equal workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.testing import FinishedRun, make_shards, run_job
from stoker.trainers.ledger import effective_samples
from tests.support.trainings import weights

SAMPLES, EPOCHS = 96, 2
UNEQUAL = [{"processes_per_worker": 2}, {}]
"""Two ranks and one: a world of three."""


def train(folder: Path, shards: Path, **keys: Any) -> FinishedRun:
    folder.mkdir()
    options = f"--model small --size 32 --global-batch-size 12 --epochs {EPOCHS} --deterministic --seed 3"
    program = {
        "module": "stoker.trainers.torch_image",
        "args": [*options.split(), "--threads", "1", "--ledger", str(folder / "ledger")],
    }
    job = {
        "name": "unequal",
        "program": program,
        "data": {"train": str(shards / "train")},
        "checkpoint": {"dir": str(folder / "checkpoints")},
        "profile": {"every": 0},
        "retries": 0,
        **keys,
    }
    run = run_job(job, home=folder / "home")
    assert run.succeeded, f"{run.message}\n{run.log()}"
    return run


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, samples=SAMPLES, val=4, classes=4, size=(40, 32))
    return folder


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A training with the same world of equal workers."""
    folder = tmp_path_factory.mktemp("equal") / "run"
    train(folder, shards, workers=3)
    return folder


@pytest.mark.parametrize(
    "topology",
    ["torchrun", pytest.param("mpi", marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"))],
)
def test_unequal_workers_train_as_equal_ones(topology: str, tmp_path: Path, shards: Path, equal: Path) -> None:
    run = train(tmp_path / "run", shards, topology=topology, workers=UNEQUAL)
    ranks = {slot: {event.rank for event in run.events("heartbeat") if event.slot == slot} for slot in slots(run)}
    assert ranks == {"worker/0": {0, 1}, "worker/1": {2}}
    epochs = effective_samples(tmp_path / "run" / "ledger")
    assert sorted(epochs) == list(range(EPOCHS))
    for samples in epochs.values():
        assert len(samples) == len(set(samples)) == SAMPLES
    assert epochs == effective_samples(equal / "ledger")
    actual, expected = weights(tmp_path / "run" / "checkpoints"), weights(equal / "checkpoints")
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []


def slots(run: FinishedRun) -> set[str]:
    return {event.slot for event in run.events("heartbeat")}
