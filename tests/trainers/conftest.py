"""Tiny shard sets for the tests of the trainers, and a trainer that runs in the test process."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.tf_gangs import ForkServer
from tests.support.trainings import TrainingResult
from tests.support.trees import stoker

Train = Callable[..., TrainingResult]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 images in 21 shards for training, 31 for validation: no number divides another."""
    folder = tmp_path_factory.mktemp("trainer") / "shards"
    source = "synthetic:samples=203,classes=5,size=24x18,val=31,seed=4"
    assert stoker("data", "convert", source, folder, "--shard-samples", 10) == 0
    return folder


@pytest.fixture(scope="session")
def flags(shards: Path) -> list[object]:
    """Flags of a short training: 203 samples in batches of 16 are 13 steps, the last one of 11 samples."""
    data = ["--train", shards / "train", "--val", shards / "val", "--size", 16, "--threads", 1]
    return [*data, "--model", "trivial", "--global-batch-size", 16, "--lr", 0.05, "--log-every", 0.2]


@pytest.fixture(scope="session")
def tf_server() -> Iterator[ForkServer]:
    """A process that has imported TensorFlow, from which trainers are forked."""
    pytest.importorskip("keras")
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's digits as tar shards and, in `tfrecord`, as TFRecord shards with the same samples."""
    from stoker.demo.digits import write_digits

    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "images")
    for target, kind in (("shards", "tar"), ("tfrecord", "tfrecord")):
        options = ["--shard-samples", 100, "--format", kind]
        assert stoker("data", "convert", folder / "images", folder / target, *options) == 0
    return folder


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str]) -> Iterator[Train]:
    """Train in this process with one rank, which saves the start of a process."""
    import torch

    from stoker.trainers import flags, torch_image

    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    level = logging.getLogger().level

    def run(*args: object) -> TrainingResult:
        code = torch_image.main(flags.parse_flags([str(arg) for arg in args], {}))
        out, err = capfd.readouterr()
        return TrainingResult(code, out + err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.getLogger().setLevel(level)
