"""Shards that exist already, ours or others', to be dealt anew or written in another format."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stoker.errors import SourceError, StokerError
from stoker.shards.formats import FORMATS, LocatedSample, guess_format
from stoker.shards.manifest import MANIFEST, Shard
from stoker.shards.sample import Content, Item
from stoker.shards.shard_set import MappedFile, ShardSet, find_shard_sets, group_by_split
from stoker.storage import local_path


class ShardsSource:
    """A shard set by URL; a scan walks every shard once, and samples are then read by their span."""

    recipe = ""

    def __init__(self, where: str, *, scratch: Path) -> None:
        self._scratch = scratch
        self._sets = group_by_split(find_shard_sets(where))
        self._formats = {name: FORMATS.get(one.format) for name, one in self._sets.items()}
        manifests = [one.manifest for one in self._sets.values() if one.manifest is not None]
        self.splits: Sequence[str] = tuple(self._sets)
        self.name = manifests[0].name if manifests else _guess_dataset_name(next(iter(self._sets.values())))
        self.classes: Sequence[str] = manifests[0].classes if manifests else ()
        self.notes: Sequence[str] = ()
        if any(manifest.classes != self.classes for manifest in manifests):
            raise SourceError("the splits have different classes", where=where, hint="convert them one by one")

    @staticmethod
    def can_read(where: str) -> bool:
        """Whether a shard set is found there; in a local tree only where one would lie, for it may be large."""
        try:
            folder = local_path(where)
            if folder is None or not folder.is_dir():
                return bool(find_shard_sets(where))
            if any(folder.glob(f"*/{MANIFEST}")):
                return True
            places = [folder, *(folder / name for name in ("train", "val", "validation", "test"))]
            return any(_holds_shards(place) for place in places if place.is_dir())
        except (StokerError, OSError):
            return False

    def scan(self, split: str) -> Iterator[Item]:
        """Walk the shards one after the other; a remote one is on disk only while it is walked.

        Every checksum is verified and a manifest believed: what is damaged here would be whole in the new shards.
        """
        one = self._sets[split]
        walk = self._formats[split].iter_samples
        recorded = {} if one.manifest is None else {shard.name: shard for shard in one.manifest.shards}
        for number, entry in enumerate(one.shards):
            where = one.url_of(entry.name)
            with one.map_shard(entry.name, self._scratch) as file:
                samples = walk(file.view, where, check=True)
                if entry.name in recorded:
                    samples = _check_against_manifest(samples, file, recorded[entry.name], where)
                for found in samples:
                    file.release_before(found.end)
                    sample = found.sample
                    key = sample.key.removeprefix("./")  # as `tar cf x.tar .` writes them
                    _check_key(key, found.start, where)
                    yield Item(
                        name=f"{key}.{sample.extension}",
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
        sample = self._formats[split].parse_sample(data, one.url_of(name), check=True)
        return Content(sample.image, sample.extras)

    def close(self) -> None:
        """Nothing is held open."""


def _check_against_manifest(
    samples: Iterable[LocatedSample], file: MappedFile, shard: Shard, where: str
) -> Iterator[LocatedSample]:
    """Pass a shard's samples on, and refuse it when its size, count or bytes are not the manifest's."""
    if len(file.view) != shard.bytes:
        raise _damaged_error(f"{len(file.view):,} bytes, and the manifest says {shard.bytes:,}", where)
    digest = hashlib.sha256()
    count = hashed = 0
    for found in samples:
        digest.update(file.view[hashed : found.end])
        hashed = found.end
        count += 1
        yield found
    digest.update(file.view[hashed:])
    if digest.hexdigest() != shard.sha256:
        raise _damaged_error(f"its sha256 is {digest.hexdigest()}, not {shard.sha256}", where)
    if count != shard.samples:
        raise _damaged_error(f"{count:,} samples, and the manifest says {shard.samples:,}", where)


def _damaged_error(what: str, where: str) -> SourceError:
    return SourceError(f"{what}; the source is damaged", where=where, hint="see: stoker data verify")


def _check_key(key: str, at: int, where: str) -> None:
    """Refuse a key that cannot be written down, or that leads out of the folder a shard is unpacked in."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise SourceError(f"sample {key!r} at byte {at} has a key with an empty, '.' or '..' part", where=where)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise SourceError(f"sample {key!r} at byte {at} has a key that is not UTF-8", where=where) from None


def _holds_shards(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(guess_format(entry.name) is not None or entry.name == MANIFEST for entry in entries)


def _guess_dataset_name(one: ShardSet) -> str:
    """Guess a dataset's name from its shards: what stands before the split."""
    head = one.shards[0].name.lower().partition(f"-{one.split}")[0]
    return head if head and head != one.shards[0].name.lower() else "dataset"
