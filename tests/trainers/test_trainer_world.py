"""Several ranks give the result of one: gradients, validation, empty shares, uneven ranks, errors reported once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.trainers.ledger import effective_samples
from tests.support.trainings import TrainingResult, read_checkpoint, run, same_bits, weights
from tests.support.trees import stoker

Train = Callable[..., TrainingResult]


def is_close(one: Path, other: Path, within: float) -> bool:
    ours, theirs = weights(one), weights(other)
    return all((ours[name] - theirs[name]).abs().max() <= within for name in ours)


def train_ranks(tmp_path: Path, world: int, *args: object, name: str = "", **env: str) -> TrainingResult:
    folder = tmp_path / (name or str(world))
    done = run(tmp_path / "log", world, *args, "--checkpoint-dir", folder, **env)
    assert done.code == 0, done.text
    return done


def test_any_number_of_ranks_gives_the_gradients_of_one(flags: list[object], train: Train, tmp_path: Path) -> None:
    """203 samples in batches of 101: shares are uneven, and in the last batch, of 1 sample, all but one are empty."""
    own = [*flags, "--global-batch-size", 101, "--epochs", 2, "--label-smoothing", 0.1]
    alone = train(*own, "--checkpoint-dir", tmp_path / "1")
    for world in (2, 3):
        done = train_ranks(tmp_path, world, *own)
        assert is_close(tmp_path / str(world), tmp_path / "1", 1e-6)
        for name in ("val_loss", "val_top1", "val_top5"):
            assert len(alone.scalars(name)) == 2
            assert done.scalars(name) == pytest.approx(alone.scalars(name), abs=1e-6)
        assert done.marks("start")[0].fields["world"] == world
        assert {event.rank for event in done.events if event.kind == "heartbeat"} == set(range(world))


def test_empty_shares_do_not_change_batchnorm_statistics(flags: list[object], tmp_path: Path) -> None:
    """In the last step of each epoch two of three ranks have no sample; the validation set has two samples."""
    assert stoker("data", "convert", "synthetic:samples=2,classes=5,size=16x16", tmp_path / "two") == 0
    own = [*flags, "--model", "small", "--global-batch-size", 101, "--epochs", 2, "--val", tmp_path / "two/train"]
    done = train_ranks(tmp_path, 3, *own)
    trained = weights(tmp_path / "3")
    assert trained["body.1.num_batches_tracked"] == 4
    assert all(value.isfinite().all() for value in trained.values())
    assert re.search(r"top-1 .*\(2 samples\)\n", done.text)


SPY = """
import os
import torch
from stoker.trainers import models

sgd_step = torch.optim.SGD.step

def step(self, *args, **kwargs):
    with open(f"{os.environ['RATES']}-{os.environ['RANK']}", "a") as file:
        file.write(f"{self.param_groups[0]['lr']!r}\\n")
    return sgd_step(self, *args, **kwargs)

torch.optim.SGD.step = step

def small(num_classes):
    return models.SmallConvNet(num_classes=num_classes)
"""


def test_uneven_ranks_join(shards: Path, flags: list[object], tmp_path: Path) -> None:
    """21 shards of 10 for two ranks, in batches of 9 and 8: one finishes first, and both have the same state then."""
    (tmp_path / "spy.py").write_text(SPY)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    env["RATES"] = str(tmp_path / "rates")
    own = [*flags, "--sampling", "join", "--model", "spy:small", "--ledger", tmp_path / "ledger", "--ema", 0.9]
    own += ["--schedule", "poly", "--global-batch-size", 17]
    done = train_ranks(tmp_path, 2, *own, "--epochs", 2, **env)
    rates = [(tmp_path / f"rates-{rank}").read_text().split() for rank in (0, 1)]
    steps = sorted(len(rank_rates) // 2 for rank_rates in rates)
    assert steps[0] < steps[1]
    for epoch in (0, 1):  # the learning rate of a step is the same on all ranks
        first, second = (rank_rates[epoch * (len(rank_rates) // 2) :][: steps[0]] for rank_rates in rates)
        assert first == second
    history = effective_samples(tmp_path / "ledger")
    assert {epoch: (len(seen), len(set(seen))) for epoch, seen in history.items()} == {0: (203, 203), 1: (203, 203)}
    assert done.scalars("val_top1")[-1] > 0.3
    assert read_checkpoint(tmp_path / "2")["meta"]["cursor"]["epoch"] == 2
    more = train_ranks(tmp_path, 2, *own, "--epochs", 3, **env)
    assert more.marks("resume")[0].fields["epoch"] == 2
    assert "epoch 2 " in more.text


def test_an_error_is_reported_once(flags: list[object], tmp_path: Path) -> None:
    done = run(tmp_path / "log", 2, *flags, "--model", "resnet19")
    assert done.code == 2
    assert done.text.count("unknown model 'resnet19'; ") == 2  # the event, and the message
    assert "Traceback" not in done.text


def test_bf16_training_learns(flags: list[object], tmp_path: Path) -> None:
    own = [*flags, "--model", "small", "--epochs", 2]
    half = train_ranks(tmp_path, 1, *own, "--precision", "bf16", name="bf16")
    full = train_ranks(tmp_path, 1, *own, name="fp32")
    assert half.scalars("loss")[-1] < half.scalars("loss")[0]
    assert half.scalars("val_loss") == pytest.approx(full.scalars("val_loss"), abs=0.3)
    assert not is_close(tmp_path / "bf16", tmp_path / "fp32", 1e-4)


@pytest.mark.slow
def test_compiled_and_resumed_training_is_bit_identical(flags: list[object], tmp_path: Path) -> None:
    """Each start sees another shape first, as the last batch of an epoch is smaller."""
    own = [*flags, "--model", "small", "--val", "", "--epochs", 2, "--deterministic", "--compile"]
    train_ranks(tmp_path, 1, *own, name="whole")
    for batches in (12, 15, 26):
        train_ranks(tmp_path, 1, *own, "--num-batches", batches, name="parts")
    assert same_bits(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_compiled_training_is_close_to_plain(flags: list[object], tmp_path: Path) -> None:
    plain = train_ranks(tmp_path, 1, *flags, "--model", "small", "--epochs", 1, name="plain")
    compiled = train_ranks(tmp_path, 1, *flags, "--model", "small", "--epochs", 1, "--compile", name="compiled")
    assert is_close(tmp_path / "plain", tmp_path / "compiled", 1e-3)
    assert compiled.scalars("val_loss") == pytest.approx(plain.scalars("val_loss"), abs=1e-2)
