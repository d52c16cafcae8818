"""Time one loader: `peer_loaders.py NAME SHARDS BATCHES` prints seconds and peak resident bytes.

Imports, opening the shards and the warm-up batches are not timed. NAME is a key of `LOADERS`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BATCH = 64
SIZE = 224
WORKERS = 2
WARMUP_BATCHES = 4
"""Batches read before the timed part."""
SHUFFLE = 256
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def draw_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw left, top, width and height like RandomResizedCrop of torchvision."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def stoker_loader(shards: Path, *, antialias: bool, decoder: str) -> Iterator[Any]:
    from stoker import Loader

    loader = Loader(
        str(shards),
        global_batch=BATCH,
        transform="imagenet-train",
        size=SIZE,
        seed=0,
        antialias=antialias,
        decoder=decoder,
    )
    try:
        for batch in loader:
            yield batch.images, batch.labels
    finally:
        loader.close()


def decode_only(shards: Path, *, antialias: bool, decoder: str) -> Iterator[Any]:
    """Decode and resize only: encoded bytes, headers, crops and flips are prepared in memory, batches are discarded."""
    import threading

    import numpy as np

    from stoker.load.decode import Decoder, DecodeTask
    from stoker.load.native import NativeDecoder
    from stoker.load.transforms import Crop
    from stoker.shards.shard_set import find_shard_sets, read_images

    random.seed(0)
    (shard_set,) = find_shard_sets(str(shards))
    names = [path.name for path in sorted(shards.glob("*.tar"))]
    images = [bytes(image) for name in names for image, _ in read_images(shard_set, name)]
    headers = [(data, Decoder().read_header(data)) for data in images]
    tasks = [
        DecodeTask(number % BATCH, data, head, Crop(*draw_crop(head.width, head.height)), random.random() < 0.5)
        for number, (data, head) in enumerate(headers)
    ]
    thread_state = threading.local()

    def prepare() -> None:
        thread_state.out = np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
        thread_state.decoder = Decoder(antialias=antialias)
        if decoder == "native":
            thread_state.native = NativeDecoder(antialias=antialias)

    def decode(first: int) -> int:
        remaining = tasks[first : first + BATCH]
        if decoder == "native":
            remaining = thread_state.native.fill(remaining, thread_state.out)
        for row, *task in remaining:
            thread_state.decoder.fill(*task, thread_state.out[row])
        return BATCH

    with ThreadPoolExecutor(WORKERS, initializer=prepare) as pool:
        # Submit the rest only after the warm-up batches are done, so that none is decoded before the timed part.
        firsts = range(0, len(tasks) - BATCH + 1, BATCH)
        yield from pool.map(decode, firsts[:WARMUP_BATCHES])
        yield from pool.map(decode, firsts[WARMUP_BATCHES:])


def webdataset_pil(shards: Path) -> Iterator[Any]:
    """Decode, crop and resize like RandomResizedCrop of torchvision with PIL images."""
    import numpy as np
    from PIL import Image

    def transform(image: Any) -> Any:
        left, top, width, height = draw_crop(*image.size)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(image)

    return _webdataset(shards, "pilrgb", transform)


def webdataset_cv2(shards: Path) -> Iterator[Any]:
    import cv2
    import numpy as np

    cv2.setNumThreads(0)

    def transform(data: bytes) -> Any:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        left, top, width, height = draw_crop(image.shape[1], image.shape[0])
        crop = image[top : top + height, left : left + width]
        small = cv2.resize(crop, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
        return cv2.flip(small, 1) if random.random() < 0.5 else small

    return _webdataset(shards, None, transform)


def _webdataset(shards: Path, decoder: str | None, transform: Callable[[Any], Any]) -> Iterator[Any]:
    """Read as documented by webdataset; shards repeat so that no worker idles, and workers collate in shared memory."""
    import webdataset
    from torch.utils.data import DataLoader, default_collate

    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=len(urls)).repeat().shuffle(SHUFFLE)
    if decoder is not None:
        dataset = dataset.decode(decoder)
    dataset = dataset.to_tuple("jpg;jpeg", "cls").map_tuple(transform, int)
    dataset = dataset.batched(BATCH, collation_fn=default_collate, partial=False)
    return iter(DataLoader(dataset, batch_size=None, num_workers=WORKERS))


def tf_data(records: Path, *, antialias: bool) -> Iterator[Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tune = tf.data.AUTOTUNE
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def sample(record: Any) -> tuple[Any, Any]:
        example = tf.io.parse_single_example(record, features)
        data = example["image/encoded"]
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data),
            tf.zeros([1, 0, 4]),
            min_object_covered=0.0,
            aspect_ratio_range=RATIO,
            area_range=SCALE,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        top, left, _ = tf.unstack(begin)
        height, width, _ = tf.unstack(size)
        image = tf.io.decode_and_crop_jpeg(data, tf.stack([top, left, height, width]), channels=3)
        image = tf.cast(tf.image.resize(image, [SIZE, SIZE], method="bilinear", antialias=antialias), tf.uint8)
        return tf.image.random_flip_left_right(image), example["image/class/label"]

    files = tf.data.Dataset.list_files(f"{records}/*-of-*", shuffle=True).repeat()
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=tune, deterministic=False)
    dataset = dataset.shuffle(SHUFFLE).map(sample, num_parallel_calls=tune, deterministic=False)
    dataset = dataset.batch(BATCH, drop_remainder=True).prefetch(tune)
    options = tf.data.Options()
    options.threading.private_threadpool_size = WORKERS
    options.threading.max_intra_op_parallelism = 1
    return iter(dataset.with_options(options).as_numpy_iterator())


LOADERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    **{
        f"{name}-{decoder}{'-antialiased' if antialias else ''}": functools.partial(
            loader, antialias=antialias, decoder=decoder
        )
        for name, loader in (("stoker", stoker_loader), ("limit", decode_only))
        for decoder in ("native", "python")
        for antialias in (True, False)
    },
    "webdataset-pil": webdataset_pil,
    "webdataset-cv2": webdataset_cv2,
    "tf-antialiased": functools.partial(tf_data, antialias=True),
    "tf": functools.partial(tf_data, antialias=False),
}


def peak_bytes() -> int:
    """Return the peak memory of this process; unlike getrusage, without that of its parent at the fork."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main(name: str, shards: str, batches: int) -> None:
    iterator = LOADERS[name](Path(shards))
    for _ in itertools.islice(iterator, WARMUP_BATCHES):
        pass
    start = time.perf_counter()
    count = sum(1 for _ in itertools.islice(iterator, batches - WARMUP_BATCHES))
    seconds = time.perf_counter() - start
    if count != batches - WARMUP_BATCHES:
        raise RuntimeError(f"{name} returned {count} batches after the warm-up, expected {batches - WARMUP_BATCHES}")
    print(seconds, peak_bytes())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
