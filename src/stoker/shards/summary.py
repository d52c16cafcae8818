"""What shards there are, in one line a set: pattern, counts, bytes, gaps."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stoker.errors import InputError
from stoker.shards.braces import collapse_names
from stoker.shards.formats import guess_format
from stoker.shards.shard_set import ShardSet, guess_split


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run of shards; what a listing alone cannot tell is None."""

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
    """Sum up a set; one whose shards are called by several patterns gives several rows."""
    manifest = shard_set.manifest
    sizes = {entry.name: entry.size for entry in shard_set.shards}
    missing = set(shard_set.missing)
    samples = {} if manifest is None else {shard.name: shard.samples for shard in manifest.shards}
    rows = []
    for run in collapse_names([*sizes, *shard_set.missing]):
        there = [name for name in run.names if name not in missing]
        rows.append(
            Summary(
                pattern=shard_set.url_of(run.pattern),
                split=shard_set.split,
                format=shard_set.format,
                shards=len(there),
                missing=tuple(sorted({*run.missing, *missing.intersection(run.names)})),
                samples=None if manifest is None else sum(samples[name] for name in there),
                bytes=sum(sizes[name] for name in there),
                classes=None if manifest is None else len(manifest.classes),
                quarantined=None if manifest is None else manifest.quarantined,
            )
        )
    return rows


def summarize_listing(lines: Iterable[str]) -> list[Summary]:
    """Sum up a listing, as `ls`, `ls -l` or a bucket's own tool prints it: the name is a line's last word."""
    words = [line.split()[-1] for line in lines if line.strip()]
    names = [name for name in words if guess_format(name) is not None]
    if not names:
        raise InputError(
            f"none of the {len(words)} names on standard input is a shard's",
            hint="give one a line, such as: ls shards | stoker data summary -",
        )
    return [
        Summary(
            pattern=run.pattern,
            split=guess_split(run.pattern.rpartition("/")[2]),
            format=guess_format(run.names[0]) or "",
            shards=len(run.names),
            missing=run.missing,
        )
        for run in collapse_names(names)
    ]
