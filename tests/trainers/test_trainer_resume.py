"""Trainings that end too early and go on: killed at any moment, told to stop, in other worlds."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.trainers.checkpoints import Checkpoints
from stoker.trainers.ledger import effective, sessions
from stoker.trainers.world import Stop, end_with_starter
from tests.trainers.trainings import Done, run, same_bits, started, state, weights

Train = Callable[..., Done]
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
    """The flags of a training of three ranks, and what it gives when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    mine = [*flags, "--model", "small", "--epochs", EPOCHS, "--deterministic", "--ema", 0.9]
    done = run(folder / "log", 3, *mine, "--checkpoint-dir", folder / "ck", "--ledger", folder / "ledger")
    assert done.code == 0, done.text
    exactly_once(folder / "ledger")
    return mine, folder / "ck"


def disturbed(own: list[object], log: Path, who: str, *, torchrun: bool = False, within_s: float = 0.3) -> None:
    """Kill a rank, the starter, or all of a training at some moment after its first new checkpoint."""
    with started(log, 3, *own, torchrun=torchrun) as gang:
        gang.wait_for('"name": "checkpoint"')
        time.sleep(random.random() * within_s)
        victims = {"rank": gang.ranks()[-2:-1], "starter": [gang.processes[0].pid], "all": gang.ranks()}[who]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        if who == "starter":  # its ranks are told to stop, write a checkpoint, and let go of the folder
            Checkpoints(str(own[own.index("--checkpoint-dir") + 1]), patience_s=60).close()
            done = gang.wait(60)
            assert done.marks("stop") or done.marks("end") or "this training is finished" in done.text, done.text
        if who == "rank":  # the others see that it is gone, and end
            done = gang.wait(60)
            assert done.code != 0
            assert done.marks("lost") or "this training is finished" in done.text or done.marks("end")


def ends_the_same(own: list[object], tmp_path: Path, expected: Path) -> None:
    done = run(tmp_path / "log", 3, *own)
    assert done.code == 0, done.text
    assert done.marks("resume")
    exactly_once(tmp_path / "ledger")
    one, other = state(tmp_path / "ck"), state(expected)
    assert same_bits(one["model"], other["model"])
    assert same_bits(one["ema"], other["ema"])
    assert one["meta"]["best"] == other["meta"]["best"]


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    undisturbed: tuple[list[object], Path], tmp_path: Path
) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger", "--checkpoint-every-steps", 2]
    disturbed(own, tmp_path / "log", "rank", within_s=0.0)
    disturbed(own, tmp_path / "log", "all")
    ends_the_same(own, tmp_path, expected)
    first, second, _ = sessions(tmp_path / "ledger")
    assert first == (0, 0)
    assert second[1] > 0, "it was not killed in the middle of an epoch"


@pytest.mark.slow
def test_killed_many_times_under_torchrun(undisturbed: tuple[list[object], Path], tmp_path: Path) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger", "--checkpoint-every-steps", 1]
    for who in ("rank", "all", "starter", "rank", "starter", "all"):
        disturbed(own, tmp_path / "log", who, torchrun=True)
    ends_the_same(own, tmp_path, expected)


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_after_the_same_step(
    undisturbed: tuple[list[object], Path], tmp_path: Path
) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    with started(tmp_path / "log", 3, *own, torchrun=True) as gang:
        gang.wait_for('"name": "loss"')
        os.kill(gang.ranks()[1], signal.SIGTERM)
        said = gang.wait(60)
    assert "exitcode  : 143" in said.text
    step = state(tmp_path / "ck")["meta"]["step"]
    assert {event.fields["detail"] for event in said.marks("stop")} == {f"stopped after step {step:,}"}
    ends_the_same(own, tmp_path, expected)


@pytest.mark.slow
def test_ranks_stop_when_torchrun_is_killed(flags: list[object], tmp_path: Path) -> None:
    own = [*flags, "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    with started(tmp_path / "log", 2, *own, torchrun=True) as gang:
        gang.wait_for('"name": "loss"')
        ranks = gang.ranks()
        os.kill(gang.processes[0].pid, signal.SIGKILL)
        try:
            Checkpoints(str(tmp_path / "ck"), patience_s=30).close()  # the folder is free for the next start
        finally:
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        done = gang.wait(30)
    step = state(tmp_path / "ck")["meta"]["step"]
    assert step > 0
    assert f"stopped after step {step:,}; the same command goes on from there" in done.text


SLOW_OR_FULL = """
import os, time
from stoker.errors import FullError
from stoker.trainers import checkpoints, models

pack = checkpoints._pack

def other(state, path):
    time.sleep(2)
    if os.environ["DISK"] == "full":
        raise FullError("no space left", where=path)
    pack(state, path)

checkpoints._pack = other

def net(num_classes):
    return models.Trivial(num_classes=num_classes)
"""


@pytest.mark.parametrize(("disk", "code"), [("slow", 143), ("full", 5)])
def test_all_ranks_wait_for_the_last_checkpoint(flags: list[object], tmp_path: Path, disk: str, code: int) -> None:
    """Else torchrun sees that one has ended, and kills the one that writes."""
    (tmp_path / "disks").mkdir()
    (tmp_path / "disks/odd.py").write_text(SLOW_OR_FULL)
    path = os.pathsep.join([str(tmp_path / "disks"), os.environ.get("PYTHONPATH", "")])
    own = [*flags, "--model", "odd:net", "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    own += ["--validate-every", 0, "--global-batch-size", 2, "--checkpoint-every", 0]
    with started(tmp_path / "log", 2, *own, PYTHONPATH=path, DISK=disk) as gang:
        gang.wait_for('"name": "loss"')
        os.kill(gang.ranks()[1], signal.SIGTERM)
        assert gang.processes[1].wait(60) == code
        there = list((tmp_path / "ck").glob("step-*.pt"))
        assert gang.processes[0].wait(60) == code
    assert bool(there) == (disk == "slow")
    assert len([line for line in gang.log.read_text().splitlines() if line.startswith("error: ")]) == (disk == "full")


def test_only_ranks_of_torchrun_end_with_their_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started in the background may outlive its shell."""
    asked: list[tuple[int, ...]] = []
    libc = SimpleNamespace(prctl=lambda *numbers: asked.append(numbers))
    monkeypatch.setattr("ctypes.CDLL", lambda _: libc)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    end_with_starter()
    assert asked == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    end_with_starter()
    assert asked == [(1, signal.SIGTERM, 0, 0, 0)]


def test_what_is_said_at_a_stop_is_so(
    flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stop, "listen", lambda self, at_once: setattr(self, "asked", signal.SIGTERM))  # noqa: ARG005
    without = train(*flags)
    assert without.code == 143
    assert "stopped after step 1\n" in without.text
    kept = train(*flags, "--checkpoint-dir", tmp_path)
    assert "stopped after step 1; the same command goes on from there\n" in kept.text
    assert state(tmp_path)["meta"]["step"] == 1


def test_a_training_alone_ends_with_143_and_a_checkpoint(flags: list[object], tmp_path: Path) -> None:
    own = [*flags, "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    with started(tmp_path / "log", 1, *own) as gang:
        gang.wait_for('"name": "loss"')
        os.kill(gang.ranks()[0], signal.SIGUSR1)  # where every thread is
        gang.wait_for("most recent call first")
        os.kill(gang.ranks()[0], signal.SIGTERM)
        done = gang.wait(30)
    assert done.code == 143
    assert state(tmp_path / "ck")["meta"]["step"] > 0
    assert "the same command goes on from there" in done.text


@pytest.mark.slow
def test_the_world_changes_in_the_middle_of_an_epoch(flags: list[object], train: Train, tmp_path: Path) -> None:
    own = [*flags, "--epochs", 2, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    batch = own.index("--global-batch-size")
    own[batch : batch + 2] = ["--batch-size", 5]  # of three ranks: 15 in all, whoever goes on
    for world, batches in ((3, 4), (2, 9)):
        done = run(tmp_path / "log", world, *own, "--num-batches", batches)
        assert done.code == 0, done.text
    assert train(*own).code == 0
    assert sessions(tmp_path / "ledger") == [(0, 0), (0, 60), (0, 135)]
    exactly_once(tmp_path / "ledger", epochs=2)
    alone = train(*flags, "--global-batch-size", 15, "--epochs", 2, "--checkpoint-dir", tmp_path / "1")
    assert alone.code == 0
    one, other = weights(tmp_path / "ck"), weights(tmp_path / "1")
    assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one)
