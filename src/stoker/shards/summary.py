"""Summarize shard sets: pattern, number of shards and samples, bytes, missing shards."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stoker.errors import InputError
from stoker.shards.braces import collapse_names
from stoker.shards.formats import guess_format
from stoker.shards.shard_set import ShardSet, guess_split


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of one pattern; values that a listing does not contain are None."""

    pattern: str
    split: str
    format: str
    shards: int
    missing: tuple[str, ...]
    samples: int | None = None
    bytes: int | None = None
    classes: int | None = None
    quarantined: int | None = None


def summarize_shard_set(shard_set: ShardSet) -> list[Summary]:
    """Summarize a shard set, with one row per name pattern."""
    manifest = shard_set.manifest
    sizes = {entry.name: entry.size for entry in shard_set.shards}
    missing = set(shard_set.missing)
    samples = {} if manifest is None else {shard.name: shard.samples for shard in manifest.shards}
    rows = []
    for number_range in collapse_names([*sizes, *shard_set.missing]):
        existing = [name for name in number_range.names if name not in missing]
        rows.append(
            Summary(
                pattern=shard_set.url_of(number_range.pattern),
                split=shard_set.split,
                format=shard_set.format,
                shards=len(existing),
                missing=tuple(sorted({*number_range.missing, *missing.intersection(number_range.names)})),
                samples=None if manifest is None else sum(samples[name] for name in existing),
                bytes=sum(sizes[name] for name in existing),
                classes=None if manifest is None else len(manifest.classes),
                quarantined=None if manifest is None else manifest.quarantined,
            )
        )
    return rows


def summarize_listing(lines: Iterable[str]) -> list[Summary]:
    """Summarize a listing as printed by `ls`, `ls -l` or a bucket's tool: the name is the last word of a line."""
    last_words = [line.split()[-1] for line in lines if line.strip()]
    names = [name for name in last_words if guess_format(name) is not None]
    if not names:
        raise InputError(
            f"none of the {len(last_words)} names on standard input is a shard name",
            hint="pass one name per line, for example: ls shards | stoker data summary -",
        )
    return [
        Summary(
            pattern=number_range.pattern,
            split=guess_split(number_range.pattern.rpartition("/")[2]),
            format=guess_format(number_range.names[0]) or "",
            shards=len(number_range.names),
            missing=number_range.missing,
        )
        for number_range in collapse_names(names)
    ]
