"""The manifest of a shard set: written last, so a shard set that has one is complete."""

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
"""Exists in a destination from the start of a conversion until its manifests are written."""
VERSION = 1
"""Increment when older readers would misread the manifest; they ignore keys that they do not know."""
WINDOW = 2

_PLAIN_NAME = re.compile(r"(?!\.)[^/\\\0]+")
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a shard set; the digest of its index also covers the labels."""

    name: str
    samples: int
    bytes: int
    sha256: str
    index_sha256: str

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for a name that points outside of the shard set: a manifest may come from anywhere."""
        if not _PLAIN_NAME.fullmatch(self.name):
            yield Fault("name", f"{self.name!r} is not a plain file name")
        if self.samples < 0 or self.bytes < 0:
            yield Fault("samples", "samples and bytes must be >= 0")


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The dataset that a shard set was converted from; the digest covers every name, size and label."""

    kind: str
    samples: int
    digest: str


class ShrinkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How larger images were re-encoded, and how many."""

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
        """Yield a fault for a split that points outside of the shard set, and for invalid numbers."""
        if not _SPLIT_NAME.fullmatch(self.split):
            yield Fault("split", f"{self.split!r} is not a valid split name")
        if self.lanes < 1 or self.window < 1:
            yield Fault("lanes", "lanes and window must be >= 1")


def default_lanes(shards: int) -> int:
    """Return the largest of 1, 2, 4, 8, 24, 48, 96, … that leaves at least 16 shards per lane."""
    steps = itertools.chain((1, 2, 4, 8), (24 << i for i in itertools.count()))
    return max((1, *itertools.takewhile(lambda lanes: 16 * lanes <= shards, steps)))


def read_manifest(store: Store, folder: str = "") -> Manifest:
    """Read the manifest of the shard set in a folder of the store."""
    name = folder + MANIFEST
    where = f"{redacted(store.url).rstrip('/')}/{name}"
    data = store.get(name)
    try:
        version = json.loads(data).get("version")
    except (ValueError, AttributeError) as error:
        raise InputError(f"invalid manifest: {error}", where=where) from error
    if version != VERSION:
        raise InputError(
            f"manifest version {version!r} is not supported; this stoker reads version {VERSION}",
            where=where,
            hint="upgrade stoker, or convert the dataset again",
        )
    return spec.load(data, Manifest, where)
