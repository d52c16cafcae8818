"""The working folder on its way to hosts: which files, and how they get there. Nothing there is ever deleted."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from stoker.errors import InputError, UnavailableError
from stoker.launchers.ssh.hosts import meaning

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
_UNPACK = (
    "import os, sys, tarfile\n"
    "os.makedirs(sys.argv[1], exist_ok=True)\n"
    "archive = tarfile.open(fileobj=sys.stdin.buffer, mode='r|')\n"
    "safe = {'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}\n"
    "archive.extractall(sys.argv[1], **safe)\n"
)


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
    for entry in os.scandir(root / inside):
        path = f"{inside}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if ignored(path, is_folder=is_folder) or (away is not None and Path(entry.path) == away):
            continue
        if is_folder:
            yield from _walk(root, f"{path}/", ignored, away)
        elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
            yield path


def size_of(folder: Path, names: Iterable[str]) -> int:
    """Add up the sizes of files."""
    return sum((folder / name).lstat().st_size for name in names)


def send(
    folder: Path,
    names: Sequence[str],
    extra: Sequence[tuple[str, bytes]],
    *,
    ssh: list[str],
    host: str,
    to: str,
    python: str,
    rsync: bool,
) -> None:
    """Copy files to a host: what changed, by rsync, where both sides have it; else all, as one archive."""
    by_rsync = names if rsync and shutil.which("rsync") is not None else ()
    if by_rsync:
        with TemporaryFile() as listing:
            listing.write(b"".join(os.fsencode(name) + b"\0" for name in by_rsync))
            listing.seek(0)
            # Times and sizes tell what changed. Owners stay those of the account there.
            argv = ["rsync", "-lptzs", "--from0", "--files-from=-", "-e", shlex.join(ssh)]
            argv += [f"--rsync-path=mkdir -p {shlex.quote(to)} && rsync"]
            _run([*argv, f"{folder}/", f"{_bracketed(host)}:{to}/"], host, listing)
    if extra or not by_rsync:
        with TemporaryFile() as archive:
            _pack(archive, folder, () if by_rsync else names, extra)
            _run([*ssh, "--", host, shlex.join([python, "-c", _UNPACK, to])], host, archive)


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 else host


def _pack(archive: IO[bytes], folder: Path, names: Iterable[str], extra: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=archive, mode="w|") as tar:
        for name in names:
            tar.add(folder / name, name, recursive=False)
        for name, data in extra:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    archive.seek(0)


def _run(argv: list[str], host: str, stdin: IO[bytes]) -> None:
    with TemporaryFile() as said:
        # In our own session, so that Ctrl-C ends it too.
        code = subprocess.run(argv, stdin=stdin, stdout=subprocess.DEVNULL, stderr=said, check=False).returncode
        if code:
            said.seek(0)
            words = said.read().decode(errors="replace")
            if "No space left" in words:
                raise InputError("has no space left for the working folder", where=host)
            raise UnavailableError(f"the working folder was not copied: {meaning(host, words, code)}", where=host)
