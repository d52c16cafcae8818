"""TFRecord shards: any bytes may stand in a shard of a foreign set."""

from __future__ import annotations

from functools import partial

from stoker.shards.formats.tfrecord import FORMAT, record, varint
from tests.fuzz.limits import Target
from tests.fuzz.shards import read_twice
from tests.shards.format_contract import SAMPLES, make_shard

VALID = make_shard(FORMAT, SAMPLES)
TARGET = Target(
    partial(read_twice, FORMAT),
    valid=[VALID],
    hostile=[
        b"",
        b"\0" * 12,
        b"\0" * 1_000_000,
        b"\xff" * 1024,
        VALID[:20],
        VALID[:-1],
        (2**63).to_bytes(8, "little") + VALID[8:],
        (2**40).to_bytes(8, "little") + VALID[8:],
        record(b""),
        record(b"\x0a" + varint(2**40)),
        record(b"\x0a" + varint(2**64 - 1)),
        record(b"\xff" * 30),
        record(b"\x0a\x02\x0a" + b"\x80" * 20),
        record(b"\x0b" * 100_000),
        record(b"\x0a\x00" * 100_000),
        b"".join(record(b"\x0a\x00") for _ in range(20_000)),
    ],
    tokens=[b"image/encoded", b"image/class/label", b"\x0a", b"\x12", b"\x1a", varint(2**64 - 1), varint(2**31)],
)
