"""Trainings on workers with different numbers of ranks: every sample once, and the weights of equal workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stoker.testing import run_job
from tests.support.unequal_training import UNEQUAL, check_training, train_equal, training_keys


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_equal(tmp_path_factory.mktemp("equal"))


@pytest.mark.parametrize(
    "topology",
    ["torchrun", pytest.param("mpi", marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"))],
)
def test_unequal_workers_train_as_equal_ones(topology: str, tmp_path: Path, equal: Path) -> None:
    keys = training_keys(tmp_path, equal / "shards", topology=topology, workers=UNEQUAL)
    run = run_job(keys, home=tmp_path / "home")
    assert run.succeeded, f"{run.message}\n{run.log()}"
    ranks: dict[str, set[int]] = {}
    for event in run.events("heartbeat"):
        ranks.setdefault(event.slot, set()).add(event.rank)
    assert ranks == {"worker/0": {0, 1}, "worker/1": {2}}
    check_training(tmp_path, equal)
