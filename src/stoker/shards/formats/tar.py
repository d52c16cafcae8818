"""WebDataset tars: `<key>.jpg`, further members, `<key>.cls`, one sample after the other.

Written as plain ustar with fixed owner, mode and time, so that equal samples give equal bytes. Read by
tarfile's rules but without tarfile, which copies every byte, and grouped into samples by webdataset's rules.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import TypeAlias

from stoker.errors import SourceError
from stoker.shards.formats import CANONICAL_EXTENSIONS, EncodedSample, LocatedSample
from stoker.shards.sample import NO_EXTRAS, Buffer, Sample

BLOCK = 512
ZEROS = bytes(BLOCK)
NAME_BYTES = 100
OCTAL_SIZES = 8**11
LONGEST_EXTENSION = 1 << 20
LONGEST_LABEL = 20

# The fields between name and size, between size and checksum, and between type and the end of the block.
_MODE_UID_GID = b"0000644\x000000000\x000000000\x00"
_MTIME = b"\x0000000000000\x00"
_LINK_TO_END = bytes(100) + b"ustar\x0000" + bytes(247)
_FIXED_SUM = sum(_MODE_UID_GID + _MTIME + _LINK_TO_END) + 8 * ord(" ")

# name, size, type, magic, prefix
_HEADER = struct.Struct("100s24x12s20xc100x6s82x155s12x")

_REGULAR = frozenset((b"0", b"\0", b"7"))
_DATALESS = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_GNU_NAME, _GNU_LINK, _GNU_SPARSE = b"L", b"K", b"S"
_PAX, _PAX_SOLARIS, _PAX_GLOBAL = b"x", b"X", b"g"
_EXTENSIONS = frozenset((_GNU_NAME, _GNU_LINK, _PAX, _PAX_SOLARIS, _PAX_GLOBAL))

_META = re.compile(r"__[^/]*__($|/)")

# start of its first header, path, where its bytes start, how many, end of its last block
_Member: TypeAlias = tuple[int, str, int, int, int]


class Tar:
    """The tar format."""

    name = "tar"
    trailer = ZEROS * 2
    overhead = 3 * BLOCK + BLOCK // 2  # two headers, the label, half a block of padding

    def shard_name(self, prefix: str, split: str, number: int, total: int) -> str:  # noqa: ARG002
        """`PREFIX-train-000000.tar`; the number of shards is not part of it."""
        return f"{prefix}{'-' if prefix else ''}{split}-{number:06d}.tar"

    def check_key(self, key: str) -> None:
        """Refuse a key that webdataset would skip or split elsewhere; the kind of the image does not matter."""
        if "\0" in key or split_path(f"{key}.jpg") != (key, "jpg"):
            raise SourceError(f"a tar cannot hold a sample with key {key!r}", hint="webdataset would not give it back")
        _encoded(key)

    def encode(self, sample: Sample) -> EncodedSample:
        """Image first, so that a reader that wants only the image reads on from the start; label last."""
        key, image, kind, label, extras = sample
        self.check_key(key)
        if CANONICAL_EXTENSIONS.get(kind) != kind:
            raise SourceError(f"a tar cannot hold a sample of kind {kind!r}")
        size = len(image)
        head = _header(f"{key}.{kind}", size)
        tail: list[Buffer] = [ZEROS[: -size % BLOCK]]
        for extension in sorted(extras):
            taken = extension in (kind, "cls") or "\0" in extension
            if taken or split_path(f"{key}.{extension}") != (key, extension):
                raise SourceError(f"a tar cannot hold a member {extension!r} for the sample {key!r}")
            tail += _member(f"{key}.{extension}", extras[extension])
        tail += _member(f"{key}.cls", b"%d" % label)
        rest = b"".join(tail)
        return EncodedSample([head, image, rest], len(head) + size + len(rest), len(head))

    def iter_samples(
        self, data: Buffer, where: str, *, check: bool = False, errors: list[SourceError] | None = None
    ) -> Iterator[LocatedSample]:
        """Every sample; an archive without its end is truncated, though it may end between two of them."""
        return _walk(memoryview(data), where, check, whole=True, faults=errors)

    def parse_sample(self, data: Buffer, where: str, *, check: bool = False) -> Sample:
        """The one sample in these bytes."""
        samples = [found.sample for found in _walk(memoryview(data), where, check, whole=False)]
        if len(samples) != 1:
            raise SourceError(f"expected the bytes of 1 sample, found {len(samples)}", where=where)
        return samples[0]


FORMAT = Tar()


def split_path(path: str) -> tuple[str, str] | None:
    """The key and the lower-case extension of a member, None for one that webdataset skips.

    Written out because webdataset's regular expression takes quadratic time on hostile paths.
    """
    folder, slash, file = path.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not dot or (path.startswith("__") and (_META.match(path) or (not slash and path.endswith("__")))):
        return None
    if stem:
        return folder + slash + stem, extension.lower()
    # `a/.jpg` has the key `a/`: a surprise, but it is webdataset's.
    if slash and "." not in folder.rpartition("/")[2]:
        return folder + slash, extension.lower()
    return None


def _walk(
    view: memoryview, where: str, check: bool, *, whole: bool, faults: list[SourceError] | None = None
) -> Iterator[LocatedSample]:
    """Every sample: consecutive members with one key, as webdataset groups them."""
    key = ""
    expected: str | None = None
    first = last = 0
    members: dict[str, tuple[int, int]] = {}
    for start, path, at, size, end in _members(view, where, check, whole=whole):
        if path == expected:  # the label behind an image: nothing to take apart
            extension = "cls"
        else:
            names = split_path(path)
            if names is None:
                continue
            if names[0] != key or not members:
                if members and (found := _found(view, where, key, first, last, members, faults)):
                    yield found
                key, first, members = names[0], start, {}
                expected = f"{key}.cls"
            extension = names[1]
        if extension in members:
            raise SourceError(f"member {path!r} at byte {start} is there twice", where=where)
        members[extension] = at, size
        last = end
    if members and (found := _found(view, where, key, first, last, members, faults)):
        yield found


def _found(
    view: memoryview,
    where: str,
    key: str,
    start: int,
    end: int,
    members: dict[str, tuple[int, int]],
    faults: list[SourceError] | None,
) -> LocatedSample | None:
    try:
        return _sample_of(view, where, key, start, end, members)
    except SourceError as error:
        if faults is None:
            raise
        faults.append(error)
        return None


def _sample_of(
    view: memoryview, where: str, key: str, start: int, end: int, members: dict[str, tuple[int, int]]
) -> LocatedSample:
    for image in members:
        if image in CANONICAL_EXTENSIONS:
            break
    else:
        raise SourceError(f"sample {key!r} at byte {start} has no image", where=where)
    if "cls" not in members:
        raise SourceError(f"sample {key!r} at byte {start} has no label (.cls)", where=where)
    at, size = members["cls"]
    text = bytes(view[at : at + min(size, LONGEST_LABEL + 1)])
    try:
        if size > LONGEST_LABEL:
            raise ValueError
        label = int(text)
    except ValueError:
        raise SourceError(
            f"sample {key!r} at byte {start} has the label {text!r}, not an integer", where=where
        ) from None
    extras = NO_EXTRAS
    if len(members) > 2:
        extras = {
            extension: view[at : at + size]
            for extension, (at, size) in members.items()
            if extension not in (image, "cls")
        }
    at, size = members[image]
    return LocatedSample(start, end, at, Sample(key, view[at : at + size], CANONICAL_EXTENSIONS[image], label, extras))


def _members(view: memoryview, where: str, check: bool, *, whole: bool) -> Iterator[_Member]:
    """Every regular file; the headers that extend a file's own header count as its first bytes.

    A whole archive must end with a block of zeros: without one there is no telling how many members were cut off.
    """
    total = len(view)
    at = start = 0
    long_path: str | None = None
    long_size: int | None = None
    while at < total:
        data_at = at + BLOCK
        if data_at > total:
            raise SourceError(f"truncated at byte {total}: a header at byte {at} wants {BLOCK} bytes", where=where)
        name, octal, kind, magic, prefix = _HEADER.unpack_from(view, at)
        if kind == b"0" and magic == b"ustar\0" and at == start and name[0] and not prefix[0] and not check:
            # A plain file in a plain header, as nearly all are; whatever is odd about it falls through.
            size = _number(octal, where, at)
            end = data_at + (size + BLOCK - 1) // BLOCK * BLOCK
            if end <= total:
                yield start, name.partition(b"\0")[0].decode("utf-8", "surrogateescape"), data_at, size, end
                at = start = end
                continue
        if not name[0] and view[at:data_at].tobytes() == ZEROS:
            break
        # The oldest tars have no magic: only the checksum tells them from something that is not a tar.
        if check or magic[:5] != b"ustar":
            _check_header(view, where, at)
        extends = kind in _EXTENSIONS
        size = _number(octal, where, at) if long_size is None or extends else long_size
        if long_path is None or extends:
            raw = name.partition(b"\0")[0]
            if prefix[0] and magic == b"ustar\0":
                raw = prefix.partition(b"\0")[0] + b"/" + raw
            path = raw.decode("utf-8", "surrogateescape")
        else:
            path = long_path
        end = data_at if kind in _DATALESS else data_at + (size + BLOCK - 1) // BLOCK * BLOCK
        if end > total:
            raise SourceError(
                f"truncated at byte {total}: member {path!r} wants {size} bytes at byte {data_at}",
                where=where,
            )
        if extends:
            new_path, new_size = _extension(view, where, at, kind, size)
            long_path = long_path if new_path is None else new_path
            long_size = long_size if new_size is None else new_size
            at = end
            continue
        if kind in _REGULAR:
            yield start, path, data_at, size, end
        elif kind == _GNU_SPARSE:
            raise SourceError(f"member {path!r} at byte {at} is sparse, which is not supported", where=where)
        at = start = end
        long_path = long_size = None
    if long_path is not None or long_size is not None:
        raise SourceError(f"the header at byte {start} describes a member that does not follow", where=where)
    if whole and at == total:
        raise SourceError(f"truncated at byte {total}: the end of the archive is missing", where=where)
    if whole and check:
        _check_end(view, where, at)


def _extension(view: memoryview, where: str, at: int, kind: bytes, size: int) -> tuple[str | None, int | None]:
    """The path and the size that an extended header gives to the member behind it."""
    if size > LONGEST_EXTENSION:
        raise SourceError(f"the extended header at byte {at} claims {size} bytes", where=where)
    block = view[at + BLOCK : at + BLOCK + size].tobytes()
    if kind == _GNU_NAME:
        return block.partition(b"\0")[0].decode("utf-8", "surrogateescape"), None
    if kind == _GNU_LINK:
        return None, None
    try:
        path, new_size, sparse = _pax(block)
    except ValueError:
        raise SourceError(f"the PAX header at byte {at} is damaged", where=where) from None
    if sparse:
        raise SourceError(f"the member at byte {at} is sparse, which is not supported", where=where)
    if kind == _PAX_GLOBAL and (path is not None or new_size is not None):
        # The span of a sample could then not be read by itself; no writer is known to do this.
        raise SourceError(f"the PAX header at byte {at} gives all members one path or size", where=where)
    return path, new_size


def _number(field: bytes, where: str, at: int) -> int:
    """A size: octal text, or GNU's base 256 where that would not fit."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        # Nearly all writers fill the field; int() then needs no help.
        number = int(field[:11], 8) if field[11] == 0 < field[10] else int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        number = -1
    if number < 0:
        raise SourceError(f"not a tar header at byte {at}: its size is {field!r}", where=where)
    return number


def _pax(block: bytes) -> tuple[str | None, int | None, bool]:
    """The path, the size and whether the member is sparse, from lines of `LENGTH KEY=VALUE`."""
    path: str | None = None
    size: int | None = None
    sparse = False
    at = 0
    while at < len(block) and block[at]:
        digits = block[at : at + 8].partition(b" ")[0]
        end = at + int(digits)
        key, equals, value = block[at + len(digits) + 1 : end].partition(b"=")
        if not equals or not value.endswith(b"\n") or end > len(block):
            raise ValueError("not a record")
        if key == b"path":
            path = value[:-1].decode("utf-8", "surrogateescape")
        elif key == b"size":
            size = int(value)
            if size < 0:
                raise ValueError("a negative size")
        elif key.startswith(b"GNU.sparse."):
            sparse = True
        at = end
    return path, size, sparse


def _check_header(view: memoryview, where: str, at: int) -> None:
    block = view[at : at + BLOCK].tobytes()
    field = block[148:156]
    try:
        claimed = int(field.partition(b"\0")[0], 8)
    except ValueError:
        claimed = -1
    actual = sum(block) - sum(field) + 8 * ord(" ")
    if claimed != actual:
        raise SourceError(f"not a tar header at byte {at}: its checksum is {field!r}, not {actual:o}", where=where)


def _check_end(view: memoryview, where: str, at: int) -> None:
    for more in range(at, len(view), BLOCK):
        if any(view[more : more + BLOCK]):
            raise SourceError(f"the archive ends at byte {at}, but byte {more} starts more", where=where)


def _member(path: str, data: Buffer) -> tuple[Buffer, Buffer, Buffer]:
    size = len(data)
    return _header(path, size), data, ZEROS[: -size % BLOCK]


def _header(path: str, size: int) -> bytes:
    """The header of a regular file, behind a PAX header where plain ustar cannot say it."""
    if path.isascii() and len(path) <= NAME_BYTES and size < OCTAL_SIZES:
        return _block(path.encode(), size, b"0")
    # By hand rather than by TarInfo.tobuf: its bytes differ between versions of Python.
    records = _record(b"path", _encoded(path))
    if size >= OCTAL_SIZES:
        records += _record(b"size", b"%d" % size)
    extended = _block(b"././@PaxHeader", len(records), b"x") + records + ZEROS[: -len(records) % BLOCK]
    return extended + _block(path.encode("ascii", "replace")[:NAME_BYTES], min(size, OCTAL_SIZES - 1), b"0")


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SourceError(f"a tar cannot hold the name {text!r}") from None


def _block(name: bytes, size: int, kind: bytes) -> bytes:
    octal = b"%011o" % size
    checksum = _FIXED_SUM + sum(name) + sum(octal) + kind[0]
    return b"%b%b%b%b%06o\0 %b%b" % (
        name.ljust(NAME_BYTES, b"\0"),
        _MODE_UID_GID,
        octal,
        _MTIME,
        checksum,
        kind,
        _LINK_TO_END,
    )


def _record(key: bytes, value: bytes) -> bytes:
    """One PAX record, which starts with its own length, the digits of that length included."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)
