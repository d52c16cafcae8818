"""Files that sources read by position from many threads, decompressed first if necessary."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.errors import SourceError, StorageFullError

GZIP_MAGIC = b"\x1f\x8b"
CHUNK_BYTES = 1 << 20
DOWNLOAD_AGAIN = "download it again"


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
