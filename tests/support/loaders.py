"""Images, shards and thread checks for tests of the loader."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample

_earlier_threads: set[threading.Thread] = set()


def remember_threads() -> None:
    """Ignore the threads that run now in `loader_threads`."""
    _earlier_threads.update(threading.enumerate())


def loader_threads() -> list[str]:
    """List the threads of loaders that were started since `remember_threads`."""
    started = set(threading.enumerate()) - _earlier_threads
    return [thread.name for thread in started if thread.name.startswith("stoker-")]


def gradient(width: int = 60, height: int = 40) -> Image.Image:
    """A smooth image."""
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    return Image.fromarray(np.dstack((255 * (x + 0 * y), 255 * (0 * x + y), 128 + 0 * x * y)).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Encode an image."""
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def write_shards(folder: Path, images: Sequence[bytes], shard_samples: int = 4) -> str:
    """Write tar shards without a manifest, whatever the images are, and return their URL; labels count up from 0."""
    tar = FORMATS.get("tar")
    folder.mkdir()
    count = -(-len(images) // shard_samples)
    for shard in range(count):
        with (folder / f"made-{shard:06d}.tar").open("wb") as file:
            for number in range(shard * shard_samples, min(len(images), (shard + 1) * shard_samples)):
                file.writelines(tar.encode(Sample(f"{number:04d}", images[number], "jpg", number)).chunks)
            file.write(tar.trailer)
    return f"{folder}/made-{{000000..{count - 1:06d}}}.tar"
