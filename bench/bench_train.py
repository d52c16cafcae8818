"""Benchmark a training from shards against the same training on synthetic data, without reading and decoding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from dataset import SAMPLE
from measure import STOKER, BenchContext, BenchResult, Comparison, Implementation, Timing, run_rounds

CIFAR = SAMPLE.with_name("cifar10-images.tar.xz")
STEPS, BATCH = 120, 128
SHARDS, SYNTHETIC = "from shards", "synthetic"
_RATE = re.compile(r"done: .* ([\d,]+) images/s")


def run(context: BenchContext) -> BenchResult:
    shards = context.work / "cifar"
    source, what = find_source(context.work / "cifar10")
    subprocess.run(
        [STOKER, "data", "convert", source, shards, "--shard-samples", "500"], check=True, capture_output=True
    )
    implementations = [
        Implementation(name=SHARDS, run=lambda: _train(shards), ours=True),
        Implementation(name=SYNTHETIC, run=lambda: _train(shards, "--synthetic")),
    ]
    speeds, _ = run_rounds(implementations, context.rounds, STEPS * BATCH)
    return BenchResult(
        name="train",
        title="Train a small ResNet on two ranks",
        unit="images/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[Comparison(ours=SHARDS, peer=SYNTHETIC, target=0.85)],
        notes=[
            f"{what}; resnet8 at 32 px, global batch size {BATCH}, {STEPS} steps, one thread per rank, both ranks on "
            "the cores of this machine: decoding competes with the model for CPU time, unlike on a GPU.",
        ],
    )


def find_source(folder: Path) -> tuple[str, str]:
    if not CIFAR.exists():
        return "synthetic:samples=20000,classes=10,size=32x32,val=100", "Generated images (CIFAR-10 is not available)"
    with tarfile.open(CIFAR) as archive:
        archive.extractall(folder, filter="data")
    return str(next(folder.iterdir())), "CIFAR-10"


def _train(shards: Path, *more: str) -> Timing:
    words = f"--model resnet8 --size 32 --global-batch-size {BATCH} --num-batches {STEPS} --epochs 1 --validate-every 0"
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29518"]
    argv += ["-m", "stoker.trainers.torch_image", "--train", str(shards / "train"), *words.split(), *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=True)
    match = _RATE.search(done.stdout)
    assert match is not None, done.stdout
    return Timing(STEPS * BATCH / float(match[1].replace(",", "")))
