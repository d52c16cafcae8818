"""Shards that exist already, ours or others', to be dealt anew or written in another format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.errors import SourceError, StokerError
from stoker.shards.formats import FORMATS, format_of
from stoker.shards.locate import ShardSet, find_sets, splits_of
from stoker.shards.manifest import MANIFEST
from stoker.shards.sample import Content, Item
from stoker.storage import local_path


class ShardsSource:
    """A shard set by URL; a scan walks every shard once, and samples are then read by their span."""

    def __init__(self, where: str, *, scratch: Path) -> None:
        self._scratch = scratch
        self._sets = splits_of(find_sets(where))
        self._formats = {name: FORMATS.get(one.format) for name, one in self._sets.items()}
        manifests = [one.manifest for one in self._sets.values() if one.manifest is not None]
        self.splits: Sequence[str] = tuple(self._sets)
        self.name = manifests[0].name if manifests else _name_of(next(iter(self._sets.values())))
        self.classes: Sequence[str] = manifests[0].classes if manifests else ()
        self.notes: Sequence[str] = ()
        if any(manifest.classes != self.classes for manifest in manifests):
            raise SourceError("the splits have different classes", where=where, hint="convert them one by one")

    @staticmethod
    def recognises(where: str) -> bool:
        """Whether a shard set is found there; in a local tree only where one would lie, for it may be large."""
        try:
            folder = local_path(where)
            if folder is None or not folder.is_dir():
                return bool(find_sets(where))
            if any(folder.glob(f"*/{MANIFEST}")):
                return True
            places = [folder, *(folder / name for name in ("train", "val", "validation", "test"))]
            return any(_holds_shards(place) for place in places if place.is_dir())
        except (StokerError, OSError):
            return False

    def scan(self, split: str) -> Iterator[Item]:
        """Walk the shards one after the other; a remote one is on disk only while it is walked."""
        one = self._sets[split]
        walk = self._formats[split].walk
        for number, shard in enumerate(one.shards):
            with one.mapped(shard.name, self._scratch) as file:
                for found in walk(file.view, one.url_of(shard.name)):
                    file.passed(found.end)
                    sample = found.sample
                    yield Item(
                        name=f"{sample.key}.{sample.kind}",
                        label=sample.label,
                        size=found.end - found.start,
                        file=number,
                        offset=found.start,
                    )

    def read(self, split: str, item: Item) -> Content:
        """Read one sample's span with one range request."""
        one = self._sets[split]
        name = one.shards[item.file].name
        data = one.store.range(one.folder + name, item.offset, item.size)
        sample = self._formats[split].parse(data, one.url_of(name))
        return Content(sample.image, sample.extras)

    def close(self) -> None:
        """Nothing is held open."""


def _holds_shards(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(format_of(entry.name) is not None or entry.name == MANIFEST for entry in entries)


def _name_of(one: ShardSet) -> str:
    """Guess a dataset's name from its shards: what stands before the split."""
    head = one.shards[0].name.lower().partition(f"-{one.split}")[0]
    return head if head and head != one.shards[0].name.lower() else "dataset"
