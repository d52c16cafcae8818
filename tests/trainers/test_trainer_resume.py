"""Trainings that end too early and go on: killed at any moment, told to stop, in other worlds; nothing is lost or twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from trainings import Done, kill_all, ranks_of, run, same_bits, started, state, wait_for, weights
from stoker.trainers.ledger import effective, sessions

SAMPLES = 203
EPOCHS = 3


def exactly_once(ledger: Path, epochs: int = EPOCHS, samples: int = SAMPLES) -> None:
    history = effective(ledger)
    assert sorted(history) == list(range(epochs))
    for epoch, seen in history.items():
        assert len(seen) == samples, (epoch, len(seen))
        assert max(Counter(seen).values()) == 1


@pytest.fixture(scope="module")
def undisturbed(flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """A training of three ranks that nothing happens to, and its flags."""
    folder = tmp_path_factory.mktemp("undisturbed")
    mine = [*flags, "--model", "small", "--epochs", EPOCHS, "--deterministic", "--ema", 0.9]
    done = run(3, *mine, "--checkpoint-dir", folder / "ck", "--ledger", folder / "ledger")
    assert done.code == 0, done.text
    exactly_once(folder / "ledger")
    return mine, folder / "ck"


def test_killed_at_random_moments_it_ends_with_the_same_bits(
    undisturbed: tuple[list[object], Path], tmp_path: Path
) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger", "--checkpoint-every-steps", 2]
    log = tmp_path / "log"
    # A rank, and all at once, each after a step that nobody has chosen.
    for who in ("rank", "all"):
        log.write_text("")
        with started(log, 3, *own) as process:
            wait_for(log, process, '"name": "checkpoint"')
            time.sleep(random.random() * 0.3)
            if who == "rank" and process.poll() is None:
                os.kill(random.choice(ranks_of(process)), signal.SIGKILL)
                assert process.wait(60) != 0
            kill_all(process)
    done = run(3, *own)
    assert done.code == 0, done.text
    assert "goes on at epoch" in done.text or "is finished" in done.text
    exactly_once(tmp_path / "ledger")
    assert same_bits(weights(tmp_path / "ck"), weights(expected))
    one, other = state(tmp_path / "ck"), state(expected)
    assert same_bits(one["ema"], other["ema"])
    assert one["meta"]["best"] == other["meta"]["best"]


def test_sigterm_to_one_rank_stops_all_after_the_same_step(
    undisturbed: tuple[list[object], Path], tmp_path: Path
) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    log = tmp_path / "log"
    log.write_text("")
    with started(log, 3, *own) as process:
        wait_for(log, process, '"name": "loss"')
        os.kill(ranks_of(process)[1], signal.SIGTERM)
        process.wait(60)
    said = Done(0, log.read_text())
    assert "exitcode  : 143" in said.text
    assert len({event.fields["detail"] for event in said.marks("stop")}) == 1
    step = state(tmp_path / "ck")["meta"]["step"]
    assert said.marks("stop")[0].fields["detail"] == f"stopped after step {step:,}"
    done = run(3, *own)
    assert done.code == 0, done.text
    assert done.marks("resume")[0].fields["step"] == step
    exactly_once(tmp_path / "ledger")
    assert same_bits(weights(tmp_path / "ck"), weights(expected))
    again = run(3, *own)
    assert again.code == 0
    assert "this training is finished: 3 epochs, validation top-1" in again.text


def test_a_training_alone_ends_with_143_and_a_checkpoint(flags: list[object], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    with started(log, 1, *flags, "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", "") as process:
        wait_for(log, process, '"name": "loss"')
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert state(tmp_path / "ck")["meta"]["step"] > 0
    assert "the same command goes on from there" in log.read_text()


def test_the_world_changes_in_the_middle_of_an_epoch(flags: list[object], tmp_path: Path) -> None:
    own = [*flags, "--epochs", 2, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    batch = flags.index("--global-batch-size")
    own = [*own[:batch], "--batch-size", 5, *own[batch + 2 :]]  # of three ranks: 15 in all, whoever goes on
    for world, batches in ((3, 4), (2, 9)):
        assert run(world, *own, "--num-batches", batches).code == 0
    done = run(1, *own)
    assert done.code == 0, done.text
    assert sessions(tmp_path / "ledger") == [(0, 0), (0, 60), (0, 135)]
    exactly_once(tmp_path / "ledger", epochs=2)
    alone = run(1, *flags, "--global-batch-size", 15, "--epochs", 2, "--checkpoint-dir", tmp_path / "alone")
    assert alone.code == 0
    one, other = weights(tmp_path / "ck"), weights(tmp_path / "alone")
    assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one)
