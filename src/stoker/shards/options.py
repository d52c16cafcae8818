"""The options of a conversion: their limits, and how two sets of them differ."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from stoker.core.units import format_bytes
from stoker.errors import InputError

MIN_SHARDS = 32
"""The least number of shards for two lanes, so that two ranks can each read their own half of the shards."""
MIN_SHARD_SAMPLES = 16
"""A split that is too small for `MIN_SHARDS` shards of this many samples gets fewer shards."""


class ConversionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options for a conversion.

    Options that are UNSET are not encoded, so that plans without them keep the digest they had before the options
    existed.
    """

    format: str = "tar"
    prefix: str | None = None
    shard_bytes: int = 256 << 20
    shard_samples: int | None = None
    min_shards: int | UnsetType = UNSET
    seed: int = 0
    limit: int | None = None
    max_side: int | None = None
    quality: int = 90
    val_fraction: float | UnsetType = UNSET

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
        if self.val_fraction is not UNSET and not 0 < self.val_fraction < 1:
            raise InputError(f"--val-fraction must be > 0 and < 1, got {self.val_fraction:g}")
        if self.prefix is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.prefix):
            raise InputError(
                f"--prefix {self.prefix!r} is not a valid start of a file name",
                hint="use letters, digits, '.', '-' and '_'; start with a letter or digit",
            )

    def count_shards(self, samples: int, size: int) -> int:
        """Return the number of shards of a split with this many samples and bytes."""
        if self.shard_samples is not None:
            return -(-samples // self.shard_samples)
        shards = max(1, -(-size // self.shard_bytes))
        if self.min_shards is not UNSET:
            shards = max(shards, min(self.min_shards, samples // MIN_SHARD_SAMPLES))
        return min(samples, shards)

    def source_split(self, split: str) -> str:
        """Return the split of the source that holds the samples of a split."""
        return "train" if split == "val" and self.val_fraction is not UNSET else split

    def as_flags(self) -> dict[str, str]:
        """Return what each option does, by name, as a user would write it on the command line."""
        flags = {
            f"--{name.replace('_', '-')}": getattr(self, name)
            for name in ("format", "prefix", "seed", "limit", "max_side", "quality", "val_fraction")
        }
        texts = {flag: f"no {flag}" if value in (None, UNSET) else f"{flag} {value}" for flag, value in flags.items()}
        return texts | {"--shard-size": self._describe_shard_size()}

    def _describe_shard_size(self) -> str:
        if self.shard_samples is not None:
            return f"--shard-samples {self.shard_samples}"
        if self.min_shards is not UNSET:
            return "the default shard size"
        return f"--shard-size {format_bytes(self.shard_bytes).replace(' ', '')}"


def list_differences(old: ConversionOptions, new: ConversionOptions) -> Iterator[str]:
    """Yield how each option differs: `--seed 0 instead of --seed 1`."""
    before, now = old.as_flags(), new.as_flags()
    return (f"{before[flag]} instead of {now[flag]}" for flag in before if before[flag] != now[flag])
