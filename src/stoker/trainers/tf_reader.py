"""Samples by position, read by the worker that needs them: closures of parameter servers carry no pixels.

TensorFlow runs a Python callback only in a process that has registered it, and finds it by a token. Every worker
registers the same token before its server starts, so a closure that any of them executes reads its samples there.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import tensorflow as tf

from stoker.core.permutations import seed_key
from stoker.errors import InputError, MissingError, StokerError
from stoker.load.loader import Loader
from stoker.sampling.order import Int64Array
from stoker.sampling.rank import Rank
from stoker.trainers.training_data import cached_url, loader_options

TRAIN, VAL = 0, 1
TOKEN = "stoker_read_positions"
MAX_PREFETCHED = 4
_ERROR = re.compile(r"\[\[stoker (\{.*?\})\]\]", re.DOTALL)

Sample = tuple[Any, Int64Array, np.int64]
"""Images, labels and their number."""


class PositionReader:
    """Reader of the training and validation sets in one process."""

    def __init__(self, args: argparse.Namespace, num_classes: int = 0) -> None:
        self._args, self._num_classes = args, num_classes
        self._loaders: dict[int, Loader] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "stoker-prefetch")
        self._prefetched: dict[tuple[int, int, bytes], Future[Sample]] = {}
        self.hits = self.reads = self.epoch = 0

    def register(self) -> Self:
        """Let closures that run in this process read from here; return the reader, which the caller must keep."""
        try:
            from tensorflow.python.ops import script_ops

            callbacks = script_ops._py_funcs._funcs
        except (ImportError, AttributeError) as error:
            raise MissingError(
                f"TensorFlow {tf.__version__} has no registry of Python callbacks, which parameter servers need",
                hint="use TensorFlow 2.18 to 2.21, or tf_mirrored",
            ) from error
        callbacks[TOKEN] = self  # a weak reference
        return self

    def __call__(self, which: Any, epoch: Any, positions: Int64Array, upcoming: Int64Array) -> Sample:
        """Return the samples at these positions, and start to read those that will probably be needed next."""
        try:
            key = (int(which), int(epoch), positions.tobytes())
            with self._lock:
                self.reads += 1
                self.epoch = int(epoch) if int(which) == TRAIN else self.epoch
                ready = self._prefetched.pop(key, None)
                self.hits += ready is not None
            sample = self._read(int(which), int(epoch), positions) if ready is None else ready.result()
            if len(upcoming):
                self._prefetch(int(which), int(epoch), np.array(upcoming))
            return sample
        except StokerError as error:
            # TensorFlow passes the text of an error to the chief, and nothing else.
            fields = {"what": str(error), "code": error.exit_code}
            raise ValueError(f"[[stoker {json.dumps(fields)}]]") from error

    @property
    def training_loader(self) -> Loader | None:
        """The loader of the training set; None before the first read."""
        return self._loaders.get(TRAIN)

    def close(self) -> None:
        """Stop all threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for loader in self._loaders.values():
            loader.close()

    def _prefetch(self, which: int, epoch: int, positions: Int64Array) -> None:
        key = (which, epoch, positions.tobytes())
        with self._lock:
            if key in self._prefetched:
                return
            while len(self._prefetched) >= MAX_PREFETCHED:  # another worker got those positions
                self._prefetched.pop(next(iter(self._prefetched))).cancel()
            self._prefetched[key] = self._pool.submit(self._read, which, epoch, positions)

    def _read(self, which: int, epoch: int, positions: Int64Array) -> Sample:
        if self._args.synthetic and which == TRAIN:
            return self._make_synthetic(len(positions))
        batch = self._loader(which).load_positions(epoch, np.array(positions))
        if batch.count:
            return batch.images, batch.labels, np.int64(batch.count)
        size = self._args.size  # a row that does not count
        return np.zeros((1, size, size, 3), dtype=np.uint8), np.zeros(1, dtype=np.int64), np.int64(0)

    def _loader(self, which: int) -> Loader:
        with self._lock:
            if which not in self._loaders:
                args, url = self._args, self._args.val if which == VAL else self._args.train
                transform = args.val_transform if which == VAL else args.transform
                options = loader_options(args, Rank(), 1, transform)
                if which == TRAIN:
                    options |= {"sampling": args.sampling, "epoch_samples": args.epoch_samples, "seed": args.seed}
                self._loaders[which] = Loader(cached_url(args, url), **options)
            return self._loaders[which]

    def _make_synthetic(self, count: int) -> Sample:
        size, generator = self._args.size, np.random.default_rng(seed_key("synthetic", self._args.seed))
        images = generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        return images, generator.integers(0, max(1, self._num_classes), count), np.int64(count)


def read_positions(which: int, epoch: Any, positions: Any, upcoming: Any, size: int) -> tuple[Any, Any, Any]:
    """Return images, labels and count of positions, read where this operation runs."""
    images, labels, count = tf.raw_ops.PyFunc(
        input=[tf.constant(which, tf.int64), epoch, positions, upcoming],
        token=TOKEN,
        Tout=[tf.uint8, tf.int64, tf.int64],
    )
    return tf.reshape(images, [-1, size, size, 3]), tf.reshape(labels, [-1]), tf.reshape(count, [])


def find_reader_error(error: Exception) -> StokerError | None:
    """Return the error of a reader that an error of TensorFlow carries; None if it carries none."""
    match = _ERROR.search(str(error))
    if match is None:
        return None
    fields: Mapping[str, Any] = json.loads(match[1])
    kind = InputError if fields["code"] == InputError.exit_code else StokerError
    return kind(str(fields["what"]))
