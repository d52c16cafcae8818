"""A real checkpoint of the PyTorch trainer, and real SavedModels, each made once."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.trees import stoker

TRAINING = "synthetic:samples=60,classes=5,size=24x18,val=21,seed=4"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `shards` and the `checkpoints` of a short training with a moving average."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("trained")
    assert stoker("data", "convert", TRAINING, root / "shards", "--shard-samples", 10) == 0
    flags = ["--train", root / "shards/train", "--val", root / "shards/val", "--checkpoint-dir", root / "checkpoints"]
    flags += ["--size", 16, "--model", "small", "--epochs", 2, "--global-batch-size", 20, "--ema", 0.5, "--threads", 1]
    command = [sys.executable, "-m", "stoker.trainers.torch_image", *map(str, flags)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return root


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SavedModels of a process of their own: TensorFlow's threads must not be forked with ours."""
    if find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed")
    root = tmp_path_factory.mktemp("saved-models")
    program = Path(__file__).parent / "export_saved_models.py"
    subprocess.run([sys.executable, program, root], check=True, capture_output=True, timeout=240)
    return root
