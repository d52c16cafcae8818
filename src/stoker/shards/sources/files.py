"""Files that sources read by position, and what must be unpacked before that is possible."""

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

from stoker.errors import FullError, SourceError

GZIP_MAGIC = b"\x1f\x8b"
CHUNK = 1 << 20
DOWNLOAD_AGAIN = "download it again"


class OpenFile:
    """A file that many threads read at once: every read names its position, so there is no seek to share.

    Errors name `path`, also when it is `copy` that is read.
    """

    def __init__(self, path: Path, *, copy: Path | None = None) -> None:
        try:
            self._fd = os.open(copy or path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"cannot be opened: {error.strerror}", where=path) from error
        self.path = path
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly `size` bytes."""
        data = self._read(offset, size)
        while len(data) < size:
            more = self._read(offset + len(data), size - len(data))
            if not more:
                raise SourceError(
                    f"truncated: expected {size} bytes at offset {offset}, the file ends after {len(data)}",
                    where=self.path,
                )
            data += more
        return data

    def close(self) -> None:
        """Close the descriptor, once."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError as error:
            raise SourceError(f"cannot be read at offset {offset}: {error.strerror}", where=self.path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_decompressed(path: Path, scratch: Path) -> OpenFile:
    """Open a file, or its copy in `scratch` when its first bytes, whatever its name, say that it is gzip."""
    file = OpenFile(path)
    if file.size < len(GZIP_MAGIC) or file.read(0, len(GZIP_MAGIC)) != GZIP_MAGIC:
        return file
    file.close()
    target = scratch / path.name.removesuffix(".gz")
    try:
        # To the very end, where the checksum is.
        with disk_full_errors(scratch), gzip.open(path) as packed, open(target, "xb") as plain:
            shutil.copyfileobj(packed, plain, CHUNK)
    except EOFError as error:
        raise SourceError("truncated: the gzip stream has no end", where=path, hint=DOWNLOAD_AGAIN) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"damaged gzip stream: {error}", where=path, hint=DOWNLOAD_AGAIN) from error
    return OpenFile(path, copy=target)


@contextmanager
def disk_full_errors(scratch: Path) -> Iterator[None]:
    """Turn a full disk into a FullError that names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FullError(
            "no space left to unpack the dataset", where=scratch, hint="point TMPDIR at a larger disk"
        ) from error
