"""Tar shards: any bytes may stand in a shard of a foreign set."""

from __future__ import annotations

import tarfile
from functools import partial

from stoker.shards.formats.tar import FORMAT
from tests.fuzz.limits import Target
from tests.fuzz.shards import read_twice
from tests.shards.format_contract import SAMPLES, make_shard
from tests.support.tars import make_tar


def _with_label(label: bytes) -> bytes:
    return make_tar(("a.jpg", b"\xff\xd8\xff"), ("a.cls", label))


VALID = make_shard(FORMAT, SAMPLES)
TARGET = Target(
    partial(read_twice, FORMAT),
    valid=[VALID],
    hostile=[
        b"",
        b"\0" * 512,
        b"\0" * 1_000_000,
        b"\xff" * 1024,
        VALID[:700],
        VALID[:-1024],
        *(_with_label(label) for label in (b"", b"-1", b"9" * 20, b"9" * 10_000, b"0x10", b"1.5", b"\xff", b" 3 \n")),
        make_tar(("a.jpg", b""), ("a.cls", b"1"), form=tarfile.GNU_FORMAT, mode=0o7777777),
        make_tar(("x" * 5000 + ".jpg", b"a"), ("x" * 5000 + ".cls", b"1")),
        make_tar(("../../a.jpg", b"a"), ("../../a.cls", b"1")),
        make_tar(("a.jpg", b"a"), ("a.cls", b"1"), pax_headers={"size": "99999999999999999999"}),
        make_tar(("a.jpg", b"a"), ("a.cls", b"1"), pax_headers={"path": "\udcff" * 3}),
        make_tar(*((f"{i}.jpg", b"a") for i in range(20_000))),
        make_tar(("a.jpg", b"a"), ("a.jpg", b"b"), ("a.cls", b"1"), ("a.cls", b"2")),
    ],
    tokens=[
        b"ustar\x0000",
        b"ustar  \0",
        b"0000000",
        b"7777777",
        b"x",
        b"g",
        b"L",
        b"\x80" + b"\xff" * 11,
        b"\0" * 512,
    ],
)
