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
    import tensorflow as tf  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingExtraError("tensorflow", "tf", purpose="stoker.load.tf") from error


def dataset(url: str | Path | ShardSet, **settings: Any) -> tf.data.Dataset:
    """Give a shard set as batches of (images, labels), one epoch for each iteration; takes what `TfLoader` takes."""
    return TfLoader(url, **settings).dataset


class TfLoader:
    """A shard set as a `tf.data.Dataset`, one epoch for each iteration; takes what `stoker.Loader` takes.

    tf.data takes batches ahead of the consumer, so only the consumer knows how far it got: each iteration is the next
    epoch, unless `load_state_dict` says where to go on. With `with_cursor` every batch has its end cursor as a third
    element, of which `state_dict` makes a checkpoint. A transform of the user's own needs `images`, the TensorSpec of
    the batch that it makes.
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
        self._set, self._settings, self._with_cursor = loader.set, settings, with_cursor
        self._plan = loader.plan
        self._next = loader.cursor
        element = [images or _images(settings), tf.TensorSpec([None], tf.int64)]
        if with_cursor:
            element.append(tf.TensorSpec([2], tf.int64))
        self.dataset = tf.data.Dataset.from_generator(self._epoch, output_signature=tuple(element))

    def state_dict(self, cursor: Any) -> dict[str, Any]:
        """Make the third element of the last batch that was taken into plain values, for a checkpoint."""
        epoch, consumed = (int(number) for number in np.asarray(cursor))
        return Cursor(epoch, consumed, self._plan.digest).state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor, whatever world it was made in; the next iteration starts there."""
        self._next = self._plan.check_cursor(Cursor.from_state(state))

    def _epoch(self) -> Iterator[tuple[Any, ...]]:
        start, self._next = self._next, self._plan.start(self._next.epoch + 1)
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
            "what a transform of your own makes is not known here",
            hint="give images=tf.TensorSpec([None, ...], dtype)",
        )
    row = (3, size, size) if settings.get("layout", "NHWC") == "NCHW" else (size, size, 3)
    return tf.TensorSpec([None, *row], tf.uint8)
