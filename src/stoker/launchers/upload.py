"""Which files of the working folder go along to where a job runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from stoker.errors import InputError

IGNORE_FILE = ".stokerignore"
ALWAYS = (
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
"""Left out unless a pattern with `!` takes them in."""


class Ignored:
    """Patterns as in `.gitignore`, of which the last that fits decides."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = [rule for line in patterns if (rule := _rule(line)) is not None]

    def __call__(self, path: str, *, is_folder: bool) -> bool:
        """Whether a path, relative to the working folder, is left out."""
        fits = [
            take
            for pattern, take, only_folders in self._rules
            if (is_folder or not only_folders) and pattern.fullmatch(path)
        ]
        return bool(fits) and not fits[-1]


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    take = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    only_folders, text = text.endswith("/"), text.rstrip("/")
    anchored = "/" in text
    return re.compile(("" if anchored else "(?:.*/)?") + _expression(text.lstrip("/"))), take, only_folders


def _expression(pattern: str) -> str:
    words = re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", pattern)
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        meanings.get(word) or (word.replace("[!", "[^") if len(word) > 1 else re.escape(word)) for word in words
    )


def listed(folder: Path, exclude: Sequence[str], *, away: Path | None = None) -> list[str]:
    """List the files to copy, relative to the folder; `away` is where runs are kept, which is never copied."""
    ignore_file = folder / IGNORE_FILE
    own = ignore_file.read_text().splitlines() if ignore_file.is_file() else []
    return sorted(_walk(folder, "", Ignored([*ALWAYS, *own, *exclude]), away))


def _walk(root: Path, inside: str, ignored: Ignored, away: Path | None) -> Iterator[str]:
    try:
        entries = list(os.scandir(root / inside))
    except FileNotFoundError:  # gone since it was listed
        return
    except OSError as error:
        raise InputError(
            f"cannot be read: {(error.strerror or '').lower()}",
            where=root / inside,
            hint=f"{IGNORE_FILE} leaves out what is not needed there",
        ) from error
    for entry in entries:
        path = f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignored(path, is_folder=is_folder) or (away is not None and Path(entry.path) == away):
            continue
        if is_folder:
            yield from _walk(root, f"{path}/", ignored, away)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path


def size_of(folder: Path, names: Iterable[str]) -> int:
    """Add up the sizes of files, as far as they are still there."""
    total = 0
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            total += (folder / name).lstat().st_size
    return total
