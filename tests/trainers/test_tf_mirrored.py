"""MultiWorkerMirroredStrategy with real workers: exact, resumable after any loss, bounded waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.trainers import models
from stoker.trainers.ledger import session_starts
from stoker.trainers.model_description import read_description
from stoker.trainers.trainer_process import stopped_after
from tests.support.servers import free_port
from tests.support.tf_gangs import ENV, ForkServer, assert_same_bits, read_tf_checkpoint, run_gang, start_gang
from tests.trainers.test_trainer_resume import assert_exactly_once

WORKERS = {"worker": 2}
MODULE = "tf_mirrored"
PEER_TIMEOUT_S = 12
"""Longer than a task that runs is silent on a busy machine."""
START_TIMEOUT_S = 3
MARGIN_S = 60
"""How much later a busy machine may notice a timeout."""
DIGITS = ["--size", 32, "--model", "small", "--transform", "digits-train", "--threads", 1, "--deterministic"]
TRAINED_ENOUGH = 0.95


@pytest.fixture(scope="module")
def tf_flags(flags: list[object]) -> list[object]:
    """13 steps per epoch, the last one of 11 samples."""
    return [*flags, "--model", "small", "--deterministic", "--ema", 0.9, "--epochs", 2]


@pytest.fixture(scope="module")
def undisturbed(tf_server: ForkServer, tf_flags: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that nothing happened to."""
    folder = tmp_path_factory.mktemp("mirrored")
    own = [*tf_flags, "--checkpoint-dir", folder / "ck", "--ledger", folder / "ledger"]
    done = run_gang(tf_server, folder / "logs", MODULE, WORKERS, *own)
    assert done.code == 0, done.text
    assert_exactly_once(folder / "ledger", 2)
    return folder


def test_digits_are_learned_and_exported(tf_server: ForkServer, digits: Path, tmp_path: Path) -> None:
    own = ["--train", digits / "shards/train", "--val", digits / "shards/val", *DIGITS, "--epochs", 4]
    own += ["--global-batch-size", 64, "--lr", 0.1, "--schedule", "cosine", "--export", tmp_path / "model"]
    done = run_gang(tf_server, tmp_path / "logs", MODULE, WORKERS, *own, "--checkpoint-dir", tmp_path / "ck")
    assert done.code == 0, done.text
    top1 = done.scalars("val_top1")[-1]
    assert top1 > TRAINED_ENOUGH
    assert done.marks("end")[0].fields["val_top1"] == top1
    (version,) = (tmp_path / "model").iterdir()
    assert version.name == str(read_tf_checkpoint(tmp_path / "ck")["meta"]["step"])
    description = read_description(version)
    assert description is not None
    assert description.classes == tuple(str(digit) for digit in range(10))
    assert (description.scores, description.image.size, description.image.transform) == ("probabilities", 32, "whole")
    program = f"""
import numpy as np, tensorflow as tf
from stoker import Loader
serve = tf.saved_model.load({str(version)!r}).signatures["serving_default"]
loader = Loader({str(digits / "shards/val")!r}, global_batch=360, transform="whole", size=32, rank=(0, 1))
(batch,) = loader
found = serve(images=tf.constant(batch.images))["probabilities"].numpy().argmax(1)
print("accuracy", (found == batch.labels).mean())
"""
    env = {**os.environ, **ENV}
    served = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert float(served.stdout.split()[-1]) == pytest.approx(top1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_worker_ends_the_others_and_the_resumed_training_has_the_same_bits(
    tf_server: ForkServer, tf_flags: list[object], undisturbed: Path, tmp_path: Path, number: signal.Signals
) -> None:
    own = [*tf_flags, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
    own += ["--checkpoint-every-steps", 2]
    with start_gang(tf_server, tmp_path / "logs", MODULE, WORKERS, *own, "--peer-timeout", PEER_TIMEOUT_S) as gang:
        gang["worker-0"].wait_for('"name": "checkpoint"')
        gang["worker-1"].kill(number)
        lost = gang["worker-0"].wait(PEER_TIMEOUT_S + MARGIN_S)
        assert lost.code == 1, lost.text
        assert len(lost.marks("lost")) == 1
        assert "Traceback" not in lost.text
    assert run_gang(tf_server, tmp_path / "logs", MODULE, WORKERS, *own).code == 0
    assert_exactly_once(tmp_path / "ledger", 2)
    assert len(session_starts(tmp_path / "ledger")) == 2
    assert_same_bits(read_tf_checkpoint(tmp_path / "ck"), read_tf_checkpoint(undisturbed / "ck"))


def test_only_the_chief_needs_the_checkpoints(
    tf_server: ForkServer, tf_flags: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    """The others receive the state by broadcast: their directory cannot even be created."""
    own = [*tf_flags, "--ledger", tmp_path / "ledger"]
    places = {"worker-0": tmp_path / "ck", "worker-1": Path("/proc/none")}
    for limit in (["--num-batches", 5], []):
        with start_gang(tf_server, tmp_path / "logs", MODULE, WORKERS, *own, *limit, absent=tuple(places)) as gang:
            for name, place in places.items():
                gang.start(name, STOKER_CHECKPOINT_DIR=str(place))
            results = gang.wait()
        assert [result.code for result in results.values()] == [0, 0], results
    assert_exactly_once(tmp_path / "ledger", 2)
    assert_same_bits(read_tf_checkpoint(tmp_path / "ck"), read_tf_checkpoint(undisturbed / "ck"))


def test_resumed_with_other_numbers_of_workers(tf_server: ForkServer, tf_flags: list[object], tmp_path: Path) -> None:
    """Every sample once, and without BatchNorm the weights of one worker, up to rounding; an empty share included."""
    own = [*tf_flags, "--model", "trivial", "--global-batch-size", 29, "--lr", 0.01]  # 203 = 7 × 29
    for workers, batches in ((2, 3), (3, 8), (1, 14)):
        limit = ["--num-batches", batches, "--checkpoint-dir", tmp_path / "ck", "--ledger", tmp_path / "ledger"]
        done = run_gang(tf_server, tmp_path / "logs", MODULE, {"worker": workers}, *own, *limit)
        assert done.code == 0, done.text
    assert session_starts(tmp_path / "ledger") == [(0, 0), (0, 87), (1, 29)]
    assert_exactly_once(tmp_path / "ledger", 2)
    assert (
        run_gang(tf_server, tmp_path / "logs", MODULE, {"worker": 1}, *own, "--checkpoint-dir", tmp_path / "1").code
        == 0
    )
    for name, weight in read_tf_checkpoint(tmp_path / "1")["weights"].items():
        np.testing.assert_allclose(read_tf_checkpoint(tmp_path / "ck")["weights"][name], weight, atol=1e-5)


def test_tfrecords_train_like_tars(tf_server: ForkServer, digits: Path, tmp_path: Path) -> None:
    for kind in ("shards", "tfrecord"):
        own = ["--train", digits / kind / "train", *DIGITS, "--num-batches", 3, "--checkpoint-dir", tmp_path / kind]
        assert run_gang(tf_server, tmp_path / "logs", MODULE, {"worker": 1}, *own).code == 0
    assert_same_bits(read_tf_checkpoint(tmp_path / "shards"), read_tf_checkpoint(tmp_path / "tfrecord"))


def test_a_worker_that_never_starts(tf_server: ForkServer, tf_flags: list[object], tmp_path: Path) -> None:
    limits = ["--start-timeout", START_TIMEOUT_S]
    with start_gang(tf_server, tmp_path, MODULE, WORKERS, *tf_flags, *limits, absent=("worker-1",)) as gang:
        done = gang["worker-0"].wait(START_TIMEOUT_S + MARGIN_S)
    assert done.code == 1
    assert len(done.marks("lost")) == 1
    assert "Traceback" not in done.text


def test_sigterm_to_one_worker_stops_all_after_the_same_step(
    tf_server: ForkServer, tf_flags: list[object], tmp_path: Path
) -> None:
    own = [*tf_flags, "--epochs", 1000, "--checkpoint-dir", tmp_path / "ck", "--val", ""]
    with start_gang(tf_server, tmp_path / "logs", MODULE, WORKERS, *own) as gang:
        gang["worker-0"].wait_for('"name": "loss"')
        gang["worker-1"].kill(signal.SIGTERM)
        results = gang.wait(timeout=60)
    assert {result.code for result in results.values()} == {143}
    step = read_tf_checkpoint(tmp_path / "ck")["meta"]["step"]
    assert results["worker-0"].marks("stop")[0].fields["detail"] == stopped_after(step)


def test_ranks_of_mpirun_find_each_other(tf_server: ForkServer, tf_flags: list[object], tmp_path: Path) -> None:
    """Without TF_CONFIG: rank 0 collects the addresses."""
    own = [*tf_flags, "--num-batches", 3, "--checkpoint-dir", tmp_path / "ck"]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMPI_COMM_WORLD_SIZE": "2", "TF_CONFIG": ""}
    env |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    names = ("worker-0", "worker-1")
    with start_gang(tf_server, tmp_path / "logs", MODULE, WORKERS, *own, absent=names) as gang:
        for rank, name in enumerate(names):
            gang.start(name, **env, OMPI_COMM_WORLD_RANK=str(rank))
        results = gang.wait()
    assert [result.code for result in results.values()] == [0, 0], results
    assert results["worker-0"].marks("start")[0].fields["world"] == 2


def test_a_checkpoint_is_validated(
    tf_server: ForkServer, tf_flags: list[object], undisturbed: Path, tmp_path: Path
) -> None:
    expected = read_tf_checkpoint(undisturbed / "ck")["meta"]["last"]
    for number, source in enumerate(
        (["--checkpoint-dir", undisturbed / "ck"], ["--init-from", undisturbed / "ck/best.npz"])
    ):
        folder = tmp_path / str(number)
        done = run_gang(tf_server, folder, MODULE, WORKERS, *tf_flags, "--eval-only", *source)
        assert done.code == 0, done.text
        if not number:
            assert done.scalars("val_loss") == [pytest.approx(expected["val_loss"], rel=1e-5)]
            assert done.scalars("ema_top1") == [pytest.approx(expected["ema_top1"])]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--model", "vgg"], "vgg"),
        (["--model", "json:loads"], "json:loads"),
        (["--model", "resnet8"], "model small, now resnet8"),
        (["--seed", 5], "seed 0, now 5"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    tf_server: ForkServer, tf_flags: list[object], undisturbed: Path, tmp_path: Path, more: list[object], part: str
) -> None:
    own = [*tf_flags, "--checkpoint-dir", undisturbed / "ck", "--epochs", 9, *more]
    done = run_gang(tf_server, tmp_path, MODULE, {"worker": 1}, *own)
    assert done.code == 2, done.text
    (line,) = [line for line in done.text.splitlines() if line.startswith("error: ")]
    assert part in line
    assert "Traceback" not in done.text


@pytest.mark.parametrize(
    "model", ["resnet18", pytest.param("resnet50", marks=pytest.mark.slow), "tests.support.tf_own_model:net"]
)
def test_own_models_and_resnets(tf_server: ForkServer, tf_flags: list[object], tmp_path: Path, model: str) -> None:
    """The built-in ResNets have the weights of those of PyTorch; a user's model may have random layers."""
    own = [*tf_flags, "--val", "", "--num-batches", 1, "--model", model]
    done = run_gang(tf_server, tmp_path, MODULE, {"worker": 1}, *own)
    assert done.code == 0, done.text
    expected = 8 * 3 * 9 + 8 + 5 * (8 + 1)
    if ":" not in model:
        twin = models.build_model(model, num_classes=5, size=16)
        expected = sum(weight.numel() for weight in twin.parameters())
    assert done.marks("start")[-1].fields["parameters"] == expected
