"""The conversion plan: how many shards of each split will be written; printed by `--dry-run`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from stoker.shards.catalog import Catalog
from stoker.shards.formats import Format
from stoker.shards.manifest import WINDOW, default_lanes
from stoker.shards.options import ConversionOptions, list_differences

# Part of every plan's digest: increment it when the same plan would produce other bytes.
ALGORITHM = 1
SOURCE_CHANGED = "from a source that has changed since"


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

    def explain_difference(self, name: str, options: ConversionOptions, digests: Mapping[str, str]) -> str:
        """Return how another conversion of this dataset differs, given its source digest of each split.

        Empty for another dataset, and for a difference that is not recorded.
        """
        if name != self.name:
            return ""
        differences = [f"with {text}" for text in list_differences(options, self.options)]
        if _select_samples(options) == _select_samples(self.options):
            now = {split.split: split.digest for split in self.splits}
            if any(digest != now.get(split) for split, digest in digests.items()):
                differences.append(SOURCE_CHANGED)
        return ", ".join(differences)


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


def plan_with_fixed_size(
    plan: ConversionPlan, catalogs: Mapping[str, Catalog], shard_format: Format
) -> ConversionPlan | None:
    """Return the plan that was the default before `min_shards` existed; None for an explicit shard size."""
    if plan.options.min_shards is UNSET:
        return None
    options = msgspec.structs.replace(plan.options, min_shards=UNSET)
    splits = tuple(_plan_split(split, catalog, options, shard_format) for split, catalog in catalogs.items())
    return msgspec.structs.replace(plan, options=options, splits=splits)


def _select_samples(options: ConversionOptions) -> tuple[object, ...]:
    """Return the options that decide which samples of the source belong to a split."""
    return () if options.val_fraction is UNSET else (options.val_fraction, options.seed)


def _plan_split(split: str, catalog: Catalog, options: ConversionOptions, shard_format: Format) -> SplitPlan:
    available = len(catalog)
    samples = min(available, options.limit or available)
    size = catalog.total_bytes(shard_format.overhead) * samples // available
    shards = options.count_shards(samples, size)
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
