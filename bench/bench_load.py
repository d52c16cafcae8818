"""Shards into batches for training: our Loader beside webdataset, tf.data and a bare loop in C."""

from __future__ import annotations

import shutil
from pathlib import Path

import peer_loaders
from measure import STOKER, Contestant, Lab, Limit, Ran, Result, Versus, call, command, take_turns

SMOOTH = "stoker.Loader, native, antialiased"
PLAIN = "stoker.Loader, native, not antialiased"
SMOOTH_PYTHON = "stoker.Loader, python, antialiased"
PLAIN_PYTHON = "stoker.Loader, python, not antialiased"
SMOOTH_LIMIT = "bare C loop, antialiased"
PLAIN_LIMIT = "bare C loop, not antialiased"
PIL = "webdataset + PIL, antialiased"
CV2 = "webdataset + cv2, not antialiased"
TF = "tf.data, not antialiased"
SMOOTH_TF = "tf.data, antialiased"

MOST_SAMPLES = 8192
MOST_ROUNDS = 5


def run(lab: Lab) -> Result:
    batches = min(lab.samples, MOST_SAMPLES) // peer_loaders.BATCH
    samples = batches * peer_loaders.BATCH
    timed = samples - peer_loaders.WARM * peer_loaders.BATCH
    shards, records = lab.work / "shards", lab.work / "records"
    for out in (shards, records):
        shutil.rmtree(out, ignore_errors=True)
    command(STOKER, "data", "convert", "--shard-size", "64MiB", "--limit", str(samples), lab.images, shards)
    command(STOKER, "data", "convert", "--shard-size", "64MiB", "--format", "tfrecord", shards, records)

    def load(loader: str, folder: Path = shards) -> Ran:
        return call(peer_loaders.__file__, loader, folder / "train", str(batches))

    contestants = [
        Contestant(name=SMOOTH, act=lambda: load("stoker-native-antialiased"), ours=True),
        Contestant(name=PLAIN, act=lambda: load("stoker-native"), ours=True),
        Contestant(name=SMOOTH_PYTHON, act=lambda: load("stoker-python-antialiased"), ours=True),
        Contestant(name=PLAIN_PYTHON, act=lambda: load("stoker-python"), ours=True),
        Contestant(name=PIL, act=lambda: load("webdataset-pil")),
        Contestant(name=CV2, act=lambda: load("webdataset-cv2")),
        Contestant(name=TF, act=lambda: load("tf", records)),
        Contestant(name=SMOOTH_TF, act=lambda: load("tf-antialiased", records), info=True),
        Contestant(name=SMOOTH_LIMIT, act=lambda: load("limit-native-antialiased"), ours=True, info=True),
        Contestant(name=PLAIN_LIMIT, act=lambda: load("limit-native"), ours=True, info=True),
    ]
    speeds, peaks = take_turns(contestants, min(lab.rounds, MOST_ROUNDS), timed)
    for out in (shards, records):
        shutil.rmtree(out)
    return Result(
        name="load",
        title="Decoded, cropped and flipped batches from local shards",
        unit="images/s",
        contestants=contestants,
        speeds=speeds,
        versus=[
            Versus(ours=SMOOTH, peer=PIL, target=2.2, note="both antialiased"),
            Versus(ours=PLAIN, peer=PIL, note="only PIL antialiased"),
            Versus(ours=PLAIN, peer=CV2, target=1.2, note="neither antialiased"),
            Versus(ours=PLAIN, peer=TF, target=1.1, note="neither antialiased"),
            Versus(ours=SMOOTH, peer=TF, note="only ours antialiased"),
            Versus(ours=SMOOTH, peer=SMOOTH_TF, note="both antialiased"),
            Versus(ours=SMOOTH, peer=SMOOTH_PYTHON, target=1.25, note="what the native decoder gives"),
            Versus(ours=PLAIN, peer=PLAIN_PYTHON, target=1.25, note="what the native decoder gives"),
            Versus(ours=SMOOTH, peer=SMOOTH_LIMIT, target=0.9, note="what the loader adds to decoding"),
            Versus(ours=PLAIN, peer=PLAIN_LIMIT, target=0.9, note="what the loader adds to decoding"),
            Versus(ours=SMOOTH_PYTHON, peer=PIL, note="without the native decoder, both antialiased"),
            Versus(ours=PLAIN_PYTHON, peer=CV2, note="without the native decoder, neither antialiased"),
            Versus(ours=PLAIN_PYTHON, peer=TF, note="without the native decoder, neither antialiased"),
        ],
        limits=[
            Limit(what=f"Peak memory of a process with `{name}`", value=peaks[name] / 1e6, bound=500, unit="MB")
            for name in (SMOOTH, PLAIN, SMOOTH_PYTHON, PLAIN_PYTHON)
        ],
        notes=[
            f"{samples:,} samples, batches of {peer_loaders.BATCH}: JPEG decoded, RandomResizedCrop to "
            f"{peer_loaders.SIZE} × {peer_loaders.SIZE}, flipped half the time, uint8, with labels. "
            f"Each act is a fresh process; its start, its imports, opening and the first {peer_loaders.WARM} batches "
            f"are left out, the {timed:,} images after them are timed. At most {MOST_ROUNDS} rounds.",
            "webdataset: `decode`, `to_tuple`, `map_tuple`, `batched` in a DataLoader with 2 workers, which collate "
            "into shared memory; PIL images are cropped, then resized, as torchvision does it; shards repeat, so that "
            "no worker runs dry. tf.data: the same images as TFRecord, AUTOTUNE, a private pool of 2 threads, "
            "repeated too. stoker: one epoch to its end.",
            "Only tf.data draws its crops otherwise, by `sample_distorted_bounding_box` as its users do: at the same "
            "bounds they cover 37 % of a 500 × 375 image on average, torchvision's 43 %, and it decodes no more than "
            "they cover. It decodes by the fast DCT, its default; stoker by the accurate one.",
            "Antialiased: PIL and tf.data by a triangle filter, stoker by a Gaussian blur of about its width and then "
            "bilinear. Not antialiased: bilinear alone.",
            "native: stoker-native, which decodes only the crop; python: simplejpeg and OpenCV, which decode down to "
            "its last row. Bare C loop: the native decoder in 2 threads on bytes in memory, each call a loop in C over "
            "64 images, outside Python's lock; headers, crops and flips are known beforehand, no batch is handed on.",
        ],
    )
