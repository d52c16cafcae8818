"""The typical size of the images of a shard set, from the headers of a few of them."""

from __future__ import annotations

from statistics import median_low

from stoker.shards.images import BadImageError, read_upright_size
from stoker.shards.shard_set import ShardSet

SAMPLE_IMAGES = 16


def measure_image_size(shard_set: ShardSet) -> tuple[int, int] | None:
    """Return the median width and height of the first images, which are in random order; None if none is readable.

    Reads an index and then one range per image, so that nothing is downloaded from a remote set.
    """
    sizes = []
    name = shard_set.shards[0].name
    for offset, length, _ in shard_set.read_index(name)[:SAMPLE_IMAGES].tolist():
        try:
            sizes.append(read_upright_size(shard_set.store.range(shard_set.folder + name, offset, length)))
        except BadImageError:
            continue
    if not sizes:
        return None
    return median_low(width for width, _ in sizes), median_low(height for _, height in sizes)
