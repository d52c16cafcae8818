"""Local folders: plain files, written beside their name and renamed into place."""

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
    AccessError,
    ChangedError,
    DataFaultError,
    FullError,
    InputError,
    NotFoundError,
    StokerError,
    UnavailableError,
)
from stoker.storage import Entry, Tag, checked, folder_of, local_path

_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")


class LocalStore:
    """The files below a folder. Writes are whole or absent, also after a kill; they are not fsynced."""

    def __init__(self, url: str) -> None:
        path = local_path(url)
        if path is None:
            raise InputError("is not a local folder", where=url)
        self.url = url
        self.root = path

    def get(self, name: str) -> bytes:
        """Read a whole file."""
        path = self._path(name)
        with explained(path):
            return path.read_bytes()

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, refuse those of another version."""
        path = self._path(name)
        with explained(path), path.open("rb", buffering=0) as file:
            file.seek(start)
            data = file.read(length)
            while len(data) < length and (more := file.read(length - len(data))):
                data += more  # one read of Linux ends at 2 GiB
            if etag and _tag(os.fstat(file.fileno())).etag != etag:
                raise ChangedError(where=path)
        if len(data) < length:
            raise DataFaultError(f"wanted {length} bytes from {start}, got {len(data)}", where=path)
        return data

    def size(self, name: str) -> int:
        """Tell a file's size in bytes."""
        return self.tag(name).size

    def tag(self, name: str) -> Tag:
        """Tell which version of a file is there, by its size, its time and its inode."""
        path = self._path(name)
        with explained(path):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise NotFoundError("is not a file", where=path)
        return _tag(status)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the files whose name starts with `prefix`, in order of name; none if the folder is absent."""
        return (entry for entry in self._walk(folder_of(prefix)) if entry.name.startswith(prefix))

    def put(self, name: str, source: bytes | Path) -> None:
        """Write a file, or move one in: by a rename if it lies on the same filesystem."""
        if isinstance(source, bytes):
            self.write(name, [source])
            return
        target = self._path(name)
        with explained(target, source):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.replace(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with _whole(target) as temporary:
                    shutil.copyfile(source, temporary)
                source.unlink()

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file from pieces; it appears when the last one is written."""
        target = self._path(name)
        with explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _whole(target) as temporary, temporary.open("xb") as file:
                file.writelines(chunks)

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        path = self._path(name)
        with explained(path):
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.root / checked(name)

    def _walk(self, folder: str) -> Iterator[Entry]:
        path = self.root / folder
        with explained(path):
            try:
                with os.scandir(path) as scan:
                    # A folder sorts by its name with the slash, so that the walk as a whole is in order.
                    found = sorted((file.name + "/" * file.is_dir(), file) for file in scan)
            except FileNotFoundError:
                return
        for name, file in found:
            full = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                yield from self._walk(full.removesuffix("/"))
                continue
            with explained(path / name):
                status = file.stat() if file.is_file() and not is_temporary(name) else None
            if status:
                yield Entry(full, status.st_size)


def is_temporary(name: str) -> bool:
    """Tell a file that is still being written by its name."""
    return _TEMPORARY.fullmatch(name) is not None


def _tag(status: os.stat_result) -> Tag:
    return Tag(status.st_size, f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}")


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Give a temporary path beside `target`, renamed to it at the end, removed on any failure."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def explained(path: Path, source: Path | None = None) -> Iterator[None]:
    """Turn the operating system's errors into ours; what is not found is the source, if one is given."""
    try:
        yield
    except OSError as error:
        where = source if source and isinstance(error, FileNotFoundError) else path
        raise _explain(error, where) from error


def _explain(error: OSError, where: Path) -> StokerError:
    match error.errno:
        case errno.ENOENT:
            return NotFoundError("no such file", where=where)
        case errno.EISDIR:
            return NotFoundError("is a folder", where=where)
        case errno.ENOTDIR | errno.EEXIST:
            return NotFoundError("is a file, or lies below one", where=where)
        case errno.ENOSPC | errno.EDQUOT:
            return FullError("no space left", where=where, hint="free some, or write to another place")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return AccessError(
                "permission denied",
                where=where,
                hint=f"tried as user {os.geteuid()}; check the folder's mode",
            )
        case _:
            return UnavailableError(error.strerror or "cannot be used", where=where)
