"""The dataset under the real TensorFlow, in a process of its own: its threads and ours must not be forked together."""

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

url, says = sys.argv[1], {}
settings = dict(global_batch=8, size=16, threads=2, seed=3)
digest = lambda images: hashlib.sha256(np.ascontiguousarray(images)).hexdigest()
seen = lambda batches: [[digest(images), np.asarray(labels).tolist()] for images, labels, *_ in batches]

with Loader(url, **settings) as loader:
    says["expected"] = [[[digest(b.images), b.labels.tolist()] for b in loader] for _ in range(4)]
with Loader(url, global_batch=30, transform=None) as loader:
    says["encoded expected"] = [[hashlib.sha256(image).hexdigest() for image in b.images] for b in loader]
before = set(threading.enumerate())

batches = dataset(url, **settings)
says["spec"] = [[str(spec.shape), spec.dtype.name] for spec in batches.element_spec]
says["epochs"] = [seen(batches) for _ in range(2)]

held = list(dataset(url, **settings, prefetch=1))
says["held"] = seen(held)

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
says["losses"] = losses

loader = TfLoader(url, **settings, with_cursor=True)
taken = []
for batch in loader.dataset.prefetch(4):
    taken.append(batch)
    if len(taken) == 5:
        break
state = loader.state_dict(taken[-1][2])
again = TfLoader(url, **settings, with_cursor=True)
again.load_state_dict(json.loads(json.dumps(state)))
says["broken off"] = seen(taken)
says["resumed"] = [seen(again.dataset), seen(again.dataset)]
says["after breaking off"] = seen(loader.dataset)
try:
    again.load_state_dict({**state, "plan": "other"})
except InputError as error:
    says["refused"] = str(error)

both = list(zip(loader.dataset, loader.dataset))
says["together"] = [seen([one for one, _ in both]), seen([other for _, other in both])]

encoded = dataset(url, global_batch=30, transform=None)
says["encoded"] = [[hashlib.sha256(image).hexdigest() for image in images.numpy()] for images, _ in encoded]
planes = next(iter(dataset(url, **settings, layout="NCHW")))[0]
says["planes"] = digest(planes.numpy().transpose(0, 2, 3, 1))

def mean_of(pixels, draw):
    return pixels.mean(axis=(0, 1)).astype(np.float32)

try:
    dataset(url, global_batch=30, transform=mean_of)
except InputError as error:
    says["own"] = str(error)
spec = tf.TensorSpec([None, 3], tf.float32)
says["own shapes"] = [list(images.shape) for images, _ in dataset(url, global_batch=40, transform=mean_of, images=spec)]

shapes = []
train = lambda images, labels: shapes.append([*images.shape, len(labels)])
names = {"tf": tf, "range": lambda _: range(2), "train": train}
for block in json.loads(sys.argv[2]):
    exec(block, names)
    names.setdefault("checkpoint", {"data": {**Loader(url, global_batch=64, seed=1).state_dict(), "epoch": 4}})
says["page"] = [shapes, names["checkpoint"]["data"]["epoch"]]

del names, batches, held, loader, again, encoded, planes, both, taken, batch, images, labels
gc.collect()
says["threads left"] = [
    thread.name for thread in set(threading.enumerate()) - before if not isinstance(thread, threading._DummyThread)
]  # dummies are TensorFlow's own
print(json.dumps(says))
"""


@pytest.fixture(scope="module")
def says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed; pip install 'stoker[tf]'")
    folder = tmp_path_factory.mktemp("tf")
    data = make_dataset(folder / "pets", train=30)
    assert stoker("data", "convert", data, folder / "shards", "--shard-samples", 20) == 0
    url = folder / "shards/train"
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    page = json.dumps([block.replace("global_batch=256", "global_batch=64") for block in blocks])
    command = [sys.executable, "-c", PROGRAM, url, page]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_each_iteration_is_the_loaders_next_epoch(says: dict[str, Any]) -> None:
    assert says["spec"] == [["(None, 16, 16, 3)", "uint8"], ["(None,)", "int64"]]
    assert says["epochs"] == says["expected"][:2]


def test_memory_is_not_overwritten_while_a_tensor_holds_it(says: dict[str, Any]) -> None:
    assert says["held"] == says["expected"][0]


def test_a_model_learns_from_it(says: dict[str, Any]) -> None:
    first, second = says["losses"]
    assert second < first


def test_a_cursor_is_of_what_was_taken_not_of_what_was_prefetched(says: dict[str, Any]) -> None:
    assert says["broken off"] == says["expected"][0][:5]
    assert says["resumed"] == [says["expected"][0][5:], says["expected"][1]]
    assert says["refused"].startswith("the cursor is of plan other")


def test_breaking_off_without_a_cursor_begins_the_next_epoch(says: dict[str, Any]) -> None:
    assert says["after breaking off"] == says["expected"][1]


def test_two_iterations_at_once_are_two_epochs(says: dict[str, Any]) -> None:
    assert sorted(says["together"]) == sorted(says["expected"][2:])


def test_encoded_images_planes_and_transforms_of_the_users_own(says: dict[str, Any]) -> None:
    assert says["encoded"] == says["encoded expected"]
    assert says["planes"] == says["expected"][0][0][0]
    assert says["own"].endswith("give images=tf.TensorSpec([None, ...], dtype)")
    assert says["own shapes"] == [[40, 3], [40, 3], [10, 3]]


def test_the_page_says_what_works(says: dict[str, Any]) -> None:
    assert says["page"] == [[[64, 224, 224, 3, 64], [26, 224, 224, 3, 26]] * 3, 5]


def test_no_threads_are_left(says: dict[str, Any]) -> None:
    assert says["threads left"] == []


def test_without_tensorflow_the_import_says_what_to_install() -> None:
    assert (
        import_without("tensorflow", "stoker.load.tf")
        == "stoker.load.tf needs the Python package 'tensorflow'; run: pip install 'stoker[tf]'\n"
    )
