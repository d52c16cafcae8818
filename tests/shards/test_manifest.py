"""Manifests and indexes from anywhere: whatever they claim, they are read or rejected quickly, with one clear error."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import InputError, VerificationError
from stoker.load.planning import find_shard_set, plan_sampling
from stoker.sampling.rank import Rank
from stoker.shards.index import INDEX_DTYPE, IndexBuilder, parse_index
from stoker.shards.manifest import MAX_COUNT, MAX_LANES, default_lanes
from tests.support.trees import make_dataset, stoker


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("manifest")
    assert stoker("data", "convert", make_dataset(root / "pets"), root / "out", "--shard-samples", 10) == 0
    manifest: dict[str, Any] = json.loads((root / "out/train/manifest.json").read_text())
    return manifest


def change_shard(**values: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: manifest | {"shards": [manifest["shards"][0] | values, *manifest["shards"][1:]]}


def change(**values: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda manifest: manifest | values


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (change(window=10**12), "window"),
        (change(window=2**63), "window"),
        (change(window=0), "window"),
        (change(lanes=10**8), "lanes"),
        (change(lanes=2**63), "lanes"),
        (change(lanes=10**400), "lanes"),
        (change(lanes=float("nan")), "lanes"),
        (change(lanes=float("inf")), "lanes"),
        (change(lanes=-1), "lanes"),
        (change(samples=-1), "samples"),
        (change(bytes=2**64), "bytes"),
        (change(quarantined=-1), "quarantined"),
        (change(classes=7), "classes"),
        (change(split="../train"), "split"),
        (change_shard(samples=2**63), "shards[0].samples"),
        (change_shard(samples=-1), "shards[0].samples"),
        (change_shard(samples=2**40), "shards[0].samples"),
        (change_shard(bytes=1.5), "shards[0].bytes"),
        (change_shard(sha256="../../../../tmp/file"), "shards[0].sha256"),
        (change_shard(index_sha256="0" * 63), "shards[0].index_sha256"),
        *(
            (change_shard(name=name), "shards[0].name")
            for name in (
                "../other.tar",
                "/etc/passwd",
                "http://host/x.tar",
                "a/b.tar",
                "..",
                "",
                ".hidden.tar",
                "a\\b.tar",
                "a\0.tar",
                "a\n.tar",
                "\x1b[2J.tar",
            )
        ),
        (lambda manifest: manifest | {"shards": manifest["shards"] * 2}, "shards"),
        (lambda manifest: manifest | {"shards": [dict(manifest["shards"][0], bytes=MAX_COUNT)] * 2}, "shards"),
    ],
)
def test_impossible_manifest_is_rejected_with_the_key(
    original: dict[str, Any], edit: Callable[[dict[str, Any]], dict[str, Any]], key: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(edit(original)))
    with pytest.raises(InputError) as caught:
        find_shard_set(str(tmp_path))
    assert caught.value.where == str(tmp_path / "manifest.json")
    assert re.search(rf"(?:^|; ){re.escape(key)}: ", caught.value.what)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"version": 1, "x": ' + "[" * 100_000,
        "1",
        "null",
        '"text"',
        "\xff",
        "{}",
        '{"version": 1, "version": 1}',
    ],
)
def test_text_that_is_no_manifest_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="manifest"):
        find_shard_set(str(tmp_path))


def test_largest_lanes_and_window_are_usable(original: dict[str, Any], tmp_path: Path) -> None:
    largest = change(lanes=MAX_LANES, window=MAX_LANES)(original)
    (tmp_path / "manifest.json").write_text(json.dumps(largest))
    epoch = plan_sampling(find_shard_set(str(tmp_path))).epoch(0, Rank(0, 1))
    location = epoch.locate(np.arange(30))
    assert len({*zip(location.shards.tolist(), location.samples.tolist(), strict=True)}) == 30
    assert set(epoch.upcoming_shards(0).tolist()) == {0, 1, 2}


def test_default_lanes_are_never_too_many() -> None:
    assert [default_lanes(shards) for shards in (1, 16, 384, 768)] == [1, 1, 24, 48]
    assert default_lanes(2**40) <= MAX_LANES


def npy(header: bytes, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


def header(shape: bytes, descr: bytes = repr(INDEX_DTYPE.descr).encode()) -> bytes:
    return b"{'descr': " + descr + b", 'fortran_order': False, 'shape': " + shape + b", }\n"


@pytest.mark.parametrize(
    "data",
    [
        npy(header(b"(1000000000,)")),
        npy(header(b"(100000000000000000000,)")),
        npy(header(b"(2,)"), bytes(16)),
        npy(header(b"(1,)"), bytes(17)),
        npy(header(b"(-1,)")),
        npy(header(b"(1, 1)"), bytes(16)),
        npy(header(b"()"), bytes(16)),
        npy(header(b"(1,)", b"'<u8'"), bytes(16)),
        npy(header(b"(1,)", b"'|O'"), bytes(16)),
        npy(header(b"(1,)", b"[('offset', {})]"), bytes(16)),
        npy(header(b"(" * 60_000)),
        npy(b"{'descr': [(\n"),
        npy(b"{[]: 1}\n"),
        npy(b"\xff\xfe\n"),
        npy(header(b"(0,)"), version=b"\x09\x09"),
        npy(header(b"(1,)"))[:30],
        b"\x93NUMPY\x01",
        b"\x93NUMPY\x01\x00\xff\xff",
        b"",
        b"PK\x03\x04",
    ],
)
def test_impossible_index_is_rejected_before_anything_is_allocated(data: bytes) -> None:
    with pytest.raises(VerificationError, match=r"^index: "):
        parse_index(data, "index")


def test_index_is_what_numpy_reads(tmp_path: Path) -> None:
    builder = IndexBuilder()
    for number in range(1000):
        builder.add(2**40 + number, number, number % 7)
    (tmp_path / "index.npy").write_bytes(builder.to_bytes())
    loaded = np.load(tmp_path / "index.npy")
    assert np.array_equal(parse_index(builder.to_bytes(), "index"), loaded)
    np.save(tmp_path / "again.npy", loaded)
    assert np.array_equal(parse_index((tmp_path / "again.npy").read_bytes(), "index"), loaded)
    assert len(parse_index(IndexBuilder().to_bytes(), "index")) == 0
