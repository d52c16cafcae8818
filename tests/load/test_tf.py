"""The tf.data.Dataset with real TensorFlow, in a separate process, since its threads must not be forked with ours."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import DOCS
from tests.support.trees import import_without, make_dataset, stoker

PAGE = DOCS / "tensorflow.md"
PROGRAM = """
import gc, hashlib, json, sys, threading
import numpy as np
import tensorflow as tf
from stoker import Loader
from stoker.errors import InputError
from stoker.load.tf import TfLoader, dataset

url, results = sys.argv[1], {}
settings = dict(global_batch=8, size=16, threads=2, seed=3)
digest = lambda images: hashlib.sha256(np.ascontiguousarray(images)).hexdigest()
seen = lambda batches: [[digest(images), np.asarray(labels).tolist()] for images, labels, *_ in batches]

with Loader(url, **settings) as loader:
    results["expected"] = [[[digest(b.images), b.labels.tolist()] for b in loader] for _ in range(4)]
with Loader(url, global_batch=30, transform=None) as loader:
    results["expected encoded"] = [[hashlib.sha256(image).hexdigest() for image in b.images] for b in loader]
before = set(threading.enumerate())

batches = dataset(url, **settings)
results["spec"] = [[str(spec.shape), spec.dtype.name] for spec in batches.element_spec]
results["epochs"] = [seen(batches) for _ in range(2)]

held = list(dataset(url, **settings, prefetch=1))
results["held"] = seen(held)

weights, bias = tf.Variable(tf.zeros([16 * 16 * 3, 3])), tf.Variable(tf.zeros([3]))
losses = []
images, labels = next(iter(dataset(url, **settings)))
pixels = tf.reshape(tf.cast(images, tf.float32) / 255, [len(images), -1])
for _ in range(2):
    with tf.GradientTape() as tape:
        logits = pixels @ weights + bias
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    for variable, gradient in zip([weights, bias], tape.gradient(loss, [weights, bias])):
        variable.assign_sub(0.001 * gradient)
    losses.append(float(loss))
results["losses"] = losses

loader = TfLoader(url, **settings, with_cursor=True)
taken = []
for batch in loader.dataset.prefetch(4):
    taken.append(batch)
    if len(taken) == 5:
        break
state = loader.state_dict(taken[-1][2])
again = TfLoader(url, **settings, with_cursor=True)
again.load_state_dict(json.loads(json.dumps(state)))
results["stopped early"] = seen(taken)
results["resumed"] = [seen(again.dataset), seen(again.dataset)]
results["after stopping early"] = seen(loader.dataset)
try:
    again.load_state_dict({**state, "plan": "other"})
except InputError as error:
    results["rejected"] = str(error)

both = list(zip(loader.dataset, loader.dataset))
results["together"] = [seen([one for one, _ in both]), seen([other for _, other in both])]

encoded = dataset(url, global_batch=30, transform=None)
results["encoded"] = [[hashlib.sha256(image).hexdigest() for image in images.numpy()] for images, _ in encoded]
planes = next(iter(dataset(url, **settings, layout="NCHW")))[0]
results["planes"] = digest(planes.numpy().transpose(0, 2, 3, 1))

def mean_of(pixels, rng):
    return pixels.mean(axis=(0, 1)).astype(np.float32)

try:
    dataset(url, global_batch=30, transform=mean_of)
except InputError as error:
    results["user"] = str(error)
spec = tf.TensorSpec([None, 3], tf.float32)
user = dataset(url, global_batch=40, transform=mean_of, images=spec)
results["user shapes"] = [list(images.shape) for images, _ in user]

shapes = []
train = lambda images, labels: shapes.append([*images.shape, len(labels)])
names = {"tf": tf, "range": lambda _: range(2), "train": train}
for block in json.loads(sys.argv[2]):
    exec(block, names)
    names.setdefault("checkpoint", {"data": {**Loader(url, global_batch=64, seed=1).state_dict(), "epoch": 4}})
results["page"] = [shapes, names["checkpoint"]["data"]["epoch"]]

del names, user, batches, held, loader, again, encoded, planes, both, taken, batch, images, labels
gc.collect()
results["threads left"] = [
    thread.name for thread in set(threading.enumerate()) - before if not isinstance(thread, threading._DummyThread)
]  # dummies are TensorFlow's own
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed; pip install 'path/to/stoker[tf]'")
    folder = tmp_path_factory.mktemp("tf")
    data = make_dataset(folder / "pets", train=30)
    assert stoker("data", "convert", data, folder / "shards", "--shard-samples", 20) == 0
    url = folder / "shards/train"
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    page = json.dumps([block.replace("global_batch=256", "global_batch=64") for block in blocks])
    command = [sys.executable, "-c", PROGRAM, url, page]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parsed


def test_each_iteration_is_the_next_epoch_of_the_loader(results: dict[str, Any]) -> None:
    assert results["spec"] == [["(None, 16, 16, 3)", "uint8"], ["(None,)", "int64"]]
    assert results["epochs"] == results["expected"][:2]


def test_memory_is_not_overwritten_while_a_tensor_refers_to_it(results: dict[str, Any]) -> None:
    assert results["held"] == results["expected"][0]


def test_a_model_learns_from_it(results: dict[str, Any]) -> None:
    first, second = results["losses"]
    assert second < first


def test_cursor_marks_consumed_batches_not_prefetched_ones(results: dict[str, Any]) -> None:
    assert results["stopped early"] == results["expected"][0][:5]
    assert results["resumed"] == [results["expected"][0][5:], results["expected"][1]]
    assert "plan other" in results["rejected"]


def test_stopping_early_without_a_cursor_starts_the_next_epoch(results: dict[str, Any]) -> None:
    assert results["after stopping early"] == results["expected"][1]


def test_two_concurrent_iterations_are_two_epochs(results: dict[str, Any]) -> None:
    assert sorted(results["together"]) == sorted(results["expected"][2:])


def test_encoded_images_nchw_and_user_transforms(results: dict[str, Any]) -> None:
    assert results["encoded"] == results["expected encoded"]
    assert results["planes"] == results["expected"][0][0][0]
    assert "images=tf.TensorSpec([None, ...], dtype)" in results["user"]
    assert results["user shapes"] == [[40, 3], [40, 3], [10, 3]]


def test_examples_of_the_docs_page_work(results: dict[str, Any]) -> None:
    assert results["page"] == [[[64, 224, 224, 3, 64], [26, 224, 224, 3, 26]] * 3, 5]


def test_no_threads_are_left_running(results: dict[str, Any]) -> None:
    assert results["threads left"] == []


def test_import_without_tensorflow_names_the_extra() -> None:
    message = import_without("tensorflow", "stoker.load.tf")
    assert message.startswith(
        "stoker.load.tf needs the Python package 'tensorflow'; run: pip install 'path/to/stoker[tf]'"
    )
