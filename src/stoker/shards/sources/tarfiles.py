"""The regular files of a tar on disk, by position, so that many threads can read them at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stoker.shards import tar_headers
from stoker.shards.sources.files import DOWNLOAD_AGAIN, OpenFile


class ArchivedFile(NamedTuple):
    """A regular file in a tar; its bytes start at `offset` of the file that holds the tar.

    The name of a directory ends in a slash.
    """

    name: str
    offset: int
    size: int


class _FileReader:
    """A tar between two offsets of a file."""

    def __init__(self, file: OpenFile, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.read = file.read

    def unpack_header(self, offset: int) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        name, size, kind, magic, prefix = tar_headers.HEADER.unpack(self.read(offset, tar_headers.BLOCK_BYTES))
        return name, size, kind, magic, prefix


def iter_files(
    file: OpenFile, start: int = 0, end: int | None = None, *, within: str = "", with_directories: bool = False
) -> Iterator[ArchivedFile]:
    """Yield the regular files of the tar between `start` and `end`; `within` names a tar inside another tar.

    Only headers are read. Raise SourceError for links and devices, and for a tar without its end-of-archive block, as
    an interrupted download leaves it.
    """
    members = tar_headers.iter_members(
        _FileReader(file, start, file.size if end is None else end),
        f"{file.path} ({within})" if within else str(file.path),
        verify=True,
        reject_special=True,
        with_directories=with_directories,
        truncated_hint=DOWNLOAD_AGAIN,
    )
    for _, path, offset, size, _ in members:
        yield ArchivedFile(path, offset, size)
