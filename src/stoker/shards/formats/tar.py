"""WebDataset tar shards: `<key>.jpg`, further members and `<key>.cls` for each sample.

Written as plain ustar with fixed owner, mode and time, so that equal samples give equal bytes. Read without copying,
and grouped into samples as webdataset groups them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stoker.errors import SourceError
from stoker.shards.formats import CANONICAL_EXTENSIONS, EncodedSample, LocatedSample
from stoker.shards.sample import NO_EXTRAS, Buffer, Sample
from stoker.shards.tar_headers import BLOCK_BYTES, ZERO_BLOCK, MemoryReader, TrailingDataError, iter_members

MAX_NAME_BYTES = 100
MAX_LABEL_BYTES = 20
OCTAL_SIZE_LIMIT = 8**11
INT64 = 1 << 63

# The fields between name and size, between size and checksum, and between type and the end of the block.
_MODE_UID_GID = b"0000644\x000000000\x000000000\x00"
_MTIME = b"\x0000000000000\x00"
_LINK_TO_END = bytes(100) + b"ustar\x0000" + bytes(247)
_FIXED_SUM = sum(_MODE_UID_GID + _MTIME + _LINK_TO_END) + 8 * ord(" ")

_META = re.compile(r"__[^/]*__($|/)")


class MissingLabelError(SourceError):
    """A sample has no label: perhaps the tar is not a shard."""


class Tar:
    """The tar format."""

    name = "tar"
    trailer = ZERO_BLOCK * 2
    overhead = 3 * BLOCK_BYTES + BLOCK_BYTES // 2  # two headers, the label, half a block of padding

    def shard_name(self, prefix: str, split: str, number: int, total: int) -> str:  # noqa: ARG002
        """Return `PREFIX-train-000000.tar`; the number of shards is not part of the name."""
        return f"{prefix}{'-' if prefix else ''}{split}-{number:06d}.tar"

    def check_key(self, key: str) -> None:
        """Raise SourceError for a key that webdataset would skip or split in another place."""
        if "\0" in key or split_path(f"{key}.jpg") != (key, "jpg"):
            raise SourceError(f"a tar cannot store a sample with key {key!r}", hint="webdataset would read another key")
        _encode_path(key)

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode the image first, so that a reader of images alone can stop after it, and the label last."""
        key, image, extension, label, extras = sample
        self.check_key(key)
        if CANONICAL_EXTENSIONS.get(extension) != extension:
            raise SourceError(f"a tar cannot store an image with extension {extension!r}")
        size = len(image)
        head = _encode_header(f"{key}.{extension}", size)
        tail: list[Buffer] = [ZERO_BLOCK[: -size % BLOCK_BYTES]]
        for name in sorted(extras):
            reserved = name in (extension, "cls") or "\0" in name
            if reserved or split_path(f"{key}.{name}") != (key, name):
                raise SourceError(f"a tar cannot store a member {name!r} of the sample {key!r}")
            tail += _encode_member(f"{key}.{name}", extras[name])
        tail += _encode_member(f"{key}.cls", b"%d" % label)
        rest = b"".join(tail)
        return EncodedSample([head, image, rest], len(head) + size + len(rest), len(head))

    def iter_samples(
        self, data: Buffer, where: str, *, check: bool = False, errors: list[SourceError] | None = None
    ) -> Iterator[LocatedSample]:
        """Yield every sample; raise SourceError at the end of an archive that has no end-of-archive block."""
        return _iter_samples(memoryview(data), where, check, whole=True, errors=errors)

    def parse_sample(self, data: Buffer, where: str, *, check: bool = False) -> Sample:
        """Parse the bytes of exactly one sample."""
        samples = [located.sample for located in _iter_samples(memoryview(data), where, check, whole=False)]
        if len(samples) != 1:
            raise SourceError(f"expected the bytes of 1 sample, found {len(samples)}", where=where)
        return samples[0]


FORMAT = Tar()


def split_path(path: str) -> tuple[str, str] | None:
    """Split a member's path into key and lower-case extension; return None for a member that webdataset skips.

    Without a regular expression: webdataset's own takes quadratic time on hostile paths.
    """
    folder, slash, file = path.rpartition("/")
    stem, dot, extension = file.partition(".")
    if not dot or (path.startswith("__") and (_META.match(path) or (not slash and path.endswith("__")))):
        return None
    if stem:
        return folder + slash + stem, extension.lower()
    # `a/.jpg` has the key `a/`: surprising, but this is what webdataset does.
    if slash and "." not in folder.rpartition("/")[2]:
        return folder + slash, extension.lower()
    return None


def _iter_samples(
    view: memoryview, where: str, check: bool, *, whole: bool, errors: list[SourceError] | None = None
) -> Iterator[LocatedSample]:
    """Yield every sample: consecutive members with the same key."""
    key = ""
    expected: str | None = None
    first = last = 0
    spans: dict[str, tuple[int, int]] = {}
    members = iter_members(MemoryReader(view), where, verify=check, require_end=whole, reject_trailing=whole and check)
    trailing: TrailingDataError | None = None
    try:
        for start, path, offset, size, end in members:
            if path == expected:  # the label of the current sample: no need to split its path
                extension = "cls"
            else:
                names = split_path(path)
                if names is None:
                    continue
                if names[0] != key or not spans:
                    if spans and (located := _collect_sample(view, where, key, first, last, spans, errors)):
                        yield located
                    key, first, spans = names[0], start, {}
                    expected = f"{key}.cls"
                extension = names[1]
            if extension in spans:
                raise SourceError(f"member {path!r} at byte {start} occurs twice", where=where)
            spans[extension] = offset, size
            last = end
    except TrailingDataError as error:  # the last sample is complete
        trailing = error
    if spans and (located := _collect_sample(view, where, key, first, last, spans, errors)):
        yield located
    if trailing:
        raise trailing


def _collect_sample(
    view: memoryview,
    where: str,
    key: str,
    start: int,
    end: int,
    spans: dict[str, tuple[int, int]],
    errors: list[SourceError] | None,
) -> LocatedSample | None:
    try:
        return _build_sample(view, where, key, start, end, spans)
    except SourceError as error:
        if errors is None:
            raise
        errors.append(error)
        return None


def _build_sample(
    view: memoryview, where: str, key: str, start: int, end: int, spans: dict[str, tuple[int, int]]
) -> LocatedSample:
    for image in spans:
        if image in CANONICAL_EXTENSIONS:
            break
    else:
        raise SourceError(f"sample {key!r} at byte {start} has no image", where=where)
    if "cls" not in spans:
        raise MissingLabelError(f"sample {key!r} at byte {start} has no label (.cls)", where=where)
    offset, size = spans["cls"]
    text = bytes(view[offset : offset + min(size, MAX_LABEL_BYTES + 1)])
    try:
        if size > MAX_LABEL_BYTES:
            raise ValueError
        label = int(text)
        if not -INT64 <= label < INT64:
            raise ValueError
    except ValueError:
        what = f"sample {key!r} at byte {start} has the label {text!r}, which is not a 64-bit integer"
        raise SourceError(what, where=where) from None
    extras = NO_EXTRAS
    if len(spans) > 2:
        extras = {
            extension: view[offset : offset + size]
            for extension, (offset, size) in spans.items()
            if extension not in (image, "cls")
        }
    offset, size = spans[image]
    sample = Sample(key, view[offset : offset + size], CANONICAL_EXTENSIONS[image], label, extras)
    return LocatedSample(start, end, offset, sample)


def _encode_member(path: str, data: Buffer) -> tuple[Buffer, Buffer, Buffer]:
    size = len(data)
    return _encode_header(path, size), data, ZERO_BLOCK[: -size % BLOCK_BYTES]


def _encode_header(path: str, size: int) -> bytes:
    """Encode the header of a regular file, after a PAX header where plain ustar has no room."""
    if path.isascii() and len(path) <= MAX_NAME_BYTES and size < OCTAL_SIZE_LIMIT:
        return _encode_block(path.encode(), size, b"0")
    # Not by TarInfo.tobuf, whose bytes differ between versions of Python.
    records = _encode_record(b"path", _encode_path(path))
    if size >= OCTAL_SIZE_LIMIT:
        records += _encode_record(b"size", b"%d" % size)
    padding = ZERO_BLOCK[: -len(records) % BLOCK_BYTES]
    extended = _encode_block(b"././@PaxHeader", len(records), b"x") + records + padding
    name = path.encode("ascii", "replace")[:MAX_NAME_BYTES]
    return extended + _encode_block(name, min(size, OCTAL_SIZE_LIMIT - 1), b"0")


def _encode_path(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SourceError(f"a tar cannot store the name {text!r}") from None


def _encode_block(name: bytes, size: int, kind: bytes) -> bytes:
    octal = b"%011o" % size
    checksum = _FIXED_SUM + sum(name) + sum(octal) + kind[0]
    return b"%b%b%b%b%06o\0 %b%b" % (
        name.ljust(MAX_NAME_BYTES, b"\0"),
        _MODE_UID_GID,
        octal,
        _MTIME,
        checksum,
        kind,
        _LINK_TO_END,
    )


def _encode_record(key: bytes, value: bytes) -> bytes:
    """Encode one PAX record, which starts with its own length, including the digits of that length."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %b=%b\n" % (length, key, value)
