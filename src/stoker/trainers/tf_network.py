"""A Keras model as pure functions of its weights: gradients of a batch, and sums of a validation.

Nothing here changes a variable, so a computation can be repeated, or run on any worker, with the same result. Keras'
`fit` and optimizers are not used: in Keras 3 they support neither MultiWorkerMirroredStrategy nor parameter servers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from stoker.core.permutations import seed_key
from stoker.errors import InputError
from stoker.load.transforms import IMAGENET_MEAN, IMAGENET_STD
from stoker.trainers import tf_models
from stoker.trainers.checkpoint_store import find_mismatches
from stoker.trainers.tf_checkpoints import Arrays

Tensors = Sequence[Any]


class Gradients(NamedTuple):
    """Sums over the samples of a batch: to be added to those of other batches, then divided by the count."""

    weights: list[Any]
    statistics: list[Any]
    """Changes of the statistics of BatchNorm, times the number of samples."""
    loss: Any
    count: Any

    def flatten(self) -> list[Any]:
        """Return all sums as one list."""
        return [*self.weights, *self.statistics, self.loss, self.count]


class TfNetwork:
    """The model of a training."""

    def __init__(self, args: argparse.Namespace, num_classes: int) -> None:
        if args.precision == "bf16":
            keras.config.set_dtype_policy("mixed_bfloat16")
        keras.utils.set_random_seed(seed_key("model", args.seed) % (1 << 31))
        self.model = tf_models.build_model(
            args.model, num_classes=num_classes, size=args.size, stem=args.stem, zero_gamma=args.zero_gamma
        )
        self.size, self._label_smoothing, self._num_classes = args.size, args.label_smoothing, num_classes
        # Integers are the states of random generators, which depend on the step and are not kept.
        self._is_statistic = [variable.dtype.startswith("float") for variable in self.model.non_trainable_variables]
        self.weights = _to_arrays(self.model.trainable_variables)
        self.statistics = _to_arrays(
            variable
            for variable, is_statistic in zip(self.model.non_trainable_variables, self._is_statistic, strict=True)
            if is_statistic
        )

    @property
    def images_spec(self) -> Any:
        """The images of a batch of any size."""
        return tf.TensorSpec([None, self.size, self.size, 3], tf.uint8)

    def gradients(
        self, weights: Tensors, statistics: Tensors, images: Any, labels: Any, count: Any, seed: Any
    ) -> Gradients:
        """Return the sums over the first `count` samples; an empty batch has one row, which does not count."""
        weights, statistics = list(weights), list(statistics)
        mask = tf.cast(tf.range(tf.shape(labels)[0]) < tf.cast(count, tf.int32), tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, state = self.model.stateless_call(
                weights, self._with_seeds(statistics, seed), normalize(images), training=True
            )
            loss = tf.reduce_sum(mask * self._losses(tf.cast(outputs, tf.float32), labels))
        samples = tf.cast(count, tf.float32)
        # A single sample says nothing about the variance of a batch.
        weight = tf.where(samples > 1, samples, 0.0)
        new = [value for value, is_statistic in zip(state, self._is_statistic, strict=True) if is_statistic]
        changes = [weight * (after - before) for after, before in zip(new, statistics, strict=True)]
        return Gradients(tape.gradient(loss, weights, unconnected_gradients="zero"), changes, loss, samples)

    def evaluate(self, weights: Tensors, statistics: Tensors, images: Any, labels: Any) -> Any:
        """Return the sums of loss, top-1 and top-5 of a batch, and its number of samples."""
        state = self._with_seeds(list(statistics), tf.constant(0, tf.int64))
        outputs, _ = self.model.stateless_call(list(weights), state, normalize(images), training=False)
        outputs = tf.cast(outputs, tf.float32)
        best = tf.cast(tf.math.top_k(outputs, k=min(5, self._num_classes)).indices, tf.int64)
        correct = best == labels[:, None]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        top1, top5 = correct[:, 0], tf.reduce_any(correct, axis=1)
        sums = [tf.reduce_sum(tf.cast(values, tf.float64)) for values in (losses, top1, top5)]
        return tf.stack([*sums, tf.cast(tf.shape(labels)[0], tf.float64)])

    def validation_function(self) -> Any:
        """Return `evaluate` as a function of TensorFlow, for batches of any size."""
        arrays = [[tf.TensorSpec(a.shape, tf.float32) for a in group.values()] for group in self._groups]
        signature = [*arrays, self.images_spec, tf.TensorSpec([None], tf.int64)]
        return tf.function(self.evaluate, input_signature=signature)

    @property
    def _groups(self) -> tuple[Arrays, Arrays]:
        return self.weights, self.statistics

    def check_weights(self, weights: Arrays, *, where: str) -> None:
        """Raise InputError naming the weights and statistics that do not match the model."""
        if mismatches := find_mismatches({**self.weights, **self.statistics}, weights):
            raise InputError(mismatches, where=where)

    def split_weights(self, weights: Arrays) -> tuple[list[Any], list[Any]]:
        """Return weights and statistics in the order of the model."""
        return [weights[name] for name in self.weights], [weights[name] for name in self.statistics]

    def _with_seeds(self, statistics: list[Any], seed: Any) -> list[Any]:
        """Return all non-trainable values: statistics, and random states that depend on `seed`."""
        remaining = iter(statistics)
        return [
            next(remaining) if is_statistic else tf.cast(tf.stack([seed, number]), variable.dtype)
            for number, (variable, is_statistic) in enumerate(
                zip(self.model.non_trainable_variables, self._is_statistic, strict=True)
            )
        ]

    def _losses(self, outputs: Any, labels: Any) -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        if not self._label_smoothing:
            return losses
        uniform = -tf.reduce_mean(tf.nn.log_softmax(outputs), axis=1)
        return (1 - self._label_smoothing) * losses + self._label_smoothing * uniform


def normalize(images: Any) -> Any:
    """Convert uint8 images to float, normalized like those of ImageNet."""
    scale = [1 / (255 * std) for std in IMAGENET_STD]
    offset = [mean / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    return tf.cast(images, tf.float32) * tf.constant(scale) - tf.constant(offset)


def step_seed(seed: int, step: int, rank: int) -> np.int64:
    """Return the seed of the random layers in one step on one rank."""
    return np.int64(seed_key("step", seed, step, rank) % (1 << 31))


def _to_arrays(variables: Any) -> Arrays:
    arrays = {variable.path: variable.numpy() for variable in variables}
    return {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}
