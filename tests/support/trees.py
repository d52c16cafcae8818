"""Small datasets for tests, and the command line in this process."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image

from stoker.cli.main import run
from stoker.errors import SourceError
from stoker.shards.sources import SourceType


def image_bytes(number: int, kind: str = "JPEG", size: tuple[int, int] = (24, 18)) -> bytes:
    """Return an encoded image that is different for every number."""
    image = Image.new("RGB", size, (number * 37 % 256, number * 101 % 256, number * 7 % 256))
    for x in range(min(16, size[0])):
        image.putpixel((x, 0), (255, 255, 255) if number >> x & 1 else (0, 0, 0))
    out = io.BytesIO()
    image.save(out, kind, quality=95)
    return out.getvalue()


def make_tree(root: Path, classes: Mapping[str, int], start: int = 0) -> Path:
    """Write `<class>/<number>.jpg` files, as many as given for each class."""
    number = start
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for _ in range(count):
            (root / name / f"{number:05d}.jpg").write_bytes(image_bytes(number))
            number += 1
    return root


def make_dataset(root: Path, train: int = 10, val: int = 3) -> Path:
    """Write train/ and val/ with three classes and this many images per class."""
    make_tree(root / "train", {"ant": train, "bee": train, "cat": train})
    make_tree(root / "val", {"ant": val, "bee": val, "cat": val}, start=10_000)
    return root


def digests(root: Path) -> dict[str, str]:
    """Return the SHA-256 digest of every file below a directory by its relative path."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stoker(*words: object) -> int:
    """Run a command line in this process and return its exit code."""
    return run([str(word) for word in words])


def scan_all(opener: SourceType, where: Path, scratch: Path) -> None:
    """Open a dataset and list every split."""
    source = opener(str(where), scratch=scratch)
    for split in source.splits:
        list(source.scan(split))


def assert_rejected(opener: SourceType, where: Path, scratch: Path, *parts: str) -> None:
    """Assert that a source rejects a dataset with a message that contains all of these parts."""
    with pytest.raises(SourceError) as caught:
        scan_all(opener, where, scratch)
    for part in parts:
        assert part in str(caught.value)


def import_without(package: str, module: str) -> str:
    """Import a module in a process without a package and return the resulting MissingExtraError."""
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from stoker.errors import MissingExtraError\n"
        f"try: import {module}\n"
        "except MissingExtraError as error: print(error)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
