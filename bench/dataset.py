"""Images for the benchmarks: the ImageNet sample if it is available, otherwise generated images of similar size."""

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
    """One image file, which is copied many times."""

    label: str
    name: str
    data: bytes


class ImageDataset(NamedTuple):
    """A directory of class folders, its size in bytes, and a description."""

    folder: Path
    bytes: int
    origin: str


def choose_directory(samples: int) -> tuple[Path, str]:
    """Return a directory in memory if there is twice the space for images, shards and one more output, else on disk."""
    required = 2 * 3 * samples * MEAN_BYTES
    page = os.sysconf("SC_PAGE_SIZE")
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        free = min(shutil.disk_usage(MEMORY).free, page * os.sysconf("SC_AVPHYS_PAGES"))
        if free >= required:
            return MEMORY, f"{MEMORY} (tmpfs), so that the disk has no influence"
    directory = Path(tempfile.gettempdir())
    return directory, f"{directory}, because {MEMORY} is too small; disk writeback may affect the figures"


def create(folder: Path, samples: int) -> ImageDataset:
    """Write `samples` image files; copies of an image differ only in name."""
    images = list(_read_sample() if SAMPLE.exists() else _generate_images())
    for image in images:
        (folder / image.label).mkdir(parents=True, exist_ok=True)
    total = 0
    for number in range(samples):
        image = images[number % len(images)]
        (folder / image.label / f"{number // len(images):05d}_{image.name}").write_bytes(image.data)
        total += len(image.data)
    kind = "real ImageNet JPEGs" if SAMPLE.exists() else "generated JPEGs (the ImageNet sample is not available)"
    origin = f"{samples:,} files, {total / 1e6:,.0f} MB: {len(images)} {kind}, each copied under new names"
    return ImageDataset(folder, total, origin)


def _read_sample() -> Iterator[Image]:
    with tarfile.open(SAMPLE) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                label, name = Path(member.name).parts[-2:]
                yield Image(label, name, file.read())


def _generate_images() -> Iterator[Image]:
    """Yield JPEGs of smooth colors with grain: 500×375 pixels, 110 kB on average."""
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
