"""TFRecord shards of `tf.train.Example`s, with the feature names that ImageNet scripts use.

A record is a length, the length's checksum, an Example and its checksum. The Example, a few nested
protocol-buffer messages, is written and read by hand: a generated parser would copy every image.
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

# Field numbers with their wire types: in Example, Features, its map's entries, Feature and every list alike.
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
        """`PREFIX-train-00000-of-01024`."""
        return f"{prefix}{'-' if prefix else ''}{split}-{number:05d}-of-{total:05d}"

    def check_key(self, key: str) -> None:
        """Refuse what is no file name without its extension; any other text will do."""
        if not key or key.endswith("/"):
            raise SourceError(f"a TFRecord cannot hold a sample with key {key!r}")
        _encoded(key)

    def encode(self, sample: Sample) -> EncodedSample:
        """Features in the order of their names, which is how a deterministic TensorFlow writes them."""
        key, image, kind, label, extras = sample
        self.check_key(key)
        if kind not in _FORMAT_NAMES:
            raise SourceError(f"a TFRecord cannot hold a sample of kind {kind!r}")
        file_name = _encoded(f"{key}.{kind}")
        members = sorted((MEMBER + _encoded(extension), data) for extension, data in extras.items())
        size = len(image)
        head = _label_feature(label) + _bytes_head(IMAGE, size)
        rest: list[Buffer] = [_bytes_head(FILE_NAME, len(file_name)), file_name, _format_feature(kind)]
        for name, data in members:
            rest += _bytes_head(name, len(data)), data
        tail = b"".join(rest)
        head = b"\x0a" + varint(len(head) + size + len(tail)) + head
        length = len(head) + size + len(tail)
        prefix = length.to_bytes(8, "little")
        framed = prefix + _masked(_extend(0, prefix)) + head
        checksum = _masked(_extend(_extend(_extend(0, head), image), tail))
        return EncodedSample([framed, image, tail + checksum], length + 16, len(framed))

    def iter_samples(
        self, data: Buffer, where: str, *, check: bool = False, errors: list[SourceError] | None = None
    ) -> Iterator[LocatedSample]:
        """Every record; a length is always checked, the rest of a record when `check` says so.

        A record without a file name is known by its shard and number: `train-00000-of-00002/00000000`.
        """
        view = memoryview(data)
        stem = _SUFFIX.sub("", where.rpartition("/")[2])
        total = len(view)
        at = number = 0
        while at < total:
            if at + 12 > total:
                raise SourceError(f"truncated at byte {total}: record {number} at byte {at} has no length", where=where)
            size, checksum = _LENGTH.unpack_from(view, at)
            if checksum != _mask(_extend(0, view[at : at + 8].tobytes())):
                raise SourceError(f"record {number} at byte {at}: its length does not match its checksum", where=where)
            start, end = at + 12, at + 12 + size
            if end + 4 > total:
                raise SourceError(
                    f"truncated at byte {total}: record {number} at byte {at} wants {size} bytes", where=where
                )
            try:
                if check and _CRC.unpack_from(view, end)[0] != _mask(_extend(0, view[start:end])):
                    raise _ExampleError("its data do not match their checksum")
                image_at, sample = _sample(view, start, end, f"{stem}/{number:08d}")
            except _ExampleError as error:
                fault = SourceError(f"record {number} at byte {at}: {error}", where=where)
                if errors is None:
                    raise fault from None
                errors.append(fault)
            else:
                yield LocatedSample(at, end + 4, image_at, sample)
            at = end + 4
            number += 1

    def parse_sample(self, data: Buffer, where: str, *, check: bool = False) -> Sample:
        """The one record in these bytes; without a file name in it, its key is that of record 0."""
        samples = [found.sample for found in self.iter_samples(data, where, check=check)]
        if len(samples) != 1:
            raise SourceError(f"expected the bytes of 1 record, found {len(samples)}", where=where)
        return samples[0]


FORMAT = TFRecord()


class _ExampleError(Exception):
    """What is wrong with a record; `walk` adds where."""


def _sample(view: memoryview, at: int, end: int, key: str) -> tuple[int, Sample]:
    """Where an Example's image starts, and the sample; it has this key if no file name gives it another."""
    features: dict[bytes, tuple[int, int]] = {}
    members: dict[str, tuple[int, int]] = {}
    for name, start, stop in _features(view, at, end):
        if name.startswith(b"image/"):
            features[name] = start, stop
        elif name.startswith(MEMBER):
            members[name[len(MEMBER) :].decode("utf-8", "surrogateescape")] = start, stop
    start, stop = _only_bytes(view, IMAGE, features.get(IMAGE))
    image = view[start:stop]
    label = _only_int(view, LABEL, features.get(LABEL))
    extension = ""
    if FILE_NAME in features:
        text = _text(view, FILE_NAME, features[FILE_NAME])
        folder, slash, file = text.rpartition("/")
        stem, dot, extension = file.rpartition(".")
        key = folder + slash + stem if dot and stem else text
    kind = sniff(image)
    if kind is None and FILE_FORMAT in features:
        kind = CANONICAL_EXTENSIONS.get(_text(view, FILE_FORMAT, features[FILE_FORMAT]).lower())
    kind = kind or CANONICAL_EXTENSIONS.get(extension.lower())
    if kind is None:
        raise _ExampleError("its image is of no known format")
    extras = NO_EXTRAS
    if members:
        spans = {name: _only_bytes(view, name.encode("utf-8", "surrogateescape"), members[name]) for name in members}
        extras = {name: view[first:last] for name, (first, last) in spans.items()}
    return start, Sample(key, image, kind, label, extras)


def _features(view: memoryview, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Every entry of the map `Example.features.feature`: its name and where its Feature lies."""
    for tag, start, stop in _fields(view, at, end):
        if tag != _FIELD_1:
            continue
        for entry_tag, entry_start, entry_stop in _fields(view, start, stop):
            if entry_tag != _FIELD_1:
                continue
            name, feature = b"", (entry_stop, entry_stop)
            for part, first, last in _fields(view, entry_start, entry_stop):
                if part == _FIELD_1:
                    name = view[first:last].tobytes()
                elif part == _FIELD_2:
                    feature = first, last
            yield name, *feature


def _only_bytes(view: memoryview, name: bytes, feature: tuple[int, int] | None) -> tuple[int, int]:
    """Where the one value of a bytes feature lies."""
    if feature is None:
        raise _ExampleError(f"it has no feature {name.decode()!r}")
    values = [
        (start, stop)
        for kind, at, end in _fields(view, *feature)
        if kind == _FIELD_1
        for tag, start, stop in _fields(view, at, end)
        if tag == _FIELD_1
    ]
    if len(values) != 1:
        raise _ExampleError(f"its feature {name.decode(errors='replace')!r} holds {len(values)} byte strings, not 1")
    return values[0]


def _only_int(view: memoryview, name: bytes, feature: tuple[int, int] | None) -> int:
    """The one value of an int64 feature, packed or not."""
    if feature is None:
        raise _ExampleError(f"it has no feature {name.decode()!r}")
    values = []
    for kind, at, end in _fields(view, *feature):
        if kind != _FIELD_3:
            continue
        for tag, start, stop in _fields(view, at, end):
            while tag in (_FIELD_1, _FIELD_1_VARINT) and start < stop:
                value, start = _read_varint(view, start, stop)
                values.append(value)
    if len(values) != 1:
        raise _ExampleError(f"its feature {name.decode()!r} holds {len(values)} integers, not 1")
    value = values[0] & (2 * _INT64 - 1)
    return value - 2 * _INT64 if value >= _INT64 else value


def _text(view: memoryview, name: bytes, feature: tuple[int, int]) -> str:
    start, stop = _only_bytes(view, name, feature)
    return view[start:stop].tobytes().decode("utf-8", "surrogateescape")


def _fields(view: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Every field of a protocol-buffer message: its tag, and where its value starts and stops."""
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
            raise _ExampleError(f"its Example has a field of wire type {wire_type} near byte {at}")
        if stop > end:
            raise _ExampleError(f"its Example has a field that ends {stop - end} bytes too late, near byte {at}")
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
    raise _ExampleError(f"its Example has a number without an end at byte {at}")


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise SourceError(f"a TFRecord cannot hold the name {text!r}") from None


def record(data: bytes) -> bytes:
    """Frame any bytes as one record: length, its checksum, the bytes, and theirs."""
    prefix = len(data).to_bytes(8, "little")
    return prefix + _masked(_extend(0, prefix)) + data + _masked(_extend(0, data))


def varint(value: int) -> bytes:
    """Write a number as protocol buffers do."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_head(name: bytes, size: int) -> bytes:
    """All that stands before the value of a bytes feature of `size` bytes, from its map entry inwards."""
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
        raise SourceError(f"a TFRecord cannot hold the label {label}")
    value = varint(label % (2 * _INT64))
    value = b"\x0a" + varint(len(value)) + value
    value = b"\x1a" + varint(len(value)) + value
    return _entry_head(LABEL, len(value)) + value


def _extend(crc: int, data: Buffer) -> int:
    # google_crc32c refuses bytearrays and memoryviews, but takes an array over the same memory: no copy.
    chunk: Any = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(crc, chunk))


def _mask(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _masked(crc: int) -> bytes:
    return _CRC.pack(_mask(crc))
