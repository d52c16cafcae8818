"""The manifest of a shard set: written last, so that what has one is complete."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import msgspec

from stoker.core import spec
from stoker.errors import Fault, InputError
from stoker.storage import Store, redacted

MANIFEST = "manifest.json"
QUARANTINE = "quarantine.jsonl"
WORK = "_work/"
PLAN = WORK + "plan.json"
"""Lies in a destination from the first moment of a conversion until its manifests are written."""
VERSION = 1
"""Raised when older readers would go wrong; keys that only add something are passed over by them."""
WINDOW = 2

_PLAIN_NAME = re.compile(r"(?!\.)[^/\\\0]+")
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a set; the digest of its index covers the labels too."""

    name: str
    samples: int
    bytes: int
    sha256: str
    index_sha256: str

    def faults(self) -> Iterator[Fault]:
        """Refuse a name that could lead out of the set, for a manifest may come from anywhere."""
        if not _PLAIN_NAME.fullmatch(self.name):
            yield Fault("name", f"{self.name!r} is not the plain name of a file")
        if self.samples < 0 or self.bytes < 0:
            yield Fault("samples", "counts cannot be negative")


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a set was made from; the digest covers every name, size and label."""

    kind: str
    samples: int
    digest: str


class ShrinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Says that larger images were re-encoded, and how many."""

    max_side: int
    quality: int
    images: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete shard set: one split of one dataset in one format."""

    version: int
    name: str
    split: str
    format: str
    samples: int
    bytes: int
    quarantined: int
    classes: tuple[str, ...]
    seed: int
    lanes: int
    window: int
    source: SourceInfo
    shrunk: ShrinkInfo | None
    plan: str
    shards: tuple[Shard, ...]

    def faults(self) -> Iterator[Fault]:
        """Refuse what could lead out of the set."""
        if not _SPLIT_NAME.fullmatch(self.split):
            yield Fault("split", f"{self.split!r} is not the name of a split")
        if self.lanes < 1 or self.window < 1:
            yield Fault("lanes", "lanes and window must be 1 or more")


def default_lanes(shards: int) -> int:
    """Choose the largest of 1, 2, 4, 8, 24, 48, 96, … that leaves each lane 16 shards or more."""
    steps = itertools.chain((1, 2, 4, 8), (24 << i for i in itertools.count()))
    return max((1, *itertools.takewhile(lambda lanes: 16 * lanes <= shards, steps)))


def read_manifest(store: Store, folder: str = "") -> Manifest:
    """Read the manifest of the set that lies in a folder of the store."""
    name = folder + MANIFEST
    where = f"{redacted(store.url).rstrip('/')}/{name}"
    data = store.get(name)
    try:
        version = json.loads(data).get("version")
    except (ValueError, AttributeError) as error:
        raise InputError(f"not a manifest: {error}", where=where) from error
    if version != VERSION:
        raise InputError(
            f"a manifest of version {version!r}, and this stoker reads version {VERSION}",
            where=where,
            hint="upgrade stoker, or convert the dataset again",
        )
    return spec.load(data, Manifest, where)
