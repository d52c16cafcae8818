"""A user's Keras model, with a random layer."""

from __future__ import annotations

from typing import Any


def net(num_classes: int) -> Any:
    import keras

    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, 2),
            keras.layers.ReLU(),
            keras.layers.AveragePooling2D(4),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(num_classes),
        ]
    )
