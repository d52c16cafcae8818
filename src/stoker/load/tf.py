"""Batches for TensorFlow: the loader as a tf.data.Dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import InputError, MissingExtraError
from stoker.load.loader import Batch, Loader
from stoker.sampling.cursor import Cursor
from stoker.shards.shard_set import ShardSet

try:
    import tensorflow as tf
except ImportError as error:
    raise MissingExtraError("tensorflow", "tf", purpose="stoker.load.tf") from error


def dataset(url: str | Path | ShardSet, **settings: Any) -> tf.data.Dataset:
    """Return a dataset of batches (images, labels), one epoch per iteration; takes the parameters of `TfLoader`."""
    return TfLoader(url, **settings).dataset


class TfLoader:
    """A shard set as a `tf.data.Dataset`, one epoch per iteration; takes the parameters of `stoker.Loader`.

    tf.data prefetches batches, so only the consumer knows which ones it has used: each iteration is the next epoch,
    unless `load_state_dict` sets the position. With `with_cursor`, every batch has its end cursor as a third element,
    which `state_dict` converts for a checkpoint. A user transform needs `images`, the TensorSpec of its batches.
    """

    def __init__(
        self,
        url: str | Path | ShardSet,
        *,
        with_cursor: bool = False,
        images: tf.TensorSpec | None = None,
        **settings: Any,
    ) -> None:
        loader = Loader(url, **settings)
        self._set, self._settings, self._with_cursor = loader.shard_set, settings, with_cursor
        self._plan = loader.plan
        self._next = loader.cursor
        element = [images or _images(settings), tf.TensorSpec([None], tf.int64)]
        if with_cursor:
            element.append(tf.TensorSpec([2], tf.int64))
        self.dataset = tf.data.Dataset.from_generator(self._epoch, output_signature=tuple(element))

    def state_dict(self, cursor: Any) -> dict[str, Any]:
        """Return the cursor, the third element of the last batch used, as plain values for a checkpoint."""
        epoch, consumed = (int(number) for number in np.asarray(cursor))
        return Cursor(epoch, consumed, self._plan.digest).state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a cursor, saved with any world size; the next iteration starts there."""
        self._next = self._plan.check_cursor(Cursor.from_state(state))

    def _epoch(self) -> Iterator[tuple[Any, ...]]:
        start, self._next = self._next, self._plan.start_cursor(self._next.epoch + 1)
        with Loader(self._set, **self._settings) as loader:
            loader.load_state_dict(start.state())
            for batch in loader:
                yield self._element(batch)

    def _element(self, batch: Batch) -> tuple[Any, ...]:
        images = batch.images
        if isinstance(images, list):
            images = np.array([bytes(image) for image in images], dtype=object)
        if not self._with_cursor:
            return images, batch.labels
        return images, batch.labels, np.array(batch.cursor[:2], dtype=np.int64)


def _images(settings: Mapping[str, Any]) -> tf.TensorSpec:
    transform, size = settings.get("transform", "imagenet-train"), settings.get("size", 224)
    if transform is None:
        return tf.TensorSpec([None], tf.string)
    if not isinstance(transform, str):
        raise InputError(
            "the batch shape of a user transform is not known",
            hint="pass images=tf.TensorSpec([None, ...], dtype)",
        )
    row = (3, size, size) if settings.get("layout", "NHWC") == "NCHW" else (size, size, 3)
    return tf.TensorSpec([None, *row], tf.uint8)
