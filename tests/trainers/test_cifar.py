"""CIFAR-10 from shards on a CPU: a small ResNet, two ranks, at least 70 % within ten minutes of two cores."""

from __future__ import annotations

import resource
import tarfile
from pathlib import Path

import pytest

from tests.support.paths import SHARED
from tests.support.trainings import run
from tests.support.trees import stoker

IMAGES = SHARED / "data/cifar10-images.tar.xz"
FLAGS = ["--size", "32", "--model", "resnet8", "--global-batch-size", "128", "--channels-last", "--log-every", "10"]
LEARN = [
    "--epochs",
    "6",
    "--lr",
    "0.1",
    "--nesterov",
    "--weight-decay",
    "5e-4",
    "--schedule",
    "cosine",
    "--warmup-epochs",
    "0.5",
]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not IMAGES.exists():
        pytest.skip(f"{IMAGES.name} not found")
    folder = tmp_path_factory.mktemp("cifar")
    with tarfile.open(IMAGES) as tar:
        tar.extractall(folder, filter="data")
    assert stoker("data", "convert", folder / "cifar10", folder / "shards", "--shard-samples", 1000) == 0
    return folder / "shards"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_70_percent_within_10_minutes(cifar: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    data = ["--train", cifar / "train", "--val", cifar / "test", "--checkpoint-dir", tmp_path / "ck"]
    done = run(tmp_path / "log", 2, *data, *FLAGS, *LEARN, torchrun=True, timeout=3000)
    assert done.code == 0, done.text
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # on a busy machine, the wall-clock time says nothing
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 2 * 600
    assert done.marks("end")[0].fields["val_top1"] >= 0.70
