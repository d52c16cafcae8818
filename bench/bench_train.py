"""A training from shards beside its synthetic twin, which reads and decodes nothing: how well the model is fed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from dataset import SAMPLE
from measure import STOKER, Contestant, Lab, Ran, Result, Versus, take_turns

CIFAR = SAMPLE.with_name("cifar10-images.tar.xz")
STEPS, BATCH = 120, 128
FED, TWIN = "from shards", "synthetic"
_RATE = re.compile(r"done: .* ([\d,]+) images/s")


def run(lab: Lab) -> Result:
    shards = lab.work / "cifar"
    source, what = _source(lab.work / "cifar10")
    subprocess.run(
        [STOKER, "data", "convert", source, shards, "--shard-samples", "500"], check=True, capture_output=True
    )
    contestants = [
        Contestant(name=FED, act=lambda: _train(shards), ours=True),
        Contestant(name=TWIN, act=lambda: _train(shards, "--synthetic")),
    ]
    speeds, _ = take_turns(contestants, lab.rounds, STEPS * BATCH)
    return Result(
        name="train",
        title="Training a small ResNet on two ranks",
        unit="images/s",
        contestants=contestants,
        speeds=speeds,
        versus=[Versus(ours=FED, peer=TWIN, target=0.85)],
        notes=[
            f"{what}; resnet8 at 32 px, global batch {BATCH}, {STEPS} steps, a thread a rank, both on this machine's "
            "cores: so decoding takes time from the model, which a GPU would not feel.",
        ],
    )


def _source(folder: Path) -> tuple[str, str]:
    if not CIFAR.exists():
        return "synthetic:samples=20000,classes=10,size=32x32,val=100", "Made-up images (CIFAR-10 is not here)"
    with tarfile.open(CIFAR) as archive:
        archive.extractall(folder, filter="data")
    return str(next(folder.iterdir())), "CIFAR-10"


def _train(shards: Path, *more: str) -> Ran:
    words = f"--model resnet8 --size 32 --global-batch-size {BATCH} --num-batches {STEPS} --epochs 1 --validate-every 0"
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29518"]
    argv += ["-m", "stoker.trainers.torch_image", "--train", str(shards / "train"), *words.split(), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=True)
    found = _RATE.search(done.stdout)
    assert found is not None, done.stdout
    return Ran(STEPS * BATCH / float(found[1].replace(",", "")))
