# ruff: noqa: T201
"""Train digits as images for older charts do: a task knows CLUSTER_CONFIG and POD_NAME, and each worker trains itself.

Between-graph replication of TensorFlow 1, which `tf.compat.v1` still has; nothing of stoker is imported.
"""

from __future__ import annotations

import ast
import os
import re

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

STEPS, BATCH = 400, 64


def main() -> None:
    """Run one task."""
    tf1 = tf.compat.v1
    tf1.disable_eager_execution()
    cluster = tf.train.ClusterSpec(ast.literal_eval(os.environ["CLUSTER_CONFIG"]))
    role, index = re.fullmatch(r"(?:.*-)?(ps|worker)-(\d+)(?:-.*)?", os.environ["POD_NAME"]).groups()  # type: ignore[union-attr]
    server = tf.distribute.Server(cluster, job_name=role, task_index=int(index))
    if role == "ps":
        server.join()
    digits = load_digits()
    pixels, labels = (digits.data / 16).astype(np.float32), digits.target
    with tf1.device(tf1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        x, y = tf1.placeholder(tf.float32, [None, 64]), tf1.placeholder(tf.int64, [None])
        draw = tf1.truncated_normal_initializer(stddev=0.1, seed=1)
        hidden = tf.nn.relu(x @ tf1.get_variable("w1", [64, 64], initializer=draw))
        logits = hidden @ tf1.get_variable("w2", [64, 10], initializer=draw)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
        step = tf1.train.get_or_create_global_step()
        train = tf1.train.AdamOptimizer(0.003).minimize(loss, global_step=step)
    random = np.random.default_rng(int(index))
    filters = ["/job:ps", f"/job:worker/task:{index}"]  # a worker does not wait for the others
    config = tf1.ConfigProto(device_filters=filters)
    with tf1.train.MonitoredTrainingSession(server.target, is_chief=index == "0", config=config) as session:
        for _ in range(STEPS):
            rows = random.integers(0, len(labels), BATCH)
            session.run(train, {x: pixels[rows], y: labels[rows]})
        print("accuracy", session.run(accuracy, {x: pixels, y: labels}), flush=True)


if __name__ == "__main__":
    main()
