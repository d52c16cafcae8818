"""TFRecord shards of `tf.train.Example` messages, with the feature names of the usual ImageNet scripts.

A record consists of a length, the checksum of the length, an Example and its checksum. The Example, a few nested
protocol-buffer messages, is encoded and parsed here: a generated parser would copy every image.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import google_crc32c
import numpy as np

from stoker.errors import SourceError
from stoker.shards.formats import CANONICAL_EXTENSIONS, EncodedSample, LocatedSample
from stoker.shards.images import sniff
from stoker.shards.sample import NO_EXTRAS, Buffer, Sample

LABEL = b"image/class/label"
IMAGE = b"image/encoded"
FILE_NAME = b"image/filename"
FILE_FORMAT = b"image/format"
MEMBER = b"member/"

_LENGTH = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK = 0xA282EAD8
_INT64 = 1 << 63
_SUFFIX = re.compile(r"\.tfrecords?$")

# Field numbers with wire types; the same in Example, Features, its map entries, Feature and all lists.
_FIELD_1, _FIELD_2, _FIELD_3 = 0x0A, 0x12, 0x1A
_FIELD_1_VARINT = 0x08

_FORMAT_NAMES = {
    "jpg": b"JPEG",
    "png": b"PNG",
    "webp": b"WEBP",
    "bmp": b"BMP",
    "gif": b"GIF",
    "tif": b"TIFF",
    "ppm": b"PPM",
}


class TFRecord:
    """The TFRecord format."""

    name = "tfrecord"
    trailer = b""
    overhead = 160

    def shard_name(self, prefix: str, split: str, number: int, total: int) -> str:
        """Return `PREFIX-train-00000-of-01024`."""
        return f"{prefix}{'-' if prefix else ''}{split}-{number:05d}-of-{total:05d}"

    def check_key(self, key: str) -> None:
        """Raise SourceError for an empty key, a folder, or text that cannot be encoded."""
        if not key or key.endswith("/"):
            raise SourceError(f"a TFRecord cannot store a sample with key {key!r}")
        _encode_text(key)

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode the features in the order of their names, as TensorFlow does in deterministic mode."""
        key, image, extension, label, extras = sample
        self.check_key(key)
        if extension not in _FORMAT_NAMES:
            raise SourceError(f"a TFRecord cannot store an image with extension {extension!r}")
        file_name = _encode_text(f"{key}.{extension}")
        members = sorted((MEMBER + _encode_text(name), data) for name, data in extras.items())
        size = len(image)
        head = _label_feature(label) + _bytes_head(IMAGE, size)
        rest: list[Buffer] = [_bytes_head(FILE_NAME, len(file_name)), file_name, _format_feature(extension)]
        for name, data in members:
            rest += _bytes_head(name, len(data)), data
        tail = b"".join(rest)
        head = b"\x0a" + varint(len(head) + size + len(tail)) + head
        length = len(head) + size + len(tail)
        prefix = length.to_bytes(8, "little")
        framed = prefix + _masked_bytes(_crc32c(0, prefix)) + head
        checksum = _masked_bytes(_crc32c(_crc32c(_crc32c(0, head), image), tail))
        return EncodedSample([framed, image, tail + checksum], length + 16, len(framed))

    def iter_samples(
        self, data: Buffer, where: str, *, check: bool = False, errors: list[SourceError] | None = None
    ) -> Iterator[LocatedSample]:
        """Yield every record; the checksum of the length is always verified, that of the data with `check`.

        The key of a record without a file name is its shard and number: `train-00000-of-00002/00000000`.
        """
        view = memoryview(data)
        stem = _SUFFIX.sub("", where.rpartition("/")[2])
        total = len(view)
        at = number = 0
        while at < total:
            if at + 12 > total:
                raise SourceError(
                    f"truncated at byte {total}: record {number} at byte {at} has no complete length", where=where
                )
            size, checksum = _LENGTH.unpack_from(view, at)
            if checksum != _mask_crc(_crc32c(0, view[at : at + 8].tobytes())):
                raise SourceError(f"record {number} at byte {at}: the length does not match its checksum", where=where)
            start, end = at + 12, at + 12 + size
            if end + 4 > total:
                raise SourceError(
                    f"truncated at byte {total}: record {number} at byte {at} needs {size} bytes", where=where
                )
            try:
                if check and _CRC.unpack_from(view, end)[0] != _mask_crc(_crc32c(0, view[start:end])):
                    raise _ExampleError("the data does not match its checksum")
                image_at, sample = _parse_example(view, start, end, f"{stem}/{number:08d}")
            except _ExampleError as error:
                invalid = SourceError(f"record {number} at byte {at}: {error}", where=where)
                if errors is None:
                    raise invalid from None
                errors.append(invalid)
            else:
                yield LocatedSample(at, end + 4, image_at, sample)
            at = end + 4
            number += 1

    def parse_sample(self, data: Buffer, where: str, *, check: bool = False) -> Sample:
        """Parse the bytes of exactly one record; without a file name, its key is that of record 0."""
        samples = [located.sample for located in self.iter_samples(data, where, check=check)]
        if len(samples) != 1:
            raise SourceError(f"expected the bytes of 1 record, found {len(samples)}", where=where)
        return samples[0]


FORMAT = TFRecord()


class _ExampleError(Exception):
    """The fault of one record; `iter_samples` adds its location."""


def _parse_example(view: memoryview, at: int, end: int, key: str) -> tuple[int, Sample]:
    """Parse an Example; return the offset of its image, and the sample. `key` is used if it has no file name."""
    features: dict[bytes, tuple[int, int]] = {}
    members: dict[str, tuple[int, int]] = {}
    for name, start, stop in _iter_features(view, at, end):
        if name.startswith(b"image/"):
            features[name] = start, stop
        elif name.startswith(MEMBER):
            members[name[len(MEMBER) :].decode("utf-8", "surrogateescape")] = start, stop
    start, stop = _single_bytes(view, IMAGE, features.get(IMAGE))
    image = view[start:stop]
    label = _single_int(view, LABEL, features.get(LABEL))
    suffix = ""
    if FILE_NAME in features:
        text = _read_text(view, FILE_NAME, features[FILE_NAME])
        folder, slash, file = text.rpartition("/")
        stem, dot, suffix = file.rpartition(".")
        key = folder + slash + stem if dot and stem else text
    extension = sniff(image)
    if extension is None and FILE_FORMAT in features:
        extension = CANONICAL_EXTENSIONS.get(_read_text(view, FILE_FORMAT, features[FILE_FORMAT]).lower())
    extension = extension or CANONICAL_EXTENSIONS.get(suffix.lower())
    if extension is None:
        raise _ExampleError("the format of its image is unknown")
    extras = NO_EXTRAS
    if members:
        spans = {name: _single_bytes(view, name.encode("utf-8", "surrogateescape"), members[name]) for name in members}
        extras = {name: view[first:last] for name, (first, last) in spans.items()}
    return start, Sample(key, image, extension, label, extras)


def _iter_features(view: memoryview, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield every entry of the map `Example.features.feature`: its name, and the start and end of its Feature."""
    for tag, start, stop in _iter_fields(view, at, end):
        if tag != _FIELD_1:
            continue
        for entry_tag, entry_start, entry_stop in _iter_fields(view, start, stop):
            if entry_tag != _FIELD_1:
                continue
            name, feature = b"", (entry_stop, entry_stop)
            for part, first, last in _iter_fields(view, entry_start, entry_stop):
                if part == _FIELD_1:
                    name = view[first:last].tobytes()
                elif part == _FIELD_2:
                    feature = first, last
            yield name, *feature


def _single_bytes(view: memoryview, name: bytes, feature: tuple[int, int] | None) -> tuple[int, int]:
    """Return the start and end of the single value of a bytes feature."""
    if feature is None:
        raise _ExampleError(f"it has no feature {name.decode()!r}")
    values = [
        (start, stop)
        for kind, at, end in _iter_fields(view, *feature)
        if kind == _FIELD_1
        for tag, start, stop in _iter_fields(view, at, end)
        if tag == _FIELD_1
    ]
    if len(values) != 1:
        raise _ExampleError(f"its feature {name.decode(errors='replace')!r} has {len(values)} byte strings, expected 1")
    return values[0]


def _single_int(view: memoryview, name: bytes, feature: tuple[int, int] | None) -> int:
    """Return the single value of an int64 feature, packed or not."""
    if feature is None:
        raise _ExampleError(f"it has no feature {name.decode()!r}")
    values = []
    for kind, at, end in _iter_fields(view, *feature):
        if kind != _FIELD_3:
            continue
        for tag, start, stop in _iter_fields(view, at, end):
            while tag in (_FIELD_1, _FIELD_1_VARINT) and start < stop:
                value, start = _read_varint(view, start, stop)
                values.append(value)
    if len(values) != 1:
        raise _ExampleError(f"its feature {name.decode()!r} has {len(values)} integers, expected 1")
    value = values[0] & (2 * _INT64 - 1)
    return value - 2 * _INT64 if value >= _INT64 else value


def _read_text(view: memoryview, name: bytes, feature: tuple[int, int]) -> str:
    start, stop = _single_bytes(view, name, feature)
    return view[start:stop].tobytes().decode("utf-8", "surrogateescape")


def _iter_fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield every field of a protocol-buffer message: its tag, and the start and end of its value."""
    while at < end:
        tag = view[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _read_varint(view, at, end)
        wire_type = tag & 7
        if wire_type == 2:
            if at < end and view[at] < 0x80:
                stop = at + 1 + view[at]
                at += 1
            else:
                size, at = _read_varint(view, at, end)
                stop = at + size
        elif wire_type == 0:
            _, stop = _read_varint(view, at, end)
        elif wire_type == 1:
            stop = at + 8
        elif wire_type == 5:
            stop = at + 4
        else:
            raise _ExampleError(f"its Example has a field of unknown wire type {wire_type} near byte {at}")
        if stop > end:
            raise _ExampleError(f"its Example has a field that exceeds it by {stop - end} bytes, near byte {at}")
        yield tag, at, stop
        at = stop


def _read_varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    for position in range(at, min(end, at + 10)):
        byte = view[position]
        if byte < 0x80:
            return value | byte << shift, position + 1
        value |= (byte & 0x7F) << shift
        shift += 7
    raise _ExampleError(f"its Example has an unterminated number at byte {at}")


def _encode_text(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SourceError(f"a TFRecord cannot store the name {text!r}") from None


def record(data: bytes) -> bytes:
    """Encode bytes as one record: length, checksum of the length, data, checksum of the data."""
    prefix = len(data).to_bytes(8, "little")
    return prefix + _masked_bytes(_crc32c(0, prefix)) + data + _masked_bytes(_crc32c(0, data))


def varint(value: int) -> bytes:
    """Encode a number as a protocol-buffer varint."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_head(name: bytes, size: int) -> bytes:
    """Encode everything before the value of a bytes feature of `size` bytes, starting with its map entry."""
    head = b"\x0a" + varint(size)
    head = b"\x0a" + varint(len(head) + size) + head
    return _entry_head(name, len(head) + size) + head


def _entry_head(name: bytes, size: int) -> bytes:
    head = b"\x0a" + varint(len(name)) + name + b"\x12" + varint(size)
    return b"\x0a" + varint(len(head) + size) + head


@cache
def _format_feature(kind: str) -> bytes:
    text = _FORMAT_NAMES[kind]
    return _bytes_head(FILE_FORMAT, len(text)) + text


@lru_cache(4096)
def _label_feature(label: int) -> bytes:
    if not -_INT64 <= label < _INT64:
        raise SourceError(f"a TFRecord cannot store the label {label}")
    value = varint(label % (2 * _INT64))
    value = b"\x0a" + varint(len(value)) + value
    value = b"\x1a" + varint(len(value)) + value
    return _entry_head(LABEL, len(value)) + value


def _crc32c(crc: int, data: Buffer) -> int:
    # google_crc32c does not accept bytearrays and memoryviews, but an array over the same memory: no copy.
    chunk: Any = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(crc, chunk))


def _mask_crc(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _masked_bytes(crc: int) -> bytes:
    return _CRC.pack(_mask_crc(crc))
