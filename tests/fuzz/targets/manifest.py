"""Manifests of shard sets: they come from any web server, and their numbers steer sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.load.planning import find_shard_set, plan_sampling
from stoker.sampling.rank import Rank
from stoker.testing import make_shards
from tests.fuzz.limits import Target

MANIFEST = make_shards(Path("shards").absolute(), samples=40, classes=2, size=(8, 8)) / "train" / "manifest.json"
VALID = MANIFEST.read_bytes()


def run(data: bytes) -> None:
    """Open the shard set and plan the first step of an epoch."""
    MANIFEST.write_bytes(data)
    plan = plan_sampling(find_shard_set(str(MANIFEST.parent)))
    epoch = plan.epoch(0, Rank(0, 1))
    step = next(epoch.steps(0, 1), None)
    if step is not None:
        epoch.locate(step.positions)
        epoch.upcoming_shards(0)


def _with(**keys: Any) -> bytes:
    return json.dumps({**json.loads(VALID), **keys}).encode()


def _with_shard(**keys: Any) -> bytes:
    first, *others = json.loads(VALID)["shards"]
    return _with(shards=[{**first, **keys}, *others])


TARGET = Target(
    run,
    valid=[VALID],
    hostile=[
        b"",
        b"null",
        b"[" * 100_000,
        b'{"version": 1, "shards": ' + b"[" * 100_000,
        b'{"name": "' + b"x" * (8 << 20) + b'", "shards": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"version": ' + b"9" * 100_000 + b"}",
        *(_with(**{key: number}) for key in ("lanes", "window") for number in (0, -1, 10**8, 10**12, 2**63, 1e308)),
        *(_with(**{key: -1}) for key in ("samples", "bytes", "quarantined")),
        *(_with_shard(samples=number) for number in (-1, 0, 10**8, 10**12, 2**62, 2**63, 2**64)),
        *(_with_shard(bytes=number) for number in (-1, 0, 10**12, 2**63)),
        *(_with_shard(name=name) for name in ("../x", "/etc/passwd", "a\0b", "http://x/y", "", ".", "x" * 100_000)),
        _with_shard(sha256="", index_sha256=""),
        _with(shards=[]),
        _with(shards=json.loads(VALID)["shards"] * 2),
        _with(shards=[{**json.loads(VALID)["shards"][0], "name": f"train-{i}.tar"} for i in range(20_000)]),
        _with(classes=[""] * 200_000),
        _with(seed=2**64),
        _with(options={"\ud800": 1}),
        _with(name="\ud83d\ude00 \udc00"),
        _with(version=2),
        _with(split="../../x"),
        _with(format="zip"),
        _with(source=None),
    ],
    tokens=[b"null", b"1e999", b"-1", b"NaN", b'"', b"{}", b"[]", b"9223372036854775808", b"\\ud800", b"../"],
)
