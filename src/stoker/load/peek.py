"""Peek at the first samples of a shard set: their metadata, and the pixels after a transform."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from stoker.load.decode import Decoder, Pixels
from stoker.load.transforms import TRANSFORMS, random_numbers
from stoker.shards.formats import FORMATS
from stoker.shards.images import BadImageError
from stoker.shards.shard_set import ShardSet


class PeekedSample(NamedTuple):
    """A sample; `pixels` is the output of the transform, None if the image cannot be decoded: see `fault`."""

    key: str
    label: int
    name: str
    kind: str
    bytes: int
    width: int
    height: int
    shard: str
    fault: str
    pixels: Pixels | None


def peek(
    shard_set: ShardSet, count: int, *, transform: str, size: int, antialias: bool, seed: int
) -> Iterator[PeekedSample]:
    """Yield the first `count` samples, each with a crop as an epoch might draw it."""
    iter_samples = FORMATS.get(shard_set.format).iter_samples
    decoder, choose_crop = Decoder(antialias=antialias), TRANSFORMS[transform](size)
    classes = () if shard_set.manifest is None else shard_set.manifest.classes
    remaining = count
    for entry in shard_set.shards:
        if remaining <= 0:
            return
        with shard_set.map_shard(entry.name) as file:
            for indexed in iter_samples(file.view, shard_set.url_of(entry.name)):
                sample = indexed.sample
                width = height = 0
                pixels, fault = np.zeros((size, size, 3), dtype=np.uint8), ""
                numbers = random_numbers(seed, 0, np.array([count - remaining], dtype=np.int64))[0].tolist()
                try:
                    header = decoder.read_header(sample.image)
                    width, height = header.width, header.height
                    crop, flip = choose_crop(width, height, numbers)
                    decoder.fill(sample.image, header, crop, flip, pixels)
                except BadImageError as error:
                    fault = str(error)
                yield PeekedSample(
                    key=sample.key,
                    label=sample.label,
                    name=classes[sample.label] if 0 <= sample.label < len(classes) else "",
                    kind=sample.extension,
                    bytes=len(sample.image),
                    width=width,
                    height=height,
                    shard=entry.name,
                    fault=fault,
                    pixels=None if fault else pixels,
                )
                remaining -= 1
                if remaining == 0:
                    return
