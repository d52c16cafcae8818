"""The conversion plan: how many shards of each split will be written; printed by `--dry-run`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from stoker.errors import InputError
from stoker.shards.catalog import Catalog
from stoker.shards.formats import Format
from stoker.shards.manifest import WINDOW, default_lanes

# Part of every plan's digest: increment it when the same plan would produce other bytes.
ALGORITHM = 1


class ConversionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options for a conversion."""

    format: str = "tar"
    prefix: str | None = None
    shard_bytes: int = 256 << 20
    shard_samples: int | None = None
    seed: int = 0
    limit: int | None = None
    max_side: int | None = None
    quality: int = 90

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        if self.shard_samples is not None and self.shard_samples < 1:
            raise InputError(f"--shard-samples must be >= 1, got {self.shard_samples}")
        if self.shard_bytes < 1:
            raise InputError(f"--shard-size must be >= 1 byte, got {self.shard_bytes}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit must be >= 1, got {self.limit}")
        if self.seed < 0:
            raise InputError(f"--seed must be >= 0, got {self.seed}")
        if self.max_side is not None and self.max_side < 1:
            raise InputError(f"--max-side must be >= 1, got {self.max_side}")
        if not 1 <= self.quality <= 100:
            raise InputError(f"--quality must be between 1 and 100, got {self.quality}")
        if self.prefix is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.prefix):
            raise InputError(
                f"--prefix {self.prefix!r} is not a valid start of a file name",
                hint="use letters, digits, '.', '-' and '_'; start with a letter or digit",
            )


class SplitPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One shard set to write: its samples, distributed evenly over its shards."""

    split: str
    found: int
    samples: int
    bytes: int
    digest: str
    shards: int
    lanes: int
    window: int

    def span(self, number: int) -> tuple[int, int]:
        """Return the positions of the shuffled split that a shard holds; counts differ by at most one."""
        return number * self.samples // self.shards, (number + 1) * self.samples // self.shards


class ConversionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion of all splits; equal plans produce equal bytes."""

    name: str
    source: str
    recipe: str
    options: ConversionOptions
    classes: tuple[str, ...]
    splits: tuple[SplitPlan, ...]

    @property
    def digest(self) -> str:
        """The digest of this plan; a finished or unfinished shard set with another digest is another dataset."""
        return hashlib.sha256(b"%d\n" % ALGORITHM + msgspec.json.encode(self)).hexdigest()

    @property
    def bytes(self) -> int:
        """The estimated number of bytes to write."""
        return sum(split.bytes for split in self.splits)


def plan_conversion(
    *,
    name: str,
    source: str,
    recipe: str,
    classes: Sequence[str],
    catalogs: Mapping[str, Catalog],
    options: ConversionOptions,
    shard_format: Format,
) -> ConversionPlan:
    """Plan a conversion: choose the number of shards of each split."""
    options.check()
    return ConversionPlan(
        name=name,
        source=source,
        recipe=recipe,
        options=options,
        classes=tuple(classes),
        splits=tuple(_plan_split(split, catalog, options, shard_format) for split, catalog in catalogs.items()),
    )


def _plan_split(split: str, catalog: Catalog, options: ConversionOptions, shard_format: Format) -> SplitPlan:
    available = len(catalog)
    samples = min(available, options.limit or available)
    size = catalog.total_bytes(shard_format.overhead) * samples // available
    if options.shard_samples is not None:
        shards = -(-samples // options.shard_samples)
    else:
        shards = min(samples, max(1, -(-size // options.shard_bytes)))
    return SplitPlan(
        split=split,
        found=available,
        samples=samples,
        bytes=size,
        digest=catalog.digest,
        shards=shards,
        lanes=default_lanes(shards),
        window=WINDOW,
    )
