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
from tests.shards.format_contract import MAGIC, SAMPLES, FormatContract, lax, read, shard_of

JPEG = MAGIC["jpg"] + b"a picture"


class TestContract(FormatContract):
    format = FORMAT

    @lax
    @given(st.binary(max_size=200), st.integers(0, 200))
    def test_damage_inside_a_record_raises_source_errors_only(self, noise: bytes, at: int) -> None:
        example = bytearray(shard_of(FORMAT, SAMPLES[1:2])[12:-4])
        example[at : at + len(noise) // 2] = noise
        self.survives(framed(bytes(example)))


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(example: bytes) -> bytes:
    length = struct.pack("<Q", len(example))
    return length + masked(length) + example + masked(example)


def field(tag: int, payload: bytes) -> bytes:
    """A length-delimited field; its length as a two-byte number, which is legal and unusual."""
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


def test_names() -> None:
    assert FORMAT.shard_name("", "train", 7, 1024) == "train-00007-of-01024"
    assert FORMAT.shard_name("imagenet", "val", 0, 8) == "imagenet-val-00000-of-00008"
    for name in ("a/train-00007-of-01024", "x.tfrecord", "x.tfrecords", "x.tfrecord-00000-of-00001"):
        assert guess_format(name) == "tfrecord"
    assert guess_format("train-00007-of-01024.idx") is None


@pytest.mark.parametrize("label", [b"\x1a\x02\x08\x05", b"\x1a\x03\x0a\x01\x05", b"\x1a\x04\x08\x85\x80\x00"])
def test_integers_packed_and_not(label: bytes) -> None:
    (sample,) = read(FORMAT, framed(example(**IMAGE, image__class__label=label)), check=True)
    assert sample.label == 5


def test_a_negative_label() -> None:
    (sample,) = read(FORMAT, framed(example(**IMAGE, image__class__label=b"\x1a\x0b\x08" + b"\xff" * 9 + b"\x01")))
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
    data = framed(UNKNOWN_FIELDS + features + UNKNOWN_FIELDS)
    assert read(FORMAT, data, check=True) == [Sample("shard/00000000", JPEG, "jpg", 5)]


@pytest.mark.parametrize(
    ("where", "stem"),
    [
        ("train-00000-of-00002", "train-00000-of-00002"),
        ("s3://bucket/a.b/train-0.tfrecord", "train-0"),
        ("x.tfrecord-00000-of-00001", "x.tfrecord-00000-of-00001"),
    ],
)
def test_a_record_without_a_file_name_is_known_by_its_shard_and_number(where: str, stem: str) -> None:
    data = framed(example(**LABEL, **IMAGE))
    assert [found.sample.key for found in FORMAT.iter_samples(data * 2, where)] == [
        f"{stem}/00000000",
        f"{stem}/00000001",
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [("n01_5.JPEG", "n01_5"), ("a.b/c", "a.b/c"), ("a/b.c.jpg", "a/b.c"), ("a/.jpg", "a/.jpg"), ("", "")],
)
def test_the_key_is_the_file_name_without_its_extension(name: str, key: str) -> None:
    data = framed(example(**LABEL, **IMAGE, image__filename=bytes_feature(name.encode())))
    assert read(FORMAT, data)[0].key == key


@pytest.mark.parametrize(
    ("image", "features", "kind"),
    [
        (MAGIC["png"], {"image__format": b"JPEG", "image__filename": b"n02105855_2933.JPEG"}, "png"),
        (b"?", {"image__format": b"JPEG"}, "jpg"),
        (b"?", {"image__format": b"png", "image__filename": b"x.jpg"}, "png"),
        (b"?", {"image__format": b"odd", "image__filename": b"x.TIFF"}, "tif"),
    ],
)
def test_the_bytes_of_an_image_say_best_what_it_is(image: bytes, features: dict[str, bytes], kind: str) -> None:
    texts = {name: bytes_feature(text) for name, text in features.items()}
    data = framed(example(**LABEL, image__encoded=bytes_feature(image), **texts))
    assert read(FORMAT, data)[0].extension == kind


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(**LABEL), "it has no feature 'image/encoded'"),
        (example(**IMAGE), "it has no feature 'image/class/label'"),
        (b"", "it has no feature 'image/encoded'"),
        (example(**LABEL, image__encoded=bytes_feature()), "'image/encoded' holds 0 byte strings, not 1"),
        (
            example(**LABEL, image__encoded=bytes_feature(JPEG, JPEG)),
            "'image/encoded' holds 2 byte strings, not 1",
        ),
        (
            example(**LABEL, image__encoded=LABEL["image__class__label"]),
            "'image/encoded' holds 0 byte strings",
        ),
        (
            example(**IMAGE, image__class__label=b"\x1a\x04\x0a\x02\x05\x05"),
            "'image/class/label' holds 2 integers",
        ),
        (example(**IMAGE, image__class__label=bytes_feature(b"5")), "'image/class/label' holds 0 integers"),
        (example(**LABEL, image__encoded=bytes_feature(b"?")), "its image is of no known format"),
        (b"\x0b", "a field of wire type 3"),
        (b"\x0a\x7f", "a field that ends 127 bytes too late"),
        (b"\x0a" + b"\xff" * 9 + b"\x7f", "a field that ends .* bytes too late"),
        (b"\xff" * 30, "a number without an end"),
        (b"\x59\x00", "a field that ends 7 bytes too late"),
    ],
)
def test_faults_say_what_and_where(record: bytes, message: str) -> None:
    good = framed(example(**LABEL, **IMAGE))
    where = rf"^train-00000-of-00001: record 1 at byte {len(good)}: .*{message}"
    with pytest.raises(SourceError, match=where):
        list(FORMAT.iter_samples(good + framed(record), "train-00000-of-00001", check=True))


def test_truncation_says_where() -> None:
    data = framed(example(**LABEL, **IMAGE))
    with pytest.raises(SourceError, match="truncated at byte 5: record 0 at byte 0 has no length"):
        read(FORMAT, data[:5])
    with pytest.raises(SourceError, match=f"truncated at byte 40: record 0 at byte 0 wants {len(data) - 16} bytes"):
        read(FORMAT, data[:40])


def test_a_check_notices_every_flipped_bit() -> None:
    data = shard_of(FORMAT, [Sample("a", JPEG, "jpg", 1)])
    for at in range(len(data)):
        hurt = bytearray(data)
        hurt[at] ^= 1 << at % 8
        with pytest.raises(SourceError, match=r"record 0 at byte 0: its (length|data) do(es)? not match"):
            read(FORMAT, bytes(hurt), check=True)
        with pytest.raises(SourceError, match=r"its (length|data) do(es)? not match"):
            FORMAT.parse_sample(bytes(hurt), "span", check=True)


def test_a_hostile_length_allocates_nothing() -> None:
    length = struct.pack("<Q", (1 << 64) - 20)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="wants 18446744073709551596 bytes"):
            read(FORMAT, length + masked(length) + bytes(100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("label", [1 << 63, -(1 << 63) - 1])
def test_refuses_labels_beyond_int64(label: int) -> None:
    with pytest.raises(SourceError, match="cannot hold the label"):
        FORMAT.encode(Sample("a", JPEG, "jpg", label))


def test_refuses_a_key_that_would_not_come_back() -> None:
    with pytest.raises(SourceError, match="cannot hold"):
        FORMAT.encode(Sample("folder/", JPEG, "jpg", 1))


WITH_TENSORFLOW = """
import base64, json, sys
import tensorflow as tf

ours, theirs, answers = sys.argv[1:]
text = lambda value: base64.b64encode(value).decode()
wanted = {
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/filename": tf.io.FixedLenFeature([], tf.string),
    "image/format": tf.io.FixedLenFeature([], tf.string),
    "member/json": tf.io.FixedLenFeature([], tf.string, default_value=""),
}
found = []
for record in tf.data.TFRecordDataset(ours).as_numpy_iterator():
    parsed = tf.io.parse_single_example(record, wanted)
    found.append(
        {
            "label": int(parsed["image/class/label"]),
            "image": text(parsed["image/encoded"].numpy()),
            "file": text(parsed["image/filename"].numpy()),
            "format": text(parsed["image/format"].numpy()),
            "json": text(parsed["member/json"].numpy()),
            "same": tf.train.Example.FromString(record).SerializeToString(deterministic=True) == record,
        }
    )
with open(answers, "w") as file:
    json.dump(found, file)

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
def tensorflow_says(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], bytes]:
    """What TensorFlow found in our shard, and a shard that it wrote; in a process of its own: it warns."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow is not installed; pip install 'stoker[dev]'")
    folder = tmp_path_factory.mktemp("tensorflow")
    ours, theirs, answers = (folder / name for name in ("ours", "theirs", "answers.json"))
    ours.write_bytes(shard_of(FORMAT, SAMPLES))
    subprocess.run(
        [sys.executable, "-c", WITH_TENSORFLOW, *map(str, (ours, theirs, answers))],
        check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    return json.loads(Path(answers).read_text()), theirs.read_bytes()


def test_tensorflow_reads_ours(tensorflow_says: tuple[list[dict[str, Any]], bytes]) -> None:
    formats = {"jpg": b"JPEG", "png": b"PNG", "webp": b"WEBP"}
    found = tensorflow_says[0]
    assert len(found) == len(SAMPLES)
    for sample, theirs in zip(SAMPLES, found, strict=True):
        assert theirs["label"] == sample.label
        assert b64decode(theirs["image"]) == sample.image
        assert b64decode(theirs["file"]).decode() == f"{sample.key}.{sample.extension}"
        assert b64decode(theirs["format"]) == formats[sample.extension]
        assert b64decode(theirs["json"]) == sample.extras.get("json", b"")
        assert theirs["same"], "TensorFlow would write other bytes for the same Example"


def test_we_read_what_tensorflow_wrote(tensorflow_says: tuple[list[dict[str, Any]], bytes]) -> None:
    assert read(FORMAT, tensorflow_says[1], check=True) == [
        Sample(key, b"\xff\xd8\xff" + bytes([number]) * 300 * number, "jpg", number - 1)
        for number, key in enumerate(["shard/00000000", "n01440764_1", "shard/00000002", "n01440764_3"])
    ]
