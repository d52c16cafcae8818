"""Trainings that are killed or stopped and resumed, also with another world size: same bits, exact ledger."""

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

from stoker.trainers.checkpoints import open_checkpoints
from stoker.trainers.ledger import effective_samples, session_starts
from stoker.trainers.stop_signal import StopSignal
from stoker.trainers.trainer_process import RERUN_TO_RESUME, how_to_resume, stopped_after
from stoker.trainers.world import exit_with_parent
from tests.support.trainings import TrainingResult, read_checkpoint, run, same_bits, start_training, weights

Train = Callable[..., TrainingResult]
SAMPLES = 203
EPOCHS = 3
LONG_EPOCHS = 20


def assert_exactly_once(ledger: Path, epochs: int = EPOCHS, samples: int = SAMPLES) -> None:
    history = effective_samples(ledger)
    assert sorted(history) == list(range(epochs))
    for epoch, seen in history.items():
        assert len(seen) == samples, (epoch, len(seen))
        assert max(Counter(seen).values()) == 1


def train_undisturbed(flags: list[object], folder: Path, epochs: int) -> tuple[list[object], Path]:
    """Train with three ranks; return the flags and the directory of the checkpoints."""
    own = [*flags, "--model", "small", "--epochs", epochs, "--deterministic", "--ema", 0.9]
    result = ["--checkpoint-dir", folder / "ck", "--ledger", folder / "ledger"]
    done = run(folder / "log", 3, *own, *result, timeout=600)
    assert done.code == 0, done.text
    assert_exactly_once(folder / "ledger", epochs)
    return own, folder / "ck"


@pytest.fixture(scope="module")
def undisturbed(flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path]:
    """The flags of a training with three ranks, and its checkpoints if nothing happens to it."""
    return train_undisturbed(flags, tmp_path_factory.mktemp("undisturbed"), EPOCHS)


def interrupt(own: list[object], log: Path, victim: str, *, torchrun: bool = False, within_s: float = 0.3) -> None:
    """Kill a rank, torchrun or all ranks at a random moment after the first checkpoint of this start."""
    with start_training(log, 3, *own, torchrun=torchrun) as training:
        training.wait_for('"name": "checkpoint"')
        time.sleep(random.random() * within_s)
        ranks = training.ranks()
        pids = {"rank": ranks[-2:-1], "torchrun": [training.processes[0].pid], "all": ranks}[victim]
        assert pids, log.read_text()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if victim == "torchrun":  # its ranks are stopped, write a checkpoint and unlock the directory
            open_checkpoints(str(own[own.index("--checkpoint-dir") + 1]), lock_timeout_s=60).close()
            done = training.wait(60)
            assert done.marks("stop"), done.text
        if victim == "rank":  # the others lose the connection and exit
            done = training.wait(60)
            assert done.code != 0
            assert done.marks("lost"), done.text
    assert '"name": "end"' not in log.read_text(), "finished before it was killed: it needs more epochs"


def assert_same_result(own: list[object], tmp_path: Path, expected: Path, epochs: int = EPOCHS) -> None:
    done = run(tmp_path / "log", 3, *own, timeout=600)
    assert done.code == 0, done.text
    assert done.marks("resume")
    assert_exactly_once(tmp_path / "ledger", epochs)
    one, other = read_checkpoint(tmp_path / "ck"), read_checkpoint(expected)
    assert same_bits(one["model"], other["model"])
    assert same_bits(one["ema"], other["ema"])
    assert one["meta"]["best"] == other["meta"]["best"]


@pytest.mark.slow
def test_killed_at_random_moments_the_result_is_bit_identical(
    undisturbed: tuple[list[object], Path], tmp_path: Path
) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger", "--checkpoint-every-steps", 2]
    interrupt(own, tmp_path / "log", "rank", within_s=0.0)
    interrupt(own, tmp_path / "log", "all")
    assert_same_result(own, tmp_path, expected)
    first, second, _ = session_starts(tmp_path / "ledger")
    assert first == (0, 0)
    assert second[1] > 0, "was not killed in the middle of an epoch"


@pytest.mark.slow
def test_killed_many_times_with_torchrun(flags: list[object], tmp_path: Path) -> None:
    """Kill it six times at random moments; it has so many epochs that it never finishes before a kill."""
    (tmp_path / "undisturbed").mkdir()
    own, expected = train_undisturbed(flags, tmp_path / "undisturbed", LONG_EPOCHS)
    own += ["--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger", "--checkpoint-every-steps", 1]
    victims = ("rank", "all", "torchrun", "rank", "torchrun", "all")
    for victim in victims:
        interrupt(own, tmp_path / "log", victim, torchrun=True)
    assert_same_result(own, tmp_path, expected, LONG_EPOCHS)
    assert len(session_starts(tmp_path / "ledger")) == len(victims) + 1


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_after_the_same_step(
    undisturbed: tuple[list[object], Path], tmp_path: Path
) -> None:
    flags, expected = undisturbed
    own = [*flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    with start_training(tmp_path / "log", 3, *own, torchrun=True) as training:
        training.wait_for('"name": "loss"')
        os.kill(training.ranks()[1], signal.SIGTERM)
        done = training.wait(60)
    assert "exitcode  : 143" in done.text
    step = read_checkpoint(tmp_path / "ck")["meta"]["step"]
    assert {event.fields["detail"] for event in done.marks("stop")} == {stopped_after(step)}
    assert_same_result(own, tmp_path, expected)


def test_job_is_resumed_by_its_own_command() -> None:
    assert how_to_resume({"STOKER_RUN": "digits-1"}).endswith("stoker job run --resume digits-1")
    assert how_to_resume({}) == RERUN_TO_RESUME


@pytest.mark.slow
def test_ranks_stop_when_torchrun_is_killed(flags: list[object], tmp_path: Path) -> None:
    own = [*flags, "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    with start_training(tmp_path / "log", 2, *own, torchrun=True) as training:
        training.wait_for('"name": "loss"')
        ranks = training.ranks()
        os.kill(training.processes[0].pid, signal.SIGKILL)
        try:
            open_checkpoints(
                str(tmp_path / "ck"), lock_timeout_s=60
            ).close()  # the directory is free for the next start
        finally:
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        done = training.wait(60)
    step = read_checkpoint(tmp_path / "ck")["meta"]["step"]
    assert step > 0
    assert done.marks("stop")[0].fields["detail"] == stopped_after(step)
    assert f"{stopped_after(step)}; {RERUN_TO_RESUME}\n" in done.text


SLOW_OR_FULL_DISK = """
import os, time
from stoker.errors import StorageFullError
from stoker.trainers import checkpoint_store, models

write_file = checkpoint_store._write_file

def write_slowly(checkpoint_format, state, path):
    time.sleep(2)
    if os.environ["DISK"] == "full":
        raise StorageFullError("no space left", where=path)
    write_file(checkpoint_format, state, path)

checkpoint_store._write_file = write_slowly

def net(num_classes):
    return models.TrivialNet(num_classes=num_classes)
"""


@pytest.mark.parametrize(("disk", "code"), [("slow", 143), ("full", 5)])
def test_all_ranks_wait_for_the_last_checkpoint(flags: list[object], tmp_path: Path, disk: str, code: int) -> None:
    """Otherwise torchrun sees that one rank has exited, and kills the one that writes."""
    (tmp_path / "disks").mkdir()
    (tmp_path / "disks/slow_disk.py").write_text(SLOW_OR_FULL_DISK)
    path = os.pathsep.join([str(tmp_path / "disks"), os.environ.get("PYTHONPATH", "")])
    own = [*flags, "--model", "slow_disk:net", "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    own += ["--validate-every", 0, "--global-batch-size", 2, "--checkpoint-every", 0]
    with start_training(tmp_path / "log", 2, *own, PYTHONPATH=path, DISK=disk) as training:
        training.wait_for('"name": "loss"')
        os.kill(training.ranks()[1], signal.SIGTERM)
        assert training.processes[1].wait(60) == code
        written = list((tmp_path / "ck").glob("step-*.pt"))
        assert training.processes[0].wait(60) == code
    assert bool(written) == (disk == "slow")
    assert len([line for line in training.log.read_text().splitlines() if line.startswith("error: ")]) == (
        disk == "full"
    )


def test_only_ranks_of_torchrun_exit_with_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was started in the background may outlive its shell."""
    calls: list[tuple[int, ...]] = []
    libc = SimpleNamespace(prctl=lambda *numbers: calls.append(numbers))
    monkeypatch.setattr("ctypes.CDLL", lambda _: libc)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    exit_with_parent()
    assert calls == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    exit_with_parent()
    assert calls == [(1, signal.SIGTERM, 0, 0, 0)]


def test_a_stop_mentions_resuming_only_with_checkpoints(
    flags: list[object], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopSignal, "install", lambda self, immediate: setattr(self, "received", signal.SIGTERM))  # noqa: ARG005
    without = train(*flags)
    assert without.code == 143
    assert f"{stopped_after(1)}\n" in without.text
    resumable = train(*flags, "--checkpoint-dir", tmp_path)
    assert f"{stopped_after(1)}; {RERUN_TO_RESUME}\n" in resumable.text
    assert read_checkpoint(tmp_path)["meta"]["step"] == 1


def test_sigterm_writes_a_checkpoint_and_exits_with_143(flags: list[object], tmp_path: Path) -> None:
    own = [*flags, "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    with start_training(tmp_path / "log", 1, *own) as training:
        training.wait_for('"name": "loss"')
        os.kill(training.ranks()[0], signal.SIGUSR1)  # prints the stacks of all threads
        training.wait_for("most recent call first")
        os.kill(training.ranks()[0], signal.SIGTERM)
        done = training.wait(60)
    assert done.code == 143
    step = read_checkpoint(tmp_path / "ck")["meta"]["step"]
    assert step > 0
    assert [event.fields["detail"] for event in done.marks("stop")] == [stopped_after(step)]
    assert f"{stopped_after(step)}; {RERUN_TO_RESUME}\n" in done.text


@pytest.mark.slow
def test_resuming_with_other_world_sizes_in_the_middle_of_an_epoch(
    flags: list[object], train: Train, tmp_path: Path
) -> None:
    own = [*flags, "--epochs", 2, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    batch = own.index("--global-batch-size")
    own[batch : batch + 2] = ["--batch-size", 5]  # with three ranks: 15 in total, also after a resume with fewer
    for world, batches in ((3, 4), (2, 9)):
        done = run(tmp_path / "log", world, *own, "--num-batches", batches)
        assert done.code == 0, done.text
    assert train(*own).code == 0
    assert session_starts(tmp_path / "ledger") == [(0, 0), (0, 60), (0, 135)]
    assert_exactly_once(tmp_path / "ledger", epochs=2)
    alone = train(*flags, "--global-batch-size", 15, "--epochs", 2, "--checkpoint-dir", tmp_path / "1")
    assert alone.code == 0
    one, other = weights(tmp_path / "ck"), weights(tmp_path / "1")
    assert all((one[name] - other[name]).abs().max() < 1e-5 for name in one)
