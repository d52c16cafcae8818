from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from base64 import b64decode
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SourceError
from stoker.shards.formats import guess_format
from stoker.shards.formats.tfrecord import FORMAT
from stoker.shards.sample import Sample
from tests.shards.format_contract import MAGIC, SAMPLES, FormatContract, make_shard, read_samples, relaxed

JPEG = MAGIC["jpg"] + b"a picture"


class TestContract(FormatContract):
    format = FORMAT

    @relaxed
    @given(st.binary(max_size=200), st.integers(0, 200))
    def test_damage_inside_a_record_raises_source_errors_only(self, noise: bytes, offset: int) -> None:
        example = bytearray(make_shard(FORMAT, SAMPLES[1:2])[12:-4])
        example[offset : offset + len(noise) // 2] = noise
        self.check_only_source_errors(make_record(bytes(example)))


def masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def make_record(example: bytes) -> bytes:
    length = struct.pack("<Q", len(example))
    return length + masked_crc(length) + example + masked_crc(example)


def field(tag: int, payload: bytes) -> bytes:
    """Encode a length-delimited field, with its length in two bytes, which is valid but unusual."""
    return bytes([tag, len(payload) & 0x7F | 0x80, len(payload) >> 7]) + payload


def bytes_feature(*values: bytes) -> bytes:
    return field(0x0A, b"".join(field(0x0A, value) for value in values))


def example(**features: bytes) -> bytes:
    entries = (
        field(0x0A, field(0x12, feature) + field(0x0A, name.replace("__", "/").encode()))
        for name, feature in features.items()
    )
    return field(0x0A, b"".join(entries))


IMAGE: dict[str, bytes] = {"image__encoded": bytes_feature(JPEG)}
LABEL: dict[str, bytes] = {"image__class__label": b"\x1a\x02\x08\x05"}
UNKNOWN_FIELDS = b"\x50\x07" + b"\x59" + bytes(8) + b"\x65" + bytes(4) + field(0x7A, b"?") + b"\xa0\x06\x01"


def test_shard_names() -> None:
    assert FORMAT.shard_name("", "train", 7, 1024) == "train-00007-of-01024"
    assert FORMAT.shard_name("imagenet", "val", 0, 8) == "imagenet-val-00000-of-00008"
    for name in ("a/train-00007-of-01024", "x.tfrecord", "x.tfrecords", "x.tfrecord-00000-of-00001"):
        assert guess_format(name) == "tfrecord"
    assert guess_format("train-00007-of-01024.idx") is None


@pytest.mark.parametrize("label", [b"\x1a\x02\x08\x05", b"\x1a\x03\x0a\x01\x05", b"\x1a\x04\x08\x85\x80\x00"])
def test_label_may_be_packed_or_not(label: bytes) -> None:
    (sample,) = read_samples(FORMAT, make_record(example(**IMAGE, image__class__label=label)), check=True)
    assert sample.label == 5


def test_negative_label() -> None:
    (sample,) = read_samples(
        FORMAT, make_record(example(**IMAGE, image__class__label=b"\x1a\x0b\x08" + b"\xff" * 9 + b"\x01"))
    )
    assert sample.label == -1


def test_unknown_features_and_fields_are_skipped() -> None:
    features = example(
        image__height=b"\x1a\x02\x08\x05",
        **LABEL,
        image__colorspace=bytes_feature(b"RGB"),
        image__object__bbox__xmin=field(0x12, field(0x0A, bytes(8))),
        **IMAGE,
        empty=b"",
    )
    data = make_record(UNKNOWN_FIELDS + features + UNKNOWN_FIELDS)
    assert read_samples(FORMAT, data, check=True) == [Sample("shard/00000000", JPEG, "jpg", 5)]


@pytest.mark.parametrize(
    ("where", "stem"),
    [
        ("train-00000-of-00002", "train-00000-of-00002"),
        ("s3://bucket/a.b/train-0.tfrecord", "train-0"),
        ("x.tfrecord-00000-of-00001", "x.tfrecord-00000-of-00001"),
    ],
)
def test_key_without_file_name_is_shard_and_number(where: str, stem: str) -> None:
    data = make_record(example(**LABEL, **IMAGE))
    assert [located.sample.key for located in FORMAT.iter_samples(data * 2, where)] == [
        f"{stem}/00000000",
        f"{stem}/00000001",
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [("n01_5.JPEG", "n01_5"), ("a.b/c", "a.b/c"), ("a/b.c.jpg", "a/b.c"), ("a/.jpg", "a/.jpg"), ("", "")],
)
def test_key_is_the_file_name_without_extension(name: str, key: str) -> None:
    data = make_record(example(**LABEL, **IMAGE, image__filename=bytes_feature(name.encode())))
    assert read_samples(FORMAT, data)[0].key == key


@pytest.mark.parametrize(
    ("image", "features", "extension"),
    [
        (MAGIC["png"], {"image__format": b"JPEG", "image__filename": b"n02105855_2933.JPEG"}, "png"),
        (b"?", {"image__format": b"JPEG"}, "jpg"),
        (b"?", {"image__format": b"png", "image__filename": b"x.jpg"}, "png"),
        (b"?", {"image__format": b"odd", "image__filename": b"x.TIFF"}, "tif"),
    ],
)
def test_extension_is_detected_from_content_before_features(
    image: bytes, features: dict[str, bytes], extension: str
) -> None:
    texts = {name: bytes_feature(text) for name, text in features.items()}
    data = make_record(example(**LABEL, image__encoded=bytes_feature(image), **texts))
    assert read_samples(FORMAT, data)[0].extension == extension


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (example(**LABEL), ["no feature 'image/encoded'"]),
        (example(**IMAGE), ["no feature 'image/class/label'"]),
        (b"", ["no feature 'image/encoded'"]),
        (example(**LABEL, image__encoded=bytes_feature()), ["'image/encoded'", " 0 byte strings"]),
        (
            example(**LABEL, image__encoded=bytes_feature(JPEG, JPEG)),
            ["'image/encoded'", " 2 byte strings"],
        ),
        (
            example(**LABEL, image__encoded=LABEL["image__class__label"]),
            ["'image/encoded'", " 0 byte strings"],
        ),
        (
            example(**IMAGE, image__class__label=b"\x1a\x04\x0a\x02\x05\x05"),
            ["'image/class/label'", " 2 integers"],
        ),
        (example(**IMAGE, image__class__label=bytes_feature(b"5")), ["'image/class/label'", " 0 integers"]),
        (example(**LABEL, image__encoded=bytes_feature(b"?")), ["format of its image is unknown"]),
        (b"\x0b", ["wire type 3 near byte"]),
        (b"\x0a\x7f", ["127 bytes, near byte"]),
        (b"\x0a" + b"\xff" * 9 + b"\x7f", ["bytes, near byte"]),
        (b"\xff" * 30, ["unterminated number at byte"]),
        (b"\x59\x00", ["7 bytes, near byte"]),
    ],
)
def test_errors_name_shard_record_and_offset(record: bytes, parts: list[str]) -> None:
    good = make_record(example(**LABEL, **IMAGE))
    with pytest.raises(SourceError, match=rf"record 1 at byte {len(good)}: ") as caught:
        list(FORMAT.iter_samples(good + make_record(record), "train-00000-of-00001", check=True))
    assert caught.value.where == "train-00000-of-00001"
    assert all(part in caught.value.what for part in parts), caught.value.what


def test_truncation_names_record_and_offset() -> None:
    data = make_record(example(**LABEL, **IMAGE))
    with pytest.raises(SourceError, match=r"truncated at byte 5: record 0 at byte 0 .*length"):
        read_samples(FORMAT, data[:5])
    with pytest.raises(SourceError, match=f"truncated at byte 40: record 0 at byte 0 .*{len(data) - 16} bytes"):
        read_samples(FORMAT, data[:40])


def test_check_detects_every_flipped_bit() -> None:
    data = make_shard(FORMAT, [Sample("a", JPEG, "jpg", 1)])
    for offset in range(len(data)):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(SourceError, match=r"record 0 at byte 0: .*checksum"):
            read_samples(FORMAT, bytes(damaged), check=True)
        with pytest.raises(SourceError, match="checksum"):
            FORMAT.parse_sample(bytes(damaged), "span", check=True)


def test_hostile_length_allocates_nothing() -> None:
    length = struct.pack("<Q", (1 << 64) - 20)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=r"\b18446744073709551596 bytes"):
            read_samples(FORMAT, length + masked_crc(length) + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("label", [1 << 63, -(1 << 63) - 1])
def test_labels_beyond_int64_are_rejected(label: int) -> None:
    with pytest.raises(SourceError, match=str(label)):
        FORMAT.encode(Sample("a", JPEG, "jpg", label))


def test_key_of_a_folder_is_rejected() -> None:
    with pytest.raises(SourceError, match="'folder/'"):
        FORMAT.encode(Sample("folder/", JPEG, "jpg", 1))


WITH_TENSORFLOW = """
import base64, json, sys
import tensorflow as tf

ours, theirs, results = sys.argv[1:]
text = lambda value: base64.b64encode(value).decode()
features = {
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/filename": tf.io.FixedLenFeature([], tf.string),
    "image/format": tf.io.FixedLenFeature([], tf.string),
    "member/json": tf.io.FixedLenFeature([], tf.string, default_value=""),
}
rows = []
for record in tf.data.TFRecordDataset(ours).as_numpy_iterator():
    parsed = tf.io.parse_single_example(record, features)
    rows.append(
        {
            "label": int(parsed["image/class/label"]),
            "image": text(parsed["image/encoded"].numpy()),
            "file": text(parsed["image/filename"].numpy()),
            "format": text(parsed["image/format"].numpy()),
            "json": text(parsed["member/json"].numpy()),
            "same": tf.train.Example.FromString(record).SerializeToString(deterministic=True) == record,
        }
    )
with open(results, "w") as file:
    json.dump(rows, file)

of_bytes = lambda *values: tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
of_ints = lambda *values: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
of_floats = lambda *values: tf.train.Feature(float_list=tf.train.FloatList(value=values))
with tf.io.TFRecordWriter(theirs) as writer:
    for number in range(4):
        features = {
            "image/encoded": of_bytes(b"\\xff\\xd8\\xff" + bytes([number]) * 300 * number),
            "image/class/label": of_ints(number - 1),
            "image/height": of_ints(3, 4, 5),
            "image/object/bbox/xmin": of_floats(0.5, 0.25),
            "image/class/synset": of_bytes(b"n01440764"),
        }
        if number % 2:
            features["image/filename"] = of_bytes(b"n01440764_%d.JPEG" % number)
        writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
"""


@pytest.fixture(scope="module")
def tensorflow_results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], bytes]:
    """Return what TensorFlow read from our shard, and a shard that it wrote; in a subprocess, because it warns."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed; pip install 'path/to/stoker[dev]'")
    folder = tmp_path_factory.mktemp("tensorflow")
    ours, theirs, results = (folder / name for name in ("ours", "theirs", "results.json"))
    ours.write_bytes(make_shard(FORMAT, SAMPLES))
    subprocess.run(
        [sys.executable, "-c", WITH_TENSORFLOW, *map(str, (ours, theirs, results))],
        check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    return json.loads(Path(results).read_text()), theirs.read_bytes()


def test_tensorflow_reads_our_shards(tensorflow_results: tuple[list[dict[str, Any]], bytes]) -> None:
    formats = {"jpg": b"JPEG", "png": b"PNG", "webp": b"WEBP"}
    rows = tensorflow_results[0]
    assert len(rows) == len(SAMPLES)
    for sample, row in zip(SAMPLES, rows, strict=True):
        assert row["label"] == sample.label
        assert b64decode(row["image"]) == sample.image
        assert b64decode(row["file"]).decode() == f"{sample.key}.{sample.extension}"
        assert b64decode(row["format"]) == formats[sample.extension]
        assert b64decode(row["json"]) == sample.extras.get("json", b"")
        assert row["same"], "TensorFlow would write other bytes for the same Example"


def test_reads_records_of_tensorflow(tensorflow_results: tuple[list[dict[str, Any]], bytes]) -> None:
    assert read_samples(FORMAT, tensorflow_results[1], check=True) == [
        Sample(key, b"\xff\xd8\xff" + bytes([number]) * 300 * number, "jpg", number - 1)
        for number, key in enumerate(["shard/00000000", "n01440764_1", "shard/00000002", "n01440764_3"])
    ]
