"""Train a digit classifier with MultiWorkerMirroredStrategy and a custom loop; TF_CONFIG describes the cluster.

Run it alone (`python examples/custom_training_mnist.py`) or as a job (`examples/custom_training_mnist.yaml`). Without
`--data mnist.npz` it uses the digits of scikit-learn, so that nothing is downloaded. The chief writes checkpoints to
--model-dir, from where all workers resume.
"""

import argparse
import json
import os
import tempfile

import numpy as np
import tensorflow as tf

GLOBAL_BATCH = 64


def load_data(path):
    """Return images (N×H×W×1, 0 to 1) and labels, of which every fifth is for the test."""
    if path:
        with np.load(path) as data:
            images, labels = data["x_train"] / 255.0, data["y_train"]
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images / 16.0, digits.target
    is_test = np.arange(len(labels)) % 5 == 0
    images, labels = images[..., None].astype(np.float32), labels.astype(np.int64)
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


class Classifier(tf.Module):
    """Two convolutions and a linear layer."""

    def __init__(self, side):
        super().__init__()
        draw = tf.initializers.GlorotUniform(seed=1)
        self.filters = [tf.Variable(draw([3, 3, 1, 16])), tf.Variable(draw([3, 3, 16, 32]))]
        self.weight = tf.Variable(draw([(side // 4) ** 2 * 32, 10]))
        self.bias = tf.Variable(tf.zeros([10]))

    def __call__(self, images):
        """Return the logits."""
        for kernel in self.filters:
            images = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME")), 2, 2, "VALID")
        return tf.reshape(images, [tf.shape(images)[0], -1]) @ self.weight + self.bias


def main():
    """Train on this worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="mnist.npz")
    parser.add_argument("--model-dir", default=os.environ.get("MODEL_DIR", "custom_training_mnist"))
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    workers, index = len(config.get("cluster", {}).get("worker", [0])), config.get("task", {}).get("index", 0)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
    (images, labels), (test_images, test_labels) = load_data(args.data)
    with strategy.scope():
        model = Classifier(images.shape[1])
        epoch = tf.Variable(0, trainable=False, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, epoch=epoch)
    # Saving is a collective: every worker takes part, but only the chief's files are kept.
    manager = tf.train.CheckpointManager(
        checkpoint, args.model_dir if index == 0 else tempfile.mkdtemp(), max_to_keep=2
    )
    newest = tf.train.latest_checkpoint(args.model_dir)
    if newest:
        checkpoint.restore(newest)
        print(f"worker {index}: resuming after epoch {int(epoch.numpy())}", flush=True)

    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        return loss, gradients

    @tf.function
    def train_step(images, labels):
        loss, gradients = strategy.run(replica_step, args=(images, labels))
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.5 * gradient)
        return strategy.reduce("sum", loss, axis=None)

    for number in range(int(epoch.numpy()), args.epochs):
        order = np.random.default_rng(number).permutation(len(labels))  # the same on all workers
        losses = []
        for start in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            rows = order[start : start + GLOBAL_BATCH][index::workers]  # the share of this worker
            losses.append(float(train_step(images[rows], labels[rows])))
        epoch.assign(number + 1)
        manager.save()
        accuracy = np.mean(np.argmax(model(test_images), axis=1) == test_labels)
        if index == 0:
            print(f"epoch {number}: loss {np.mean(losses):.4f}, accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
