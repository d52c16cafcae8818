"""Small file systems, for tests of full disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NOT_ALLOWED = "not allowed here"
"""Part of the reason of a skipped test that no installation would help; allowed in CI."""


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes, whose usage statvfs reports exactly."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip(f"mounting a tmpfs is {NOT_ALLOWED}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system that can create files, but has no space for their content: `filler` uses all of it."""
    with small_disk(folder, 1 << 20):
        with suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield folder
