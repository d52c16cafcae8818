"""The manifest of a shard set: written last, so a shard set that has one is complete."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from stoker.core import json_io, spec
from stoker.errors import Fault, InputError
from stoker.shards.options import ConversionOptions
from stoker.storage import Store, redacted

MANIFEST = "manifest.json"
QUARANTINE = "quarantine.jsonl"
WORK = "_work/"
PLAN = WORK + "plan.json"
"""Exists in a destination from the start of a conversion until its manifests are written."""
VERSION = 1
"""Increment when older readers would misread the manifest; they ignore keys that they do not know."""
WINDOW = 2
MAX_COUNT = 2**53
"""Largest number of samples or bytes: sums stay exact in 64 bits, and in JSON of other tools."""
MAX_LANES = 2**20
"""Largest number of lanes, and of shard pieces in a window: both cost time and memory whatever the number of shards."""

_MAX_KEY_LENGTH = 80
_PLAIN_NAME = re.compile(r"(?!\.)[^/\\\x00-\x1f\x7f\ud800-\udfff]+")
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]+")

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
LaneCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$", extra={"expected": "64 hexadecimal digits"})]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a shard set; the digest of its index also covers the labels."""

    name: str
    samples: Count
    bytes: Count
    sha256: Sha256
    index_sha256: Sha256

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for a name that points outside of the shard set: a manifest may come from anywhere."""
        if not _PLAIN_NAME.fullmatch(self.name):
            yield Fault("name", f"{self.name!r} is not a plain file name")
        if self.samples > self.bytes:
            yield Fault("samples", f"{self.samples:,} samples do not fit into {self.bytes:,} bytes")


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The dataset that a shard set was converted from; the digest covers every name, size and label."""

    kind: str
    samples: Count
    digest: str


class ShrinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How larger images were re-encoded, and how many."""

    max_side: Count
    quality: Count
    images: Count


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete shard set: one split of one dataset in one format."""

    version: int
    name: str
    split: str
    format: str
    samples: Count
    bytes: Count
    quarantined: Count
    classes: tuple[str, ...]
    seed: int
    lanes: LaneCount
    window: LaneCount
    source: SourceInfo
    shrunk: ShrinkInfo | None
    plan: str
    options: ConversionOptions | None = None
    shards: tuple[Shard, ...]

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for a split that points outside of the shard set, and for impossible shards."""
        if not _SPLIT_NAME.fullmatch(self.split):
            yield Fault("split", f"{self.split!r} is not a valid split name")
        names = Counter(shard.name for shard in self.shards)
        yield from (Fault("shards", f"{name!r} is listed {count} times") for name, count in names.items() if count > 1)
        if sum(shard.bytes for shard in self.shards) > MAX_COUNT:  # none has more samples than bytes
            yield Fault("shards", f"have more than {MAX_COUNT:,} bytes in total")


def default_lanes(shards: int) -> int:
    """Return the largest of 1, 2, 4, 8, 24, 48, 96, … that leaves at least 16 shards per lane."""
    steps = itertools.chain((1, 2, 4, 8), (24 << i for i in range(MAX_LANES.bit_length() - 5)))
    return max((1, *itertools.takewhile(lambda lanes: 16 * lanes <= shards, steps)))


def read_manifest(store: Store, folder: str = "") -> Manifest:
    """Read the manifest of the shard set in a folder of the store."""
    name = folder + MANIFEST
    where = f"{redacted(store.url).rstrip('/')}/{name}"
    data = store.get(name)
    try:
        document = json_io.parse_text(json_io.decode_text(data, where), where, object_pairs_hook=_to_unique_dict)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
    except json.JSONDecodeError as error:
        what = f"invalid manifest: not valid JSON at line {error.lineno}, column {error.colno}"
        raise InputError(what, where=where) from error
    except ValueError as error:
        raise InputError(f"invalid manifest: {error}", where=where) from error
    if (version := document.get("version")) != VERSION:
        raise InputError(
            f"manifest version {version!r} is not supported; this stoker reads version {VERSION}",
            where=where,
            hint="upgrade stoker, or convert the dataset again",
        )
    return spec.decode(document, Manifest, where)


def _to_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        (key, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        shown = key if len(key) <= _MAX_KEY_LENGTH else f"{key[:_MAX_KEY_LENGTH]}…"
        raise ValueError(f"key {shown!r} occurs {count} times")
    return keys
