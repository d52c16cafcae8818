"""Write SavedModels below a directory: half_plus_two/{1,2} and colors (Keras, with its description)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from stoker.trainers.model_description import ImageInput, ModelDescription, write_description

ROOT = Path(sys.argv[1])


class HalfPlusTwo(tf.Module):
    """y = x / 2 + 2, the model of TensorFlow Serving's tutorials; version n adds 100 (n - 1)."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.half = tf.Variable(0.5)
        self.two = tf.Variable(2.0 + 100 * (version - 1))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    def __call__(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return y."""
        return {"y": x * self.half + self.two}

    @tf.function(
        input_signature=[tf.TensorSpec([None, 3], tf.float32, name="table"), tf.TensorSpec([], tf.int32, name="at")]
    )
    def pick(self, table: tf.Tensor, at: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return a column, which fails for an index that does not exist."""
        return {"column": tf.gather(table, at, axis=1)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="data")])
    def strings(self, data: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the lengths of strings, and the strings."""
        return {"length": tf.strings.length(data), "copy_bytes": data}


def export_colors(path: Path) -> None:
    """Export a Keras model whose logits are the means of the channels."""
    import keras

    images = keras.Input((16, 16, 3), dtype="uint8", name="images")
    dense = keras.layers.Dense(3, use_bias=False, name="scores")
    outputs = dense(keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255.0)(images)))
    model = keras.Model(images, outputs)
    dense.set_weights([np.eye(3, dtype=np.float32) * 10])
    model.export(path, verbose=False)
    write_description(
        ModelDescription(classes=("red", "green", "blue"), image=ImageInput(size=16, transform="whole")), path
    )


for number in (1, 2):
    module = HalfPlusTwo(number)
    tf.saved_model.save(
        module,
        str(ROOT / "half_plus_two" / str(number)),
        signatures={"serving_default": module.__call__, "pick": module.pick, "strings": module.strings},
    )
export_colors(ROOT / "colors")
