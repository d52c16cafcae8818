"""The working folder on its way to hosts: by rsync, or as one archive. Nothing there is ever deleted."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import TracebackType
from typing import IO, Self

from stoker.core.processes import start, until
from stoker.errors import InputError, UnavailableError
from stoker.launchers.ssh.client import Client, by_any_python, meaning, text_of
from stoker.launchers.ssh.plan import Place

Extra = tuple[tuple[str, bytes], ...]
"""Files of ours that go along, and what is in them."""

_VANISHED = 24
# The archive is ours, and links in it may lead anywhere. A link there gives way to what comes, as with rsync.
_UNPACK = """
import os, sys, tarfile
to = sys.argv[1]
os.makedirs(to, exist_ok=True)
archive = tarfile.open(fileobj=sys.stdin.buffer, mode="r|")
archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
for member in archive:
    path = os.path.join(to, member.name)
    if os.path.islink(path):
        os.unlink(path)
    archive.extract(member, to)
"""


class Parcel:
    """Files of a folder for any number of hosts: packed once, and only where a host needs an archive."""

    def __init__(self, folder: Path, names: Sequence[str], stop: threading.Event) -> None:
        """Take the names of the files; once `stop` is set, nothing more is sent."""
        self._folder, self._names, self._stop = folder, names, stop
        self._archives = TemporaryDirectory(prefix="stoker-")
        self._packed: dict[tuple[bool, Extra], Path] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archives.cleanup()

    def send(self, extra: Extra, *, client: Client, host: str, place: Place, whole: bool) -> None:
        """Copy files of ours to a host, and if `whole` the folder: what changed, by rsync, where both sides have it."""
        ssh, whole = client.argv(), whole and bool(self._names)
        by_rsync = whole and place.rsync and shutil.which("rsync") is not None
        if by_rsync:
            with TemporaryFile() as listing:
                listing.write(b"".join(os.fsencode(name) + b"\0" for name in self._names))
                listing.seek(0)
                # Times and sizes tell what changed. Owners stay those of the account there.
                argv = ["rsync", "-lptzs", "--from0", "--files-from=-", "-e", shlex.join(ssh)]
                argv += [f"--rsync-path=mkdir -p {shlex.quote(place.workdir)} && rsync"]
                argv += [f"{self._folder}/", f"{_bracketed(host)}:{place.workdir}/"]
                self._run(argv, client, host, listing, _VANISHED)
        if extra or (whole and not by_rsync):
            with open(self._archive(extra, whole=whole and not by_rsync), "rb") as archive:
                argv = [*ssh, "--", host, by_any_python(place.python, _UNPACK, place.workdir)]
                self._run(argv, client, host, archive)

    def _archive(self, extra: Extra, *, whole: bool) -> Path:
        with self._lock:
            key = whole, extra
            if key not in self._packed:
                path = Path(self._archives.name, f"{len(self._packed)}.tar")
                pack(path, self._folder, self._names if whole else (), extra)
                self._packed[key] = path
            return self._packed[key]

    def _run(self, argv: list[str], client: Client, host: str, stdin: IO[bytes], fine: int = 0) -> None:
        with TemporaryFile() as said:
            code = attend(argv, self._stop, stdin=stdin, stdout=subprocess.DEVNULL, stderr=said)
            if code not in (0, fine):
                words = text_of(said)
                if "No space left" in words:
                    raise InputError("has no space left for the working folder", where=host)
                why = meaning(client, host, words, code)
                raise UnavailableError(f"the working folder was not copied: {why}", where=host)


def attend(
    argv: list[str],
    stop: threading.Event,
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    grace_s: float = 5.0,
) -> int:
    """Run a program to its end and give its exit code; it ends with us, and when it is told to stop."""
    process = start(argv, stdin=stdin, stdout=stdout, stderr=stderr, dies_with_us=True)
    try:
        until(lambda: process.poll() is not None or stop.is_set(), None)
    finally:
        code = process.end(grace_s)
    return code


def pack(path: Path, folder: Path, names: Iterable[str], extra: Extra) -> None:
    """Write an archive of files; one that is gone by now, or gets shorter meanwhile, is left out."""
    with open(path, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            begin = tar.offset
            tar.inodes.clear()  # type: ignore[attr-defined]  # a second name of a file is a file of its own
            try:
                tar.add(folder / name, name, recursive=False, filter=_of_nobody)
            except OSError as error:
                if error.errno is not None and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                    why = f"cannot be read: {(error.strerror or '').lower()}"
                    raise InputError(why, where=error.filename or path) from error
                file.seek(begin)
                file.truncate()
                tar.offset = begin
        for name, data in extra:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Forget who owns a file: there it is the account's."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 else host
