"""Tiny shard sets that all tests of the trainers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import stoker

pytest.importorskip("torch")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 images in 21 shards and one lane for training, 31 to validate: nothing divides by anything."""
    folder = tmp_path_factory.mktemp("trainer") / "shards"
    source = "synthetic:samples=203,classes=5,size=24x18,val=31,seed=4"
    assert stoker("data", "convert", source, folder, "--shard-samples", 10) == 0
    return folder


@pytest.fixture(scope="session")
def flags(shards: Path) -> list[object]:
    """A training of few, quick steps: 203 samples in batches of 16 are 13 steps, the last of 11 samples."""
    data = ["--train", shards / "train", "--val", shards / "val", "--size", 16, "--threads", 1]
    return [*data, "--model", "trivial", "--global-batch-size", 16, "--lr", 0.05, "--log-every", 0.2]
