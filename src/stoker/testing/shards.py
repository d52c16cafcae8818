"""Shards for tests: small synthetic images, generated from a seed without network access."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.core.scratch import scratch_directory
from stoker.shards.convert import prepare_conversion
from stoker.shards.options import ConversionOptions


def make_shards(
    directory: str | Path,
    *,
    samples: int = 200,
    val: int = 40,
    classes: int = 10,
    size: tuple[int, int] = (64, 48),
    seed: int = 0,
    shard_samples: int = 50,
    format: str = "tar",  # noqa: A002 (as in `stoker data convert --format`)
) -> Path:
    """Write shard sets `train` and, unless `val` is 0, `val` to a new directory, and return its path.

    `size` is the width and height of the images in pixels. The same arguments always give the same shards, so a
    directory that already has them is left as it is.
    """
    width, height = size
    source = f"synthetic:samples={samples},classes={classes},size={width}x{height},val={val},seed={seed}"
    options = ConversionOptions(format=format, shard_samples=shard_samples, seed=seed)
    with scratch_directory(None) as scratch, prepare_conversion(source, options, scratch=scratch) as conversion:
        conversion.run(str(directory), jobs=os.cpu_count() or 1)
    return Path(directory)
