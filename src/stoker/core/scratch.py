"""Temporary folders that do not outlive a killed process for long."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PREFIX = "stoker-scratch-"


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Give an empty folder for the while; also remove those that killed processes left in the same place."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    for stale in place.glob(f"{PREFIX}*"):
        _remove_if_stale(stale)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        new = folder / "new"
        with new.open("w") as lock:  # a kill releases it, whatever killed
            _locks(lock)
            new.rename(folder / "lock")  # only now, or another process could find it free
            inside = folder / "files"
            inside.mkdir()
            yield inside


def _remove_if_stale(folder: Path) -> None:
    try:
        with (folder / "lock").open() as lock:
            if _locks(lock):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # somebody else's, or gone in the meantime
        return


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
