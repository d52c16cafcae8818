"""The loop of tf_mirrored with batches of tf.data: the usual ImageNet input pipeline on the same TFRecords."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.trainers import tf_flags

ARGS = tf_flags.parse_or_exit(sys.argv[1:], tf_flags.TF_MIRRORED)

import tensorflow as tf  # noqa: E402

from stoker.load.loader import Batch, Loader  # noqa: E402
from stoker.sampling.cursor import Cursor  # noqa: E402
from stoker.trainers import tf_mirrored, watchdog  # noqa: E402

FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}


class TfDataBatches:
    """Batches of tf.data with the counts and cursors of our loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._cursor = loader, loader.cursor
        names = [loader.shard_set.url_of(shard.name) for shard in loader.shard_set.shards]
        records = (
            tf.data.Dataset.from_tensor_slices(names)
            .shuffle(len(names))
            .interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=tf.data.AUTOTUNE)
        )
        samples = records.shuffle(1000).repeat().map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        self._data = samples.batch(loader.global_batch).prefetch(tf.data.AUTOTUNE)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the cursor; tf.data itself cannot resume."""
        self._cursor = Cursor.from_state(state)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._loader.plan.epoch(self._cursor.epoch, self._loader.rank)
        steps = epoch.steps(self._cursor.consumed, self._loader.global_batch)
        for (images, labels), (_, positions, end) in zip(self._data.as_numpy_iterator(), steps, strict=False):
            count = len(positions)
            yield Batch(images[:count], labels[:count], count, end, positions)


def decode(record: Any) -> tuple[Any, Any]:
    """Decode a random crop, resize it without antialiasing and flip it, as the ImageNet examples of TensorFlow do."""
    features = tf.io.parse_single_example(record, FEATURES)
    shape = tf.io.extract_jpeg_shape(features["image/encoded"])
    box = tf.zeros([1, 0, 4])
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape, box, area_range=(0.08, 1.0), aspect_ratio_range=(3 / 4, 4 / 3), use_image_if_no_bounding_boxes=True
    )
    window = tf.concat([begin[:2], size[:2]], 0)
    image = tf.io.decode_and_crop_jpeg(features["image/encoded"], window, channels=3)
    image = tf.cast(tf.image.resize(image, [ARGS.size, ARGS.size]), tf.uint8)
    return tf.image.random_flip_left_right(image), features["image/class/label"]


def open_tf_data(url: Any, **options: Any) -> tuple[TfDataBatches, Loader]:
    loader = Loader(url, **options)
    return TfDataBatches(loader), loader


tf_mirrored.open_loader = open_tf_data
watchdog.exit_now(tf_mirrored.main(ARGS))
