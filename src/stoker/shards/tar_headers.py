"""Tar headers: iterate over the regular files of a tar (ustar, GNU or PAX) without copying or keeping its members.

`tarfile` copies every byte and keeps every member in memory; this reads headers only. It follows the same rules,
including those for the extended headers of Solaris (type `X`), with these differences:

- Sparse files, in the GNU and the PAX format, are rejected, because their data is not contiguous.
- A global PAX header that sets a path or a size is rejected, because a member could not be parsed on its own.
- The prefix field counts only with the magic of POSIX, `ustar` and a NUL; GNU tars store other fields in its place.
- An extended header that no member follows is an error, as is one of more than `MAX_EXTENDED_BYTES`.
- A missing end-of-archive block is an error unless `require_end` is false.
- The checksum of a header with a ustar magic is verified only with `verify`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from stoker.errors import SourceError

BLOCK_BYTES = 512
ZERO_BLOCK = bytes(BLOCK_BYTES)
MAX_EXTENDED_BYTES = 1 << 20

# name, size, type, magic, prefix
HEADER = struct.Struct("100s24x12s20xc100x6s82x155s12x")
_CHECKSUM = slice(148, 156)

_REGULAR = frozenset((b"0", b"\0", b"7"))
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_DIRECTORY = b"5"
_GNU_NAME, _GNU_LINK, _GNU_SPARSE = b"L", b"K", b"S"
_PAX, _PAX_SOLARIS, _PAX_GLOBAL = b"x", b"X", b"g"
_EXTENDED = frozenset((_GNU_NAME, _GNU_LINK, _PAX, _PAX_SOLARIS, _PAX_GLOBAL))

TarMember: TypeAlias = tuple[int, str, int, int, int]
"""Offset of the first header, path, offset of the data, size, offset of the end of the last block.

A plain tuple, because one is built for every member of every shard.
"""

_HeaderFields: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes]


class TarReader(Protocol):
    """Random access to the tar between the offsets `start` and `end`."""

    start: int
    end: int

    def unpack_header(self, offset: int, /) -> _HeaderFields:
        """Unpack the header at an offset with `HEADER`."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly `size` bytes."""
        ...


class TrailingDataError(SourceError):
    """Data follows the end of an archive; all of its members have been read."""


class MemoryReader:
    """A tar in memory or in a memory map."""

    start = 0

    def __init__(self, view: memoryview) -> None:
        self.end = len(view)
        self.unpack_header: Callable[[int], _HeaderFields] = partial(HEADER.unpack_from, view)
        self._view = view

    def read(self, offset: int, size: int) -> bytes:
        """Copy `size` bytes."""
        return self._view[offset : offset + size].tobytes()


class _Extended(NamedTuple):
    """The path and size that extended headers set for the member that follows them."""

    path: str | None = None
    size: int | None = None


def iter_members(
    tar: TarReader,
    where: str,
    *,
    verify: bool,
    require_end: bool = True,
    reject_trailing: bool = False,
    reject_special: bool = False,
    with_directories: bool = False,
    truncated_hint: str | None = None,
) -> Iterator[TarMember]:
    """Yield every regular file; its extended headers count as its first bytes.

    `verify` checks the checksum of every header. `require_end` demands the block of zeros at the end of an archive:
    without it, a cut between two members would go unnoticed. `reject_trailing` demands that only zeros follow it, and
    `reject_special` that every member is a regular file or a directory. `with_directories` yields directories too,
    with a path that ends in a slash.
    """

    def truncated(what: str) -> SourceError:
        return SourceError(f"truncated at byte {total}: {what}", where=where, hint=truncated_hint)

    total, unpack_header = tar.end, tar.unpack_header
    offset = first = tar.start
    extended = _Extended()
    while offset < total:
        data = offset + BLOCK_BYTES
        if data > total:
            raise truncated(f"the header at byte {offset} needs {BLOCK_BYTES} bytes")
        name, octal, kind, magic, prefix = fields = unpack_header(offset)
        if kind == b"0" and magic == b"ustar\0" and offset == first and name[0] and not prefix[0] and not verify:
            # The common case, a regular file with a ustar header; everything else takes the long way.
            size = _parse_size(octal, where, offset)
            end = data + -(-size // BLOCK_BYTES) * BLOCK_BYTES
            if end <= total:
                yield first, name.partition(b"\0")[0].decode("utf-8", "surrogateescape"), data, size, end
                offset = first = end
                continue
        if not name[0] and tar.read(offset, BLOCK_BYTES) == ZERO_BLOCK:
            break
        if verify or magic[:5] != b"ustar":  # the oldest tars have no magic, only a checksum
            _verify_checksum(tar.read(offset, BLOCK_BYTES), where, offset)
        path, size = _path_and_size(fields, extended, where, offset)
        end = data if kind in _WITHOUT_DATA else data + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if end > total:
            raise truncated(f"member {path!r} needs {size} bytes at offset {data}")
        if kind in _EXTENDED:
            extended = _read_extended(tar, where, offset, kind, size, extended)
            offset = end
            continue
        if kind in _REGULAR and not (kind == b"\0" and path.endswith("/")):  # an old directory
            yield first, path, data, size, end
        elif _is_directory(kind, path, where, offset, reject_special) and with_directories:
            yield first, path.rstrip("/") + "/", data, 0, end
        offset, first, extended = end, end, _Extended()
    _check_complete(extended, where, first)
    if require_end and offset >= total:
        raise truncated("the end-of-archive block is missing")
    if reject_trailing:
        _check_trailing(tar, where, offset)


def _check_complete(extended: _Extended, where: str, offset: int) -> None:
    """Raise SourceError if an extended header is the last member of an archive."""
    if extended != _Extended():
        raise SourceError(f"the extended header at byte {offset} is not followed by a member", where=where)


def _path_and_size(fields: _HeaderFields, extended: _Extended, where: str, offset: int) -> tuple[str, int]:
    name, octal, kind, magic, prefix = fields
    if kind in _EXTENDED:
        extended = _Extended()  # extended headers do not describe each other
    size = _parse_size(octal, where, offset) if extended.size is None else extended.size
    if extended.path is not None:
        return extended.path, size
    raw = name.partition(b"\0")[0]
    if prefix[0] and magic == b"ustar\0":
        raw = prefix.partition(b"\0")[0] + b"/" + raw
    return raw.decode("utf-8", "surrogateescape"), size


def _is_directory(kind: bytes, path: str, where: str, offset: int, reject_special: bool) -> bool:
    """Return whether a member that is not a regular file is a directory; raise SourceError if it is not accepted."""
    if kind == _GNU_SPARSE:
        raise SourceError(f"member {path!r} at byte {offset} is a sparse file, which is not supported", where=where)
    is_directory = kind in (_DIRECTORY, b"\0")
    if reject_special and not is_directory:
        raise SourceError(
            f"member {path!r} at byte {offset} is neither a regular file nor a directory",
            where=where,
            hint="delete broken links, then create the archive again with: tar --dereference --hard-dereference",
        )
    return is_directory


def _read_extended(tar: TarReader, where: str, offset: int, kind: bytes, size: int, extended: _Extended) -> _Extended:
    """Add what a GNU or PAX extended header sets for the next member."""
    if size > MAX_EXTENDED_BYTES:
        raise SourceError(f"the extended header at byte {offset} has an invalid size of {size} bytes", where=where)
    content = tar.read(offset + BLOCK_BYTES, size)
    if kind == _GNU_NAME:
        return extended._replace(path=content.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
    if kind == _GNU_LINK:
        return extended
    try:
        path, new_size, sparse = _parse_pax(content)
    except ValueError:
        raise SourceError(f"the PAX header at byte {offset} is corrupt", where=where) from None
    if sparse:
        raise SourceError(f"the member at byte {offset} is a sparse file, which is not supported", where=where)
    if kind == _PAX_GLOBAL and (path is not None or new_size is not None):
        # A sample could then not be parsed from its own bytes; no known tool writes this.
        raise SourceError(f"the global PAX header at byte {offset} sets the path or size of all members", where=where)
    return _Extended(path=extended.path if path is None else path, size=extended.size if new_size is None else new_size)


def _parse_size(field: bytes, where: str, offset: int) -> int:
    """Parse a size: octal text, or GNU's base 256 for what does not fit."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        # Most writers fill the whole field, which int() parses as it is.
        size = int(field[:11], 8) if field[11] == 0 < field[10] else int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        size = -1
    if size < 0:
        raise SourceError(f"invalid tar header at byte {offset}: its size is {field!r}", where=where)
    return size


def _parse_pax(content: bytes) -> tuple[str | None, int | None, bool]:
    """Parse records of `LENGTH KEY=VALUE` into the path, the size and whether the member is sparse."""
    path: str | None = None
    size: int | None = None
    sparse = False
    start = 0
    while start < len(content) and content[start]:
        digits = content[start : start + 8].partition(b" ")[0]
        end = start + int(digits)
        key, equals, value = content[start + len(digits) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n") or end > len(content):
            raise ValueError("not a record")
        if key == b"path":
            path = value[:-1].decode("utf-8", "surrogateescape")
        elif key == b"size":
            size = int(value)
            if size < 0:
                raise ValueError("a negative size")
        elif key.startswith(b"GNU.sparse."):
            sparse = True
        start = end
    return path, size, sparse


def _verify_checksum(block: bytes, where: str, offset: int) -> None:
    field = block[_CHECKSUM]
    try:
        recorded = int(field.partition(b"\0")[0], 8)
    except ValueError:
        recorded = -1
    unsigned = sum(block) - sum(field) + 8 * ord(" ")
    if recorded == unsigned:
        return
    # Some old tars contain the sum of signed bytes.
    if recorded != unsigned - 256 * sum(byte > 127 for byte in block[: _CHECKSUM.start] + block[_CHECKSUM.stop :]):
        what = f"invalid tar header at byte {offset}: its checksum is {field!r}, expected {unsigned:o}"
        raise SourceError(what, where=where)


def _check_trailing(tar: TarReader, where: str, end: int) -> None:
    for offset in range(end, tar.end, BLOCK_BYTES):
        if any(tar.read(offset, min(BLOCK_BYTES, tar.end - offset))):
            raise TrailingDataError(f"the archive ends at byte {end}, but data follows at byte {offset}", where=where)
