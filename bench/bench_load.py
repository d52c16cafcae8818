"""Benchmark `stoker.Loader` against webdataset, tf.data and a C loop over the native decoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import peer_loaders
from measure import (
    STOKER,
    BenchContext,
    BenchResult,
    Comparison,
    Implementation,
    Limit,
    Timing,
    run_rounds,
    time_command,
    time_script,
)

ANTIALIASED = "stoker.Loader, native, antialiased"
PLAIN = "stoker.Loader, native, not antialiased"
ANTIALIASED_PYTHON = "stoker.Loader, python, antialiased"
PLAIN_PYTHON = "stoker.Loader, python, not antialiased"
ANTIALIASED_LIMIT = "bare C loop, antialiased"
PLAIN_LIMIT = "bare C loop, not antialiased"
PIL = "webdataset + PIL, antialiased"
CV2 = "webdataset + cv2, not antialiased"
TF = "tf.data, not antialiased"
ANTIALIASED_TF = "tf.data, antialiased"

MAX_SAMPLES = 8192
MAX_ROUNDS = 5

COMPARISONS = [
    Comparison(ours=ANTIALIASED, peer=PIL, target=2.2, note="both antialiased"),
    Comparison(ours=PLAIN, peer=PIL, note="only PIL antialiased"),
    Comparison(ours=PLAIN, peer=CV2, target=1.2, note="neither antialiased"),
    Comparison(ours=PLAIN, peer=TF, target=1.1, note="neither antialiased"),
    Comparison(ours=ANTIALIASED, peer=TF, note="only ours antialiased"),
    Comparison(ours=ANTIALIASED, peer=ANTIALIASED_TF, note="both antialiased"),
    Comparison(ours=ANTIALIASED, peer=ANTIALIASED_PYTHON, target=1.25, note="speedup by the native decoder"),
    Comparison(ours=PLAIN, peer=PLAIN_PYTHON, target=1.25, note="speedup by the native decoder"),
    Comparison(ours=ANTIALIASED, peer=ANTIALIASED_LIMIT, target=0.9, note="overhead of the loader"),
    Comparison(ours=PLAIN, peer=PLAIN_LIMIT, target=0.9, note="overhead of the loader"),
    Comparison(ours=ANTIALIASED_PYTHON, peer=PIL, note="without the native decoder, both antialiased"),
    Comparison(ours=PLAIN_PYTHON, peer=CV2, note="without the native decoder, neither antialiased"),
    Comparison(ours=PLAIN_PYTHON, peer=TF, note="without the native decoder, neither antialiased"),
]


def run(context: BenchContext) -> BenchResult:
    batches = min(context.samples, MAX_SAMPLES) // peer_loaders.BATCH
    samples = batches * peer_loaders.BATCH
    timed = samples - peer_loaders.WARMUP_BATCHES * peer_loaders.BATCH
    shards, records = context.work / "shards", context.work / "records"
    for out in (shards, records):
        shutil.rmtree(out, ignore_errors=True)
    time_command(STOKER, "data", "convert", "--shard-size", "64MiB", "--limit", str(samples), context.images, shards)
    time_command(STOKER, "data", "convert", "--shard-size", "64MiB", "--format", "tfrecord", shards, records)

    def load(loader: str, folder: Path = shards) -> Timing:
        return time_script(peer_loaders.__file__, loader, folder / "train", str(batches))

    implementations = [
        Implementation(name=ANTIALIASED, run=lambda: load("stoker-native-antialiased"), ours=True),
        Implementation(name=PLAIN, run=lambda: load("stoker-native"), ours=True),
        Implementation(name=ANTIALIASED_PYTHON, run=lambda: load("stoker-python-antialiased"), ours=True),
        Implementation(name=PLAIN_PYTHON, run=lambda: load("stoker-python"), ours=True),
        Implementation(name=PIL, run=lambda: load("webdataset-pil")),
        Implementation(name=CV2, run=lambda: load("webdataset-cv2")),
        Implementation(name=TF, run=lambda: load("tf", records)),
        Implementation(name=ANTIALIASED_TF, run=lambda: load("tf-antialiased", records), informational=True),
        Implementation(
            name=ANTIALIASED_LIMIT, run=lambda: load("limit-native-antialiased"), ours=True, informational=True
        ),
        Implementation(name=PLAIN_LIMIT, run=lambda: load("limit-native"), ours=True, informational=True),
    ]
    speeds, peaks = run_rounds(implementations, min(context.rounds, MAX_ROUNDS), timed)
    for out in (shards, records):
        shutil.rmtree(out)
    return BenchResult(
        name="load",
        title="Decoded, cropped and flipped batches from local shards",
        unit="images/s",
        implementations=implementations,
        speeds=speeds,
        comparisons=COMPARISONS,
        limits=[
            Limit(what=f"Peak memory of a process with `{name}`", value=peaks[name] / 1e6, bound=500, unit="MB")
            for name in (ANTIALIASED, PLAIN, ANTIALIASED_PYTHON, PLAIN_PYTHON)
        ],
        notes=_notes(samples, timed),
    )


def _notes(samples: int, timed: int) -> list[str]:
    return [
        f"{samples:,} samples, batches of {peer_loaders.BATCH}: JPEG decoding, RandomResizedCrop to "
        f"{peer_loaders.SIZE} × {peer_loaders.SIZE}, flipped with probability 0.5, uint8, with labels. Each run is a "
        f"new process; startup, imports, opening the shards and the first {peer_loaders.WARMUP_BATCHES} batches are "
        f"excluded, the following {timed:,} images are timed. At most {MAX_ROUNDS} rounds.",
        "webdataset: `decode`, `to_tuple`, `map_tuple`, `batched` in a DataLoader with 2 workers, which collate in "
        "shared memory; PIL images are cropped and then resized, as in torchvision; shards repeat, so that no worker "
        "idles. tf.data: the same images as TFRecord, AUTOTUNE, a private pool of 2 threads, also repeated. stoker: "
        "one epoch to its end.",
        "Only tf.data draws different crops, with `sample_distorted_bounding_box` as its users do: with the same "
        "bounds they cover 37% of a 500 × 375 image on average, those of torchvision 43%, and it decodes only the "
        "crop. It uses the fast DCT, its default; stoker uses the accurate one.",
        "Antialiased: a triangle filter in PIL and tf.data; in stoker, a Gaussian blur of about the same width "
        "followed by bilinear sampling. Not antialiased: bilinear only.",
        "native: stoker-native, which decodes only the crop; python: simplejpeg and OpenCV, which decode down to the "
        "last row of the crop. Bare C loop: the native decoder in 2 threads on bytes in memory, each call a C loop "
        "over 64 images without the GIL; headers, crops and flips are precomputed, and batches are discarded.",
    ]
