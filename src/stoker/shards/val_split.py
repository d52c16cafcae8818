"""Take a validation split from the training split of a source (`--val-fraction`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.errors import InputError, SourceError
from stoker.shards.catalog import Catalog
from stoker.shards.sample import sample_key
from stoker.shards.sources import Source


def check_can_split(source: Source, where: str) -> None:
    """Raise InputError for a source that has a validation split, or no training split to take one from."""
    if "val" in source.splits:
        raise InputError("the source already has a validation split", where=where, hint="omit --val-fraction")
    if "train" not in source.splits:
        raise InputError("the source has no training split to take a fraction of", where=where)


def split_catalogs(catalogs: Mapping[str, Catalog], folder: Path, fraction: float, seed: int) -> dict[str, Catalog]:
    """Divide the catalog of `train` into `train` and `val`, and keep the others; write the new ones to a folder."""
    whole = catalogs["train"]
    in_val = select_val(whole, fraction, seed)
    if not in_val.any():
        raise SourceError(
            "--val-fraction leaves no image for the validation split",
            hint="every class needs at least 2 images",
        )
    parts = {}
    for split, rows in (("train", np.flatnonzero(~in_val)), ("val", np.flatnonzero(in_val))):
        parts[split] = Catalog.write(folder, split, whole.read_rows(map(int, rows)))
        parts[split].stamp = whole.stamp  # rows do not hold the stamps of the items
    return parts | {split: catalog for split, catalog in catalogs.items() if split != "train"}


def select_val(catalog: Catalog, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return for each row whether it belongs to `val`: the same fraction of every class, rounded.

    A class keeps at least one image in `train`, and has at least one in `val` if it has two. The choice depends only on
    the seed and the keys, not on the order of the scan.
    """
    prefix = hashlib.blake2b(b"val/%d/" % seed, digest_size=8)
    ranks = np.empty(len(catalog), np.uint64)
    labels = np.empty(len(catalog), np.int64)
    for row, item in enumerate(catalog):
        digest = prefix.copy()
        digest.update(sample_key(item.name).encode())
        ranks[row] = int.from_bytes(digest.digest(), "little")
        labels[row] = item.label
    selected = np.zeros(len(catalog), np.bool_)
    order = np.lexsort((ranks, labels))
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        share = min(max(1, int(count * fraction + 0.5)), count - 1)
        selected[order[start : start + share]] = True
    return selected
