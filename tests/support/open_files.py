"""Find processes by the files that they have open."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def processes_with_open_file(path: Path) -> list[int]:
    """The processes, also of other namespaces, that have a file open."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has just exited
                pids += [int(folder.name)] * any(link.readlink() == path for link in (folder / "fd").iterdir())
    return pids
