"""What a conversion will write, as a value: decided before anything is written, printed by --dry-run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from stoker.errors import InputError
from stoker.shards.catalog import Catalog
from stoker.shards.formats import Format
from stoker.shards.manifest import WINDOW, default_lanes

# Part of every plan's digest: raise it when the same plan would give other bytes.
ALGORITHM = 1


class ConversionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user may choose about a conversion."""

    format: str = "tar"
    prefix: str | None = None
    shard_bytes: int = 256 << 20
    shard_samples: int | None = None
    seed: int = 0
    limit: int | None = None
    max_side: int | None = None
    quality: int = 90

    def check(self) -> None:
        """Refuse values that make no sense."""
        if self.shard_samples is not None and self.shard_samples < 1:
            raise InputError(f"--shard-samples is {self.shard_samples}, and must be 1 or more")
        if self.shard_bytes < 1:
            raise InputError(f"--shard-size is {self.shard_bytes}, and must be 1 byte or more")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit is {self.limit}, and must be 1 or more")
        if self.seed < 0:
            raise InputError(f"--seed is {self.seed}, and must be 0 or more")
        if self.max_side is not None and self.max_side < 1:
            raise InputError(f"--max-side is {self.max_side}, and must be 1 or more")
        if not 1 <= self.quality <= 100:
            raise InputError(f"--quality is {self.quality}, and must be from 1 to 100")
        if self.prefix is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.prefix):
            raise InputError(
                f"--prefix {self.prefix!r} cannot start a file's name",
                hint="use letters, digits, dots and dashes",
            )


class SplitPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One shard set to be: how many samples, dealt evenly over how many shards."""

    split: str
    found: int
    samples: int
    bytes: int
    digest: str
    shards: int
    lanes: int
    window: int

    def span(self, number: int) -> tuple[int, int]:
        """Tell which positions of the shuffled split stand in a shard; counts differ by at most one."""
        return number * self.samples // self.shards, (number + 1) * self.samples // self.shards


class ConversionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole conversion; equal plans give equal bytes."""

    name: str
    source: str
    recipe: str
    options: ConversionOptions
    classes: tuple[str, ...]
    splits: tuple[SplitPlan, ...]

    @property
    def digest(self) -> str:
        """Name this plan; a finished or unfinished set with another digest is another dataset."""
        return hashlib.sha256(b"%d\n" % ALGORITHM + msgspec.json.encode(self)).hexdigest()

    @property
    def bytes(self) -> int:
        """About how many bytes will be written."""
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
    """Decide the number of shards of each split."""
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
    found = len(catalog)
    samples = min(found, options.limit or found)
    weight = catalog.total_bytes(shard_format.overhead) * samples // found
    if options.shard_samples is not None:
        shards = -(-samples // options.shard_samples)
    else:
        shards = min(samples, max(1, -(-weight // options.shard_bytes)))
    return SplitPlan(
        split=split,
        found=found,
        samples=samples,
        bytes=weight,
        digest=catalog.digest,
        shards=shards,
        lanes=default_lanes(shards),
        window=WINDOW,
    )
