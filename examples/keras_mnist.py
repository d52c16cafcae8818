"""Train a digit classifier with Keras `fit` and MultiWorkerMirroredStrategy; TF_CONFIG describes the cluster.

Run it alone (`python examples/keras_mnist.py`) or as a job (`examples/keras_mnist.yaml`). It uses tf_keras, that is
Keras 2: `fit` of Keras 3 does not work with this strategy. Without `--data mnist.npz` it uses the digits of
scikit-learn, so that nothing is downloaded. BackupAndRestore needs a --model-dir that all workers can read and write.
"""

import argparse
import json
import os
import tempfile

import numpy as np
import tensorflow as tf
import tf_keras as keras

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


def build_model(side):
    """Return a small convolutional network."""
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, padding="same", activation="relu", input_shape=(side, side, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def main():
    """Train on this worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="mnist.npz")
    parser.add_argument("--model-dir", default=os.environ.get("MODEL_DIR", "keras_mnist"))
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    index = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
    (images, labels), test = load_data(args.data)
    data = (
        tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=1).repeat().batch(GLOBAL_BATCH)
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        model = build_model(images.shape[1])
    model.fit(
        data.with_options(options),
        epochs=args.epochs,
        steps_per_epoch=len(labels) // GLOBAL_BATCH,
        callbacks=[keras.callbacks.BackupAndRestore(os.path.join(args.model_dir, "backup"))],
        verbose=2 if index == 0 else 0,
    )
    # Saving is a collective: every worker takes part, but only the chief's files are kept.
    model.save(os.path.join(args.model_dir if index == 0 else tempfile.mkdtemp(), "model"))
    accuracy = np.mean(np.argmax(model(test[0]), axis=1) == test[1])
    print(f"worker {index}: accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
