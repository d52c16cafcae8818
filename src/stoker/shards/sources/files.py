"""Files that sources read by position from many threads, decompressed first if necessary."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.core.text import printable
from stoker.errors import SourceError, StorageFullError
from stoker.shards.images import BadImageError

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 1 << 20
DOWNLOAD_AGAIN = "download it again"
UNREADABLE = "cannot read"
"""How the reason starts for which an image is quarantined whose file, as opposed to its content, cannot be read."""
MAX_SIBLINGS = 16


class OpenFile:
    """A file that many threads can read at once: reads take an offset, so there is no shared file position.

    Errors name `path`, even if `copy` is read instead.
    """

    def __init__(self, path: Path, *, copy: Path | None = None) -> None:
        try:
            self._fd = os.open(copy or path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"cannot open: {error.strerror}", where=path) from error
        self.path = path
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = self._read(offset, size)
        while len(data) < size:
            more = self._read(offset + len(data), size - len(data))
            if not more:
                raise SourceError(
                    f"truncated: expected {size} bytes at offset {offset}, got {len(data)}",
                    where=self.path,
                )
            data += more
        return data

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise SourceError(f"cannot read at offset {offset}: {error.strerror}", where=self.path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe_skipped(count: int) -> str:
    """Return the note on files that a source skipped."""
    return "skipped 1 file that is not an image" if count == 1 else f"skipped {count:,} files that are not images"


def check_affects_one_file(error: OSError, path: str) -> None:
    """Raise SourceError for an error that may affect many files, such as that of a disk or share that failed."""
    if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EACCES):
        raise SourceError(f"cannot read: {error.strerror}", where=printable(path)) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a folder or a link to one; false for a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError as error:
        check_affects_one_file(error, entry.path)
        return False


def is_class_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a folder or a link to one.

    Raise SourceError for a link that cannot be followed, unless its target does not exist: without its class, the
    labels of others would change.
    """
    try:
        return entry.is_dir()
    except OSError as error:
        raise SourceError(f"cannot follow the link: {error.strerror}", where=printable(entry.path)) from error


def is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether this is a regular file or a link to one; false for a link that cannot be followed."""
    try:
        return entry.is_file()
    except OSError as error:
        check_affects_one_file(error, entry.path)
        return False


def stat_image(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return the size and modification time of an image file; the size is 0 if it is not readable as a file."""
    try:
        status = entry.stat()
        if stat.S_ISREG(status.st_mode):
            return status.st_size, status.st_mtime_ns
    except OSError as error:  # a broken link, a loop of links, or a link into a folder without permission
        check_affects_one_file(error, entry.path)
    try:
        return 0, entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError as error:  # deleted since the folder was listed
        check_affects_one_file(error, entry.path)
        return 0, 0


def read_image_file(path: str, size: int) -> bytes:
    """Read an image file that had this size when it was scanned.

    Raise BadImageError, which quarantines the image, if only this file cannot be read. Raise SourceError if the file
    changed, and for any error that may affect many files, such as that of a disk or share that failed.
    """
    if size == 0:
        _check_regular(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, size + 1)
            while len(data) < size and (more := os.read(fd, size + 1 - len(data))):
                data += more  # network file systems may return fewer bytes than requested
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EACCES and _has_forbidding_mode(path) and _can_open_sibling(path):
            raise BadImageError(f"{UNREADABLE}: {error.strerror}") from error
        raise SourceError(f"cannot read: {error.strerror}", where=printable(path)) from error
    if len(data) != size:
        raise SourceError(
            f"the file changed during the conversion: it had {size} bytes",
            where=printable(path),
            hint="try again when nothing writes to it",
        )
    return data


def _check_regular(path: str) -> None:
    """Raise BadImageError for a path that was not readable as a file when it was scanned."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        check_affects_one_file(error, path)
        if error.errno == errno.ENOENT and not Path(path).is_symlink():
            raise SourceError("the file was deleted during the conversion", where=printable(path)) from error
        reason = "broken symbolic link" if error.errno == errno.ENOENT else error.strerror
        raise BadImageError(f"{UNREADABLE}: {reason}") from error
    if not stat.S_ISREG(mode):
        raise BadImageError(f"{UNREADABLE}: not a regular file")


def _has_forbidding_mode(path: str) -> bool:
    """Return whether the owner and mode of a file deny this process read access."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    user = os.geteuid()
    if user == 0:  # a local file system denies root nothing; a network file system may map root to another user
        return not status.st_mode & stat.S_IROTH
    if status.st_uid == user:
        return not status.st_mode & stat.S_IRUSR
    if status.st_gid in (os.getegid(), *os.getgroups()):
        return not status.st_mode & stat.S_IRGRP
    return not status.st_mode & stat.S_IROTH


def _can_open_sibling(path: str) -> bool:
    """Return whether one of the first other files in the folder can be opened, or there is no other file."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder) as entries:
            files = (entry for entry in entries if entry.name != name and entry.is_file(follow_symlinks=False))
            siblings = [entry.path for entry in islice(files, MAX_SIBLINGS)]
    except OSError:
        return False
    return not siblings or any(map(_can_open, siblings))


def _can_open(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def open_decompressed(path: Path, scratch: Path) -> OpenFile:
    """Open a file; decompress it into `scratch` first if its content, whatever its name, is gzip."""
    file = OpenFile(path)
    if file.size < len(GZIP_MAGIC) or file.read(0, len(GZIP_MAGIC)) != GZIP_MAGIC:
        return file
    file.close()
    target = scratch / path.name.removesuffix(".gz")
    try:
        # Read to the end, where the checksum is.
        with translate_disk_full_errors(scratch), gzip.open(path) as packed, open(target, "xb") as plain:
            shutil.copyfileobj(packed, plain, CHUNK_BYTES)
    except EOFError as error:
        raise SourceError("truncated gzip stream", where=path, hint=DOWNLOAD_AGAIN) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"corrupt gzip stream: {error}", where=path, hint=DOWNLOAD_AGAIN) from error
    return OpenFile(path, copy=target)


@contextmanager
def translate_disk_full_errors(scratch: Path) -> Iterator[None]:
    """Translate the OSError of a full disk into a StorageFullError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFullError(
            "no space left to unpack the dataset", where=scratch, hint="set TMPDIR to a directory on a larger disk"
        ) from error
