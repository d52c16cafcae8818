"""A small training on three ranks: the reference on equal workers, and the check of one on workers that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.testing import make_shards, run_job
from stoker.trainers.ledger import effective_samples
from tests.support.trainings import weights

SAMPLES, EPOCHS = 96, 2
UNEQUAL = [{"processes_per_worker": 2}, {}]
"""Two ranks and one."""


def training_keys(folder: Path, shards: Path, **keys: Any) -> dict[str, Any]:
    """The job of the training, with its ledger and checkpoints in a folder."""
    options = f"--model small --size 32 --global-batch-size 12 --epochs {EPOCHS} --deterministic --seed 3 --threads 1"
    args = [*options.split(), "--ledger", str(folder / "ledger")]
    return {
        "name": "unequal",
        "program": {"module": "stoker.trainers.torch_image", "args": args},
        "data": {"train": str(shards / "train")},
        "checkpoint": {"dir": str(folder / "checkpoints")},
        "env": {"OMP_NUM_THREADS": "1"},
        "profile": {"every": 0},
        "retries": 0,
        **keys,
    }


def train_equal(folder: Path) -> Path:
    """Write shards to a folder, and train on three equal workers of this machine."""
    make_shards(folder / "shards", samples=SAMPLES, val=4, classes=4, size=(40, 32))
    run = run_job(training_keys(folder, folder / "shards", workers=3), home=folder / "home")
    assert run.succeeded, run.message
    return folder


def check_training(folder: Path, equal: Path, checkpoints: Path | None = None) -> None:
    """Check that every sample was used once per epoch, by the same ranks, and that the weights are bit-identical."""
    epochs = effective_samples(folder / "ledger")
    assert sorted(epochs) == list(range(EPOCHS))
    for samples in epochs.values():
        assert len(samples) == len(set(samples)) == SAMPLES
    assert epochs == effective_samples(equal / "ledger")
    actual, expected = weights(checkpoints or folder / "checkpoints"), weights(equal / "checkpoints")
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []
