"""Local folder store: plain files, written atomically through a temporary file and a rename."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.errors import (
    AccessDeniedError,
    InputError,
    NotFoundError,
    ObjectChangedError,
    StokerError,
    StorageFullError,
    UnavailableError,
    VerificationError,
)
from stoker.storage import MAX_GET_BYTES, Entry, ObjectMeta, check_name, local_path, prefix_folder, too_large_error

MAX_REPEATED_FOLDERS = 10_000
"""The limit of visits of one listing to folders that it has already visited by another path."""

_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")


class LocalStore:
    """The files below a folder. Writes are atomic, even if the process is killed, but not fsynced."""

    def __init__(self, url: str) -> None:
        path = local_path(url)
        if path is None:
            raise InputError("not a local path", where=url)
        self.url = url
        self.root = path

    def get(self, name: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Read a whole file; raise UnavailableError if it is larger than `max_bytes`."""
        path = self._path(name)
        size = self.size(name)
        with translate_os_errors(path), path.open("rb") as file:
            data = file.read(min(size, max_bytes) + 1)
            if len(data) > size:  # it grew, or it has no size (in /proc)
                data += file.read(max_bytes + 1 - len(data))
        if len(data) > max_bytes:
            raise too_large_error(path, max_bytes)
        return data

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, raise ObjectChangedError if the version differs."""
        path = self._path(name)
        with translate_os_errors(path), path.open("rb", buffering=0) as file:
            file.seek(start)
            data = file.read(length)
            while len(data) < length and (more := file.read(length - len(data))):
                data += more  # Linux returns at most 2 GiB per read
            if etag and _object_meta(os.fstat(file.fileno())).etag != etag:
                raise ObjectChangedError(where=path)
        if len(data) < length:
            raise VerificationError(f"expected {length} bytes at offset {start}, got {len(data)}", where=path)
        return data

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return self.head(name).size

    def head(self, name: str) -> ObjectMeta:
        """Return a file's metadata; the ETag is made of its modification time, size and inode."""
        path = self._path(name)
        with translate_os_errors(path):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise NotFoundError("not a regular file", where=path)
        return _object_meta(status)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the files whose name starts with `prefix`, sorted by name; none if the folder does not exist."""
        entries = self._walk(prefix_folder(prefix), _FolderVisits(self.root))
        return (entry for entry in entries if entry.name.startswith(prefix))

    def put(self, name: str, source: bytes | Path) -> None:
        """Write bytes to a file, or move a file in (by a rename within one file system)."""
        if isinstance(source, bytes):
            self.write(name, [source])
            return
        target = self._path(name)
        with translate_os_errors(target, source):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.replace(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with _atomic_write(target) as temporary:
                    shutil.copyfile(source, temporary)
                source.unlink()

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file from chunks; it appears once the last chunk is written."""
        target = self._path(name)
        with translate_os_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _atomic_write(target) as temporary, temporary.open("xb") as file:
                file.writelines(chunks)

    def delete(self, name: str) -> None:
        """Delete a file; a missing one is not an error."""
        path = self._path(name)
        with translate_os_errors(path):
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _walk(
        self, folder: str, visits: _FolderVisits, parents: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[Entry]:
        path = self.root / folder
        with translate_os_errors(path):
            try:
                status = path.stat()
                with os.scandir(path) as scan:
                    # Folders sort with their trailing slash, so that the recursive walk is in order of full names.
                    children = sorted((file.name + "/" * file.is_dir(), file) for file in scan if not _is_loop(file))
            except FileNotFoundError:
                return
        identity = status.st_dev, status.st_ino
        if identity in parents:  # a symlink to a parent
            return
        parents |= {identity}
        visits.add(identity)
        for name, file in children:
            full = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                yield from self._walk(full.removesuffix("/"), visits, parents)
                continue
            with translate_os_errors(path / name):
                size = file.stat().st_size if file.is_file() and not is_temporary(name) else None
            if size is not None:
                yield Entry(full, size)


class _FolderVisits:
    """The folders of one listing; raises when links lead to the same ones so often that the listing would not end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: set[tuple[int, int]] = set()
        self._repeated = 0

    def add(self, identity: tuple[int, int]) -> None:
        """Count a visit to a folder, identified by device and inode."""
        self._repeated += identity in self._seen
        self._seen.add(identity)
        if self._repeated > MAX_REPEATED_FOLDERS:
            raise UnavailableError(
                f"symbolic links lead to directories listed before, more than {MAX_REPEATED_FOLDERS:,} times",
                where=self._root,
                hint="remove links between directories, or pass the path of a subdirectory",
            )


def _is_loop(file: os.DirEntry[str]) -> bool:
    """Return whether a file is a symlink to itself."""
    try:
        file.is_dir()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def is_temporary(name: str) -> bool:
    """Return whether a file name is that of a file still being written."""
    return _TEMPORARY.fullmatch(name) is not None


def _object_meta(status: os.stat_result) -> ObjectMeta:
    return ObjectMeta(status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}")


@contextmanager
def _atomic_write(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`: renamed to it at the end, removed on any failure."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; a failure leaves the previous file, and raises a StokerError that names the path."""
    with translate_os_errors(path), _atomic_write(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def translate_os_errors(path: Path, source: Path | None = None) -> Iterator[None]:
    """Convert OSError into a StokerError; "not found" refers to `source` if one is given."""
    try:
        yield
    except OSError as error:
        where = source if source and isinstance(error, FileNotFoundError) else path
        translated = _to_error(error, where)
        raise translated from (None if isinstance(translated, NotFoundError) else error)  # it would add nothing


def _to_error(error: OSError, where: Path) -> StokerError:
    match error.errno:
        case errno.ENOENT:
            return NotFoundError("no such file or directory", where=where)
        case errno.EISDIR:
            return NotFoundError("is a directory", where=where)
        case errno.ENOTDIR | errno.EEXIST:
            return NotFoundError("a parent of this path is not a directory", where=where)
        case errno.ENOSPC | errno.EDQUOT:
            return StorageFullError("no space left on device", where=where, hint="free some space or write elsewhere")
        case errno.EROFS:
            return AccessDeniedError("read-only file system", where=where, hint="write elsewhere, or mount it writable")
        case errno.EACCES | errno.EPERM:
            return AccessDeniedError(
                "permission denied",
                where=where,
                hint=f"running as uid {os.geteuid()}; check the owner and mode of the directory",
            )
        case _:
            return UnavailableError(error.strerror or "I/O error", where=where)
