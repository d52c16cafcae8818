"""Upload of the working directory to ssh hosts: by rsync, or as a tar archive. Nothing on a host is ever deleted."""

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

from stoker.core.processes import start, wait_until
from stoker.errors import InputError, UnavailableError
from stoker.launchers.ssh.client import SshClient, format_failure, python_command, read_text
from stoker.launchers.ssh.plan import HostConfig

ExtraFiles = tuple[tuple[str, bytes], ...]
"""Files of stoker that are uploaded too: names and contents."""

_RSYNC_VANISHED_CODE = 24
# Trusted, because the archive is our own and links in it may point anywhere. Replaces links on the host, as rsync does.
UNPACK_CODE = """
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


class CodeUpload:
    """Upload of a directory to any number of hosts; an archive is written once, and only if a host needs one."""

    def __init__(self, folder: Path, names: Sequence[str], stop: threading.Event) -> None:
        """Take the names of the files; once `stop` is set, uploads stop."""
        self._folder, self._names, self._stop = folder, names, stop
        self._temporary = TemporaryDirectory(prefix="stoker-")
        self._archives: dict[tuple[bool, ExtraFiles], Path] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._temporary.cleanup()

    def send(
        self, extra: ExtraFiles, *, client: SshClient, host: str, config: HostConfig, include_workdir: bool
    ) -> None:
        """Upload the extra files and, if asked for, the directory: by rsync if both sides have it."""
        ssh, include_workdir = client.argv(), include_workdir and bool(self._names)
        by_rsync = include_workdir and config.rsync and shutil.which("rsync") is not None
        if by_rsync:
            self._rsync(ssh, client, host, config)
        if extra or (include_workdir and not by_rsync):
            with open(self._get_archive(extra, include_workdir=include_workdir and not by_rsync), "rb") as archive:
                argv = [*ssh, "--", host, python_command(config.python, UNPACK_CODE, config.workdir)]
                self._run(argv, client, host, archive)

    def _rsync(self, ssh: list[str], client: SshClient, host: str, config: HostConfig) -> None:
        with TemporaryFile() as listing:
            listing.write(b"".join(os.fsencode(name) + b"\0" for name in self._names))
            listing.seek(0)
            # Changed files are found by mtime and size; files are owned by the account on the host.
            argv = ["rsync", "-lptzs", "--from0", "--files-from=-", "-e", shlex.join(ssh)]
            argv += [f"--rsync-path=mkdir -p {shlex.quote(config.workdir)} && rsync"]
            argv += [f"{self._folder}/", f"{_bracket_ipv6(host)}:{config.workdir}/"]
            self._run(argv, client, host, listing, accepted_code=_RSYNC_VANISHED_CODE)

    def _get_archive(self, extra: ExtraFiles, *, include_workdir: bool) -> Path:
        with self._lock:
            key = include_workdir, extra
            if key not in self._archives:
                path = Path(self._temporary.name, f"{len(self._archives)}.tar")
                write_archive(path, self._folder, self._names if include_workdir else (), extra)
                self._archives[key] = path
            return self._archives[key]

    def _run(self, argv: list[str], client: SshClient, host: str, stdin: IO[bytes], *, accepted_code: int = 0) -> None:
        with TemporaryFile() as stderr_file:
            code = run_until_stopped(argv, self._stop, stdin=stdin, stdout=subprocess.DEVNULL, stderr=stderr_file)
            if code in (0, accepted_code):
                return
            stderr = read_text(stderr_file)
        if "No space left" in stderr:
            raise InputError("no space left on the device for the working directory", where=host)
        reason = format_failure(client, host, stderr, code)
        raise UnavailableError(f"upload of the working directory failed: {reason}", where=host)


def run_until_stopped(
    argv: list[str],
    stop: threading.Event,
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    grace_s: float = 5.0,
) -> int:
    """Run a program, stop it when `stop` is set or this process dies, and return its exit code."""
    process = start(argv, stdin=stdin, stdout=stdout, stderr=stderr, terminate_with_parent=True)
    try:
        wait_until(lambda: process.poll() is not None or stop.is_set(), None)
    finally:
        code = process.stop(grace_s)
    return code


def write_archive(path: Path, folder: Path, names: Iterable[str], extra: ExtraFiles) -> None:
    """Write a tar archive; leave out files that are gone by now or that shrink meanwhile."""
    with open(path, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            begin = tar.offset
            tar.inodes.clear()  # type: ignore[attr-defined]  # store each hard link as a file of its own
            try:
                tar.add(folder / name, name, recursive=False, filter=_drop_owner)
            except OSError as error:
                if error.errno is not None and not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                    reason = f"cannot be read: {(error.strerror or '').lower()}"
                    raise InputError(reason, where=error.filename or path) from error
                file.seek(begin)
                file.truncate()
                tar.offset = begin
        for name, data in extra:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))


def _drop_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Clear the owner of a file: on the host it is the account's."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 else host
