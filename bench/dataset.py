"""The images that are measured with: real ones when they are there, else made up ones of about the same size."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SAMPLE = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "imagenet-sample-200.tar"
MEAN_BYTES = 110_000
CLASSES = 200
MEMORY = Path("/dev/shm")


class Image(NamedTuple):
    """One image file to be copied many times."""

    label: str
    name: str
    data: bytes


class Made(NamedTuple):
    """A folder of class folders, and what is in it."""

    folder: Path
    bytes: int
    origin: str


def choose_place(samples: int) -> tuple[Path, str]:
    """Pick a folder in memory when images, shards and one more output fit twice over, else on disk."""
    need = 2 * 3 * samples * MEAN_BYTES
    page = os.sysconf("SC_PAGE_SIZE")
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        room = min(shutil.disk_usage(MEMORY).free, page * os.sysconf("SC_AVPHYS_PAGES"))
        if room >= need:
            return MEMORY, f"{MEMORY} (tmpfs), so that no disk decides"
    place = Path(tempfile.gettempdir())
    return place, f"{place}: {MEMORY} has too little room, so the disk's writeback may show in the figures"


def make(folder: Path, samples: int) -> Made:
    """Write that many image files; copies of an image differ in name only."""
    images = list(_real() if SAMPLE.exists() else _invented())
    for image in images:
        (folder / image.label).mkdir(parents=True, exist_ok=True)
    total = 0
    for number in range(samples):
        image = images[number % len(images)]
        (folder / image.label / f"{number // len(images):05d}_{image.name}").write_bytes(image.data)
        total += len(image.data)
    kind = "real ImageNet JPEGs" if SAMPLE.exists() else "generated JPEGs (the real sample is not here)"
    origin = f"{samples:,} files, {total / 1e6:,.0f} MB: {len(images)} {kind}, each copied under new names"
    return Made(folder, total, origin)


def _real() -> Iterator[Image]:
    with tarfile.open(SAMPLE) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                label, name = Path(member.name).parts[-2:]
                yield Image(label, name, file.read())


def _invented() -> Iterator[Image]:
    """Smooth colours under grain: JPEGs of 500×375 pixels, 110 kB on average."""
    import numpy as np
    from PIL import Image as Pillow

    random = np.random.default_rng(0)
    for number in range(CLASSES):
        coarse = Pillow.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Pillow.Resampling.BICUBIC), dtype=np.float32)
        grain = random.normal(0, random.uniform(4, 12), smooth.shape)
        out = io.BytesIO()
        pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
        Pillow.fromarray(pixels).save(out, "JPEG", quality=90, subsampling=0)
        yield Image(f"class-{number:03d}", f"{number:03d}.jpg", out.getvalue())
