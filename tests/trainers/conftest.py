"""Tiny shard sets that all tests of the trainers share, and a training in the process of the test."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.trees import stoker
from tests.trainers.trainings import Done

Train = Callable[..., Done]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 images in 21 shards for training, 31 to validate: nothing divides by anything."""
    folder = tmp_path_factory.mktemp("trainer") / "shards"
    source = "synthetic:samples=203,classes=5,size=24x18,val=31,seed=4"
    assert stoker("data", "convert", source, folder, "--shard-samples", 10) == 0
    return folder


@pytest.fixture(scope="session")
def flags(shards: Path) -> list[object]:
    """A training of few, quick steps: 203 samples in batches of 16 are 13 steps, the last of 11 samples."""
    data = ["--train", shards / "train", "--val", shards / "val", "--size", 16, "--threads", 1]
    return [*data, "--model", "trivial", "--global-batch-size", 16, "--lr", 0.05, "--log-every", 0.2]


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str]) -> Iterator[Train]:
    """Train in this process, alone: a start costs nothing."""
    import torch

    from stoker.trainers import flags, torch_image

    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    level = logging.getLogger().level

    def here(*words: object) -> Done:
        code = torch_image.main(flags.read([str(word) for word in words], {}))
        out, err = capfd.readouterr()
        return Done(code, out + err)

    yield here
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.getLogger().setLevel(level)
