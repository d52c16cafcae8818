"""Upload of the working directory: list its files, minus those that .stokerignore excludes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

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
"""Excluded unless a pattern with `!` includes them."""


class IgnorePatterns:
    """Patterns as in `.gitignore`; the last match decides."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = [rule for line in patterns if (rule := _parse_rule(line)) is not None]

    def __call__(self, path: str, *, is_folder: bool) -> bool:
        """Whether a path, relative to the working directory, is excluded."""
        matches = [
            include
            for pattern, include, only_folders in self._rules
            if (is_folder or not only_folders) and pattern.fullmatch(path)
        ]
        return bool(matches) and not matches[-1]


def _parse_rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    include = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    only_folders, text = text.endswith("/"), text.rstrip("/")
    is_anchored = "/" in text
    return re.compile(("" if is_anchored else "(?:.*/)?") + _to_regex(text.lstrip("/"))), include, only_folders


def _to_regex(pattern: str) -> str:
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", pattern)
    regexes = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        regexes.get(token) or (token.replace("[!", "[^") if len(token) > 1 else re.escape(token)) for token in tokens
    )


def list_files(folder: Path, exclude: Sequence[str], *, skip: Path | None = None) -> list[str]:
    """List the files to upload, relative to `folder`; `skip` (the run folders) is never uploaded."""
    ignore_file = folder / IGNORE_FILE
    patterns = ignore_file.read_text().splitlines() if ignore_file.is_file() else []
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
        if is_folder:
            yield from _walk(root, f"{path}/", ignored, skip)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path


def total_size(folder: Path, names: Iterable[str]) -> int:
    """Return the total size of the files that still exist, in bytes."""
    total = 0
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            total += (folder / name).lstat().st_size
    return total
