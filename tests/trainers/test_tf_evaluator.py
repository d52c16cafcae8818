"""The evaluator scores checkpoints as they appear, and ends with the training."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.tf_gangs import ForkServer, read_tf_checkpoint, run_gang, start_gang


def flags_of_training(flags: list[object], folder: Path) -> list[object]:
    return [*flags, "--model", "small", "--deterministic", "--ema", 0.9, "--checkpoint-dir", folder / "ck"]


def test_every_checkpoint_that_is_seen_is_scored_and_the_last_one_ends_it(
    tf_server: ForkServer, flags: list[object], shards: Path, tmp_path: Path
) -> None:
    """It runs beside the training and needs neither its flags nor a cluster; scalars are written for TensorBoard."""
    own = ["--val", shards / "val", "--checkpoint-dir", tmp_path / "ck", "--tensorboard", tmp_path / "tb"]
    with start_gang(tf_server, tmp_path / "logs", "tf_evaluator", {"evaluator": 1}, *own) as gang:
        training = [*flags_of_training(flags, tmp_path), "--epochs", 2, "--log-every", 0.01]
        trained = run_gang(tf_server, tmp_path / "logs", "tf_mirrored", {"worker": 1}, *training)
        assert trained.code == 0, trained.text
        done = gang["evaluator-0"].wait()
    assert done.code == 0, done.text
    meta = read_tf_checkpoint(tmp_path / "ck")["meta"]
    steps = [event.fields["step"] for event in done.marks("evaluated")]
    assert steps == sorted(set(steps))
    assert steps[-1] == meta["step"] == 26
    assert done.scalars("val_loss")[-1] == pytest.approx(meta["last"]["val_loss"], rel=1e-4)
    assert done.scalars("ema_top1")[-1] == pytest.approx(meta["last"]["ema_top1"])
    (events,) = (tmp_path / "tb").glob("events.out.tfevents.*")
    assert b"val_top1" in events.read_bytes()


def test_a_stop_signal_scores_the_newest_checkpoint_first(
    tf_server: ForkServer, flags: list[object], shards: Path, tmp_path: Path
) -> None:
    """The launcher stops observers when the training has ended or was stopped."""
    training = [*flags_of_training(flags, tmp_path), "--epochs", 9, "--num-batches", 3]
    assert run_gang(tf_server, tmp_path / "logs", "tf_mirrored", {"worker": 1}, *training).code == 0
    extended = read_tf_checkpoint(tmp_path / "ck")["meta"]
    assert extended["step"] == 3
    own = ["--val", shards / "val", "--checkpoint-dir", tmp_path / "none"]
    with start_gang(tf_server, tmp_path / "logs", "tf_evaluator", {"evaluator": 1}, *own) as gang:
        gang["evaluator-0"].wait_for('"k": "heartbeat"')
        (tmp_path / "ck").rename(tmp_path / "none")
        gang["evaluator-0"].kill(signal.SIGTERM)
        done = gang["evaluator-0"].wait(60)
    assert done.code == 0, done.text
    assert [event.fields["step"] for event in done.marks("evaluated")] == [3]
