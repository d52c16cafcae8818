"""The working folder on its way to a host: by rsync, or as one archive. Nothing there is ever deleted."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from stoker.errors import InputError, UnavailableError
from stoker.launchers.ssh.hosts import meaning

_UNPACK = (
    "import os, sys, tarfile\n"
    "os.makedirs(sys.argv[1], exist_ok=True)\n"
    "archive = tarfile.open(fileobj=sys.stdin.buffer, mode='r|')\n"
    "safe = {'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}\n"
    "archive.extractall(sys.argv[1], **safe)\n"
)


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
