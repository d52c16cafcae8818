"""A look at single samples: what they are, and what a model will see of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from stoker.load.decode import Decoder, Pixels
from stoker.load.transforms import TRANSFORMS, draws
from stoker.shards.formats import FORMATS
from stoker.shards.images import BadImageError
from stoker.shards.shard_set import ShardSet


class Peeked(NamedTuple):
    """One sample; `pixels` are as the transform gives them, None for an image that cannot be decoded."""

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


def peek(one: ShardSet, number: int, *, transform: str, size: int, antialias: bool, seed: int) -> Iterator[Peeked]:
    """Give the first samples of the first shards, each with a crop as an epoch might draw it."""
    walk = FORMATS.get(one.format).walk
    decoder, choose = Decoder(antialias=antialias), TRANSFORMS[transform](size)
    classes = () if one.manifest is None else one.manifest.classes
    left = number
    for entry in one.shards:
        if left <= 0:
            return
        with one.mapped(entry.name) as file:
            for found in walk(file.view, one.url_of(entry.name)):
                sample = found.sample
                width = height = 0
                pixels, fault = np.zeros((size, size, 3), dtype=np.uint8), ""
                drawn = draws(seed, 0, np.array([number - left], dtype=np.int64))[0].tolist()
                try:
                    header = decoder.look(sample.image)
                    width, height = header.width, header.height
                    crop, flip = choose(width, height, drawn)
                    decoder.fill(sample.image, header, crop, flip, pixels)
                except BadImageError as error:
                    fault = str(error)
                yield Peeked(
                    key=sample.key,
                    label=sample.label,
                    name=classes[sample.label] if 0 <= sample.label < len(classes) else "",
                    kind=sample.kind,
                    bytes=len(sample.image),
                    width=width,
                    height=height,
                    shard=entry.name,
                    fault=fault,
                    pixels=None if fault else pixels,
                )
                left -= 1
                if left == 0:
                    return
