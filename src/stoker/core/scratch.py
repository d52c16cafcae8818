"""Temporary directories that are cleaned up even if their process was killed."""

from __future__ import annotations

import errno
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PREFIX = "stoker-scratch-"


@contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create an empty temporary directory; also remove those that killed processes left in the same parent."""
    base = Path(tempfile.gettempdir()) if parent is None else parent
    for stale in base.glob(f"{PREFIX}*"):
        _remove_if_stale(stale)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=base, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        new = folder / "new"
        with new.open("w") as lock:  # the kernel releases the lock when the process exits or is killed
            _try_lock(lock)
            new.rename(folder / "lock")  # only once it is locked: another process would remove an unlocked directory
            files = folder / "files"
            files.mkdir()
            with _name_full_disk(files):
                yield files


@contextmanager
def _name_full_disk(folder: Path) -> Iterator[None]:
    """Add the directory to the error of a full disk, which names no file if a write to an open file failed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(folder)
        raise


def _remove_if_stale(folder: Path) -> None:
    try:
        with (folder / "lock").open() as lock:
            if _try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # owned by another user, or removed meanwhile
        return


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
