"""Upload of the working directory: list its files, minus those that .stokerignore excludes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stoker.core import json_io
from stoker.errors import InputError

IGNORE_FILE = ".stokerignore"
DEFAULT_PATTERNS = (
    ".git/",
    ".hg/",
    ".venv/",
    "__pycache__/",
    "*.pyc",
    ".stoker/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
)
"""Excluded unless a pattern with `!` includes them, like the virtual environments of any name."""
VENV_FILE = "pyvenv.cfg"
"""The file that every virtual environment has."""


class IgnorePatterns:
    """Patterns as in `.gitignore`; the last match decides."""

    def __init__(self, patterns: Iterable[str]) -> None:
        from pathspec import GitIgnoreSpec

        lines = list(patterns)
        try:
            self._files = GitIgnoreSpec.from_lines(lines)
            # pathspec matches files only. A pattern with a trailing slash matches folders, so a folder is matched
            # like a file, against the patterns without it.
            self._folders = GitIgnoreSpec.from_lines(re.sub(r"/\s*$", "", line) for line in lines)
        except ValueError as error:
            raise InputError(f"invalid ignore pattern: {error}", hint="use .gitignore syntax") from error

    def __call__(self, path: str, *, is_folder: bool) -> bool:
        """Whether a path, relative to the working directory, is excluded; its parent folders are not."""
        return (self._folders if is_folder else self._files).match_file(path)

    def includes(self, folder: str) -> bool:
        """Whether a pattern with `!` includes a folder."""
        return self._folders.check_file(folder).include is False


def list_files(folder: Path, exclude: Sequence[str], *, skip: Path | None = None) -> list[str]:
    """List the files to upload, relative to `folder`; `skip` (the run folders) is never uploaded."""
    ignore_file = folder / IGNORE_FILE
    text = json_io.decode_text(json_io.read_file(ignore_file), ignore_file) if ignore_file.is_file() else ""
    patterns = text.splitlines()
    return sorted(_walk(folder, "", IgnorePatterns([*DEFAULT_PATTERNS, *patterns, *exclude]), skip))


def _walk(root: Path, inside: str, ignored: IgnorePatterns, skip: Path | None) -> Iterator[str]:
    try:
        entries = list(os.scandir(root / inside))
    except FileNotFoundError:  # deleted since it was listed
        return
    except OSError as error:
        raise InputError(
            f"cannot read directory: {(error.strerror or '').lower()}",
            where=root / inside,
            hint=f"exclude it in {IGNORE_FILE} if the job does not need it",
        ) from error
    for entry in entries:
        path = f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignored(path, is_folder=is_folder) or (skip is not None and Path(entry.path) == skip):
            continue
        if is_folder and Path(entry.path, VENV_FILE).is_file() and not ignored.includes(path):
            continue
        if is_folder:
            yield from _walk(root, f"{path}/", ignored, skip)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path


def find_largest(folder: Path, names: Iterable[str], count: int = 2) -> list[tuple[str, int]]:
    """Return the largest entries of a folder among the files to upload, with the sum of their sizes."""
    entries: dict[str, list[str]] = {}
    for name in names:
        first, slash, _ = name.partition("/")
        entries.setdefault(first + slash, []).append(name)
    sizes = [(entry, total_size(folder, inside)) for entry, inside in entries.items()]
    return sorted(sizes, key=lambda pair: pair[1], reverse=True)[:count]


def total_size(folder: Path, names: Iterable[str]) -> int:
    """Return the total size of the files that still exist, in bytes."""
    total = 0
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            total += (folder / name).lstat().st_size
    return total
