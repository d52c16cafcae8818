"""Benchmark tf_mirrored from shards: against its synthetic twin, and against the same loop fed by tf.data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bench_train import find_source
from measure import STOKER, BenchContext, BenchResult, Comparison, Implementation, Timing, run_rounds

BATCH = 128
STEPS = {"resnet8": 150, "trivial": 60}
SHARDS, SYNTHETIC = "from shards", "synthetic"
LOADER, TF_DATA = "decode-bound, our loader", "decode-bound, tf.data"
PEER = Path(__file__).with_name("peer_tf_data.py")
_RATE = re.compile(r"done: .* ([\d,]+) images/s")


def run(context: BenchContext) -> BenchResult:
    small, large = context.work / "tf-small", context.work / "tf-large"
    source, what = find_source(context.work / "tf-source")
    for images, target, options in ((source, small, []), (context.images, large, ["--format", "tfrecord"])):
        words = [STOKER, "data", "convert", images, target, "--shard-samples", "500", *options]
        subprocess.run(words, check=True, capture_output=True)
    module = ["-m", "stoker.trainers.tf_mirrored"]
    implementations = [
        Implementation(name=SHARDS, run=lambda: train(module, small, "resnet8", 32), ours=True),
        Implementation(name=SYNTHETIC, run=lambda: train(module, small, "resnet8", 32, "--synthetic")),
        Implementation(name=LOADER, run=lambda: train(module, large, "trivial", 224), ours=True),
        Implementation(name=TF_DATA, run=lambda: train([str(PEER)], large, "trivial", 224)),
    ]
    speeds, _ = run_rounds(implementations, context.rounds, 1.0)
    return BenchResult(
        name="tf_mirrored",
        title="Train with TensorFlow on one worker",
        unit="images/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=[
            Comparison(ours=SHARDS, peer=SYNTHETIC, target=0.9),
            Comparison(ours=LOADER, peer=TF_DATA, target=1.3),
        ],
        notes=[
            f"{what}: resnet8 at 32 px; decode-bound: one linear layer at 224 px on the TFRecords of the other "
            f"benchmarks, with random crops and flips; only our loader antialiases. Global batch size {BATCH}, always "
            "the loop of tf_mirrored.",
        ],
    )


def train(program: list[str], shards: Path, model: str, size: int, *more: str) -> Timing:
    """Run a training; return the seconds per image, without its start."""
    words = f"--model {model} --size {size} --global-batch-size {BATCH} --num-batches {STEPS[model]} --epochs 20"
    argv = [sys.executable, *program, "--train", str(shards / "train"), *words.split(), "--validate-every", "0", *more]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=True)
    match = _RATE.search(done.stdout)
    assert match is not None, done.stdout
    return Timing(1.0 / float(match[1].replace(",", "")))
