"""TFRecord shards: any bytes may stand in a shard of a foreign set."""

from __future__ import annotations

from stoker.shards.formats.tfrecord import FORMAT, record, varint
from tests.fuzz.limits import Target
from tests.shards.format_contract import SAMPLES, make_shard


def run(data: bytes) -> None:
    """Read a shard twice: to collect the errors of its samples, then to stop at the first one."""
    for _ in FORMAT.iter_samples(data, "shard", errors=[]):
        pass
    for located in FORMAT.iter_samples(data, "shard", check=True):
        FORMAT.parse_sample(data[located.start : located.end], "shard", check=True)


VALID = make_shard(FORMAT, SAMPLES)
TARGET = Target(
    run,
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
