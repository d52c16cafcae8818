"""Train a digit classifier with Keras 3 `fit` on JAX, on any number of workers; TF_CONFIG describes the cluster.

Run it alone (`python examples/keras_jax_mnist.py`) or as a job (`examples/keras_jax_mnist.yaml`). It needs no
TensorFlow: it reads from TF_CONFIG only the addresses of the workers. Without `--data mnist.npz` it uses the digits of
scikit-learn, so that nothing is downloaded. All workers read the --model-dir; only the first one writes it.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"  # read when Keras is imported

import jax
import keras
import numpy as np

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
    images, labels = images[..., None].astype(np.float32), labels.astype(np.int32)
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def build_model(side):
    """Return a small convolutional network."""
    model = keras.Sequential(
        [
            keras.Input((side, side, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def join_workers():
    """Connect this worker to the others; return its number and how many there are."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    workers, index = config.get("cluster", {}).get("worker", [""]), config.get("task", {}).get("index", 0)
    if len(workers) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # without it, CPUs cannot communicate
        keras.distribution.initialize(",".join(workers), len(workers), index)
    # Every worker passes its own samples to `fit`.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    return index, len(workers)


class SaveWeights(keras.callbacks.Callback):
    """Save the weights after every epoch; a file that was not written to its end keeps another name."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002 (the signature of Keras)
        """Write a file and rename it."""
        part = self.folder / "part.weights.h5"
        self.model.save_weights(part)
        part.rename(self.folder / f"epoch-{epoch + 1:03d}.weights.h5")


def main():
    """Train on this worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="mnist.npz")
    parser.add_argument("--model-dir", type=Path, default=Path("keras_jax_mnist"))
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    index, workers = join_workers()  # before any computation
    keras.utils.set_random_seed(1)  # the same weights on all workers
    (images, labels), test = load_data(args.data)
    steps = len(labels) // GLOBAL_BATCH  # the same on all workers
    share = slice(index, steps * GLOBAL_BATCH, workers)
    model = build_model(images.shape[1])
    done = sorted(args.model_dir.glob("epoch-*.weights.h5"))
    if done:
        model.load_weights(done[-1])
    # Saving is a collective: every worker takes part, but only the files of the first one are kept.
    folder = args.model_dir if index == 0 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    model.fit(
        images[share],
        labels[share],
        batch_size=GLOBAL_BATCH // workers,
        epochs=args.epochs,
        initial_epoch=len(done),
        callbacks=[SaveWeights(folder)],
        verbose=2 if index == 0 else 0,
    )
    weights = model.get_weights()
    keras.distribution.set_distribution(None)  # from here on, every worker computes alone
    if index == 0:
        model = build_model(images.shape[1])
        model.set_weights(weights)
        model.save(args.model_dir / "model.keras")
        accuracy = np.mean(np.argmax(model.predict(test[0], verbose=0), axis=1) == test[1])
        print(f"{workers} workers: accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
