"""Converted shards read by WebDataset and TensorFlow, with real images where they are available."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support import paths
from tests.support.trees import digests, make_dataset, stoker

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves its shards open

SHARED = paths.SHARED / "data"
TENSORFLOW = """
import hashlib, json, sys
import tensorflow as tf

features = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/filename": tf.io.FixedLenFeature([], tf.string),
}
rows = {}
for record in tf.data.TFRecordDataset(sorted(tf.io.gfile.glob(sys.argv[1]))):
    example = tf.io.parse_single_example(record, features)
    image = example["image/encoded"].numpy()
    assert tf.io.decode_image(image).shape[-1] == 3
    name = example["image/filename"].numpy().decode()
    rows[name] = [hashlib.sha256(image).hexdigest(), int(example["image/class/label"])]
print(json.dumps(rows))
"""


def list_files(root: Path) -> dict[str, list[object]]:
    """Return the SHA-256 and label of every image of a tree, by path."""
    classes = sorted(path.name for path in root.iterdir())
    return {
        str(path.relative_to(root)): [hashlib.sha256(path.read_bytes()).hexdigest(), classes.index(path.parent.name)]
        for path in root.rglob("*.*")
    }


def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    import webdataset as wds

    data = make_dataset(tmp_path / "pets", train=20)
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-samples", 9) == 0
    urls = sorted(str(path) for path in (tmp_path / "out/train").glob("*.tar"))
    samples = {
        f"{sample['__key__']}.jpg": [hashlib.sha256(sample["jpg"]).hexdigest(), int(sample["cls"])]
        for sample in wds.WebDataset(urls, shardshuffle=False)
    }
    assert samples == list_files(data / "train")


def test_tensorflow_reads_the_shards(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed; pip install 'path/to/stoker[dev]'")
    data = make_dataset(tmp_path / "pets", train=20)
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-samples", 9, "--format", "tfrecord") == 0
    command = [sys.executable, "-c", TENSORFLOW, str(tmp_path / "out/train/train-*-of-*")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list_files(data / "train")


def unpack_archive(archive: str, to: Path) -> Path:
    if not (SHARED / archive).exists():
        pytest.skip(f"the real images ({archive}) are not available")
    with tarfile.open(SHARED / archive) as tar:
        tar.extractall(to, filter="data")
    return to


@pytest.mark.slow
def test_full_cifar10(tmp_path: Path) -> None:
    """60,000 real images keep their bytes, and any number of jobs gives the same shards."""
    import webdataset as wds

    data = unpack_archive("cifar10-images.tar.xz", tmp_path) / "cifar10"
    for name, jobs in (("one", 1), ("two", 2), ("five", 5)):
        assert stoker("data", "convert", data, tmp_path / name, "--shard-size", "8MiB", "--jobs", jobs) == 0
    assert digests(tmp_path / "one") == digests(tmp_path / "two") == digests(tmp_path / "five")
    for split, count in (("train", 50_000), ("test", 10_000)):
        assert json.loads((tmp_path / "one" / split / "manifest.json").read_text())["samples"] == count
        urls = sorted(str(path) for path in (tmp_path / "one" / split).glob("*.tar"))
        samples = {
            f"{sample['__key__']}.jpg": [hashlib.sha256(sample["jpg"]).hexdigest(), int(sample["cls"])]
            for sample in wds.WebDataset(urls, shardshuffle=False)
        }
        assert len(samples) == count
        assert samples == list_files(data / split)
    assert stoker("data", "verify", tmp_path / "one") == 0


def test_real_imagenet_images_are_accepted(tmp_path: Path) -> None:
    data = unpack_archive("imagenet-sample-200.tar", tmp_path) / "imagenet-sample"
    assert stoker("data", "convert", data, tmp_path / "out", "--shard-size", "4MiB") == 0
    assert json.loads((tmp_path / "out/train/manifest.json").read_text())["quarantined"] == 0
    assert stoker("data", "verify", tmp_path / "out", "--deep") == 0
