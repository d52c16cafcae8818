"""The members of a tar by position, one at a time; `tarfile` would keep every one that it has seen."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from stoker.errors import SourceError
from stoker.shards.sources.files import DOWNLOAD_AGAIN, OpenFile

BLOCK = tarfile.BLOCKSIZE
NUL_BLOCK = bytes(BLOCK)
MAX_RECORD = 1 << 20
PLAIN_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
RECORDS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)


class Member(NamedTuple):
    """A plain file in a tar: its bytes start at `offset` of the file that holds the tar."""

    name: str
    offset: int
    size: int


class Known(NamedTuple):
    """What records said about the next member, for which its own header has no room."""

    name: str | None = None
    size: int | None = None


def iter_members(file: OpenFile, start: int = 0, end: int | None = None, *, within: str = "") -> Iterator[Member]:
    """List the plain files of the tar that fills `start` to `end`; a tar inside a tar is named by `within`.

    Only headers are read. A tar must end as tar writes it, with a block of zeros: half a download is refused.
    """
    at, end = start, file.size if end is None else end
    where = f"{file.path} ({within})" if within else str(file.path)
    known = Known()
    while True:
        if at + BLOCK > end:
            raise SourceError(
                f"truncated: expected a tar header at offset {at}, the tar ends at {end}",
                where=where,
                hint=DOWNLOAD_AGAIN,
            )
        block, data = file.read(at, BLOCK), at + BLOCK
        if block == NUL_BLOCK:
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise SourceError(f"not a tar: {error} at offset {at}", where=where) from error
        is_record = header.type in RECORDS
        name = known.name or header.name
        size = header.size if is_record or known.size is None else known.size
        at = data + -(-size // BLOCK) * BLOCK
        if size < 0 or data + size > end:
            raise SourceError(
                f"truncated: member {name!r} at offset {data} needs {size} bytes, the tar ends at {end}",
                where=where,
                hint=DOWNLOAD_AGAIN,
            )
        if is_record and size > MAX_RECORD:
            raise SourceError(f"not a tar: a name record of {size} bytes at offset {data}", where=where)
        if is_record:
            try:
                known = _read_record(header.type, file.read(data, size), known)
            except ValueError as error:
                raise SourceError(f"not a tar: bad pax record at offset {data}", where=where) from error
            continue
        known = Known()
        if header.type in PLAIN_FILES:
            yield Member(name, data, size)
        elif header.type != tarfile.DIRTYPE:
            raise SourceError(f"member {name!r} at offset {data} is neither a file nor a folder", where=where)


def _read_record(kind: bytes, data: bytes, known: Known) -> Known:
    """Add what a GNU or pax record tells."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return known._replace(name=data.rstrip(b"\0").decode("utf-8", "surrogateescape"))
    while kind == tarfile.XHDTYPE and data:  # "27 path=some/long/name.JPEG\n", the length counting itself
        space = data.index(b" ")
        length = int(data[:space])
        key, _, value = data[space + 1 : length - 1].partition(b"=")
        data = data[max(length, 1) :]
        if key == b"path":
            known = known._replace(name=value.decode("utf-8", "surrogateescape"))
        elif key == b"size":
            known = known._replace(size=int(value))
    return known
