"""Source: existing shard sets, by stoker or other tools, to reshard or to write in another format."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from stoker.errors import SourceError, StokerError
from stoker.shards.formats import FORMATS, LocatedSample, guess_format
from stoker.shards.formats.tar import MissingLabelError
from stoker.shards.manifest import MANIFEST, Shard
from stoker.shards.sample import Content, Item
from stoker.shards.shard_set import MappedFile, ShardSet, find_shard_sets, group_by_split
from stoker.storage import local_path


class ShardsSource:
    """A shard set by URL; a scan reads every shard once, then samples are read by offset and size."""

    recipe = ""

    def __init__(self, where: str, *, scratch: Path) -> None:
        self._scratch = scratch
        self._sets = group_by_split(find_shard_sets(where))
        self._formats = {name: FORMATS.get(shard_set.format) for name, shard_set in self._sets.items()}
        manifests = [shard_set.manifest for shard_set in self._sets.values() if shard_set.manifest is not None]
        self.splits: Sequence[str] = tuple(self._sets)
        self.name = manifests[0].name if manifests else _guess_dataset_name(next(iter(self._sets.values())))
        self.classes: Sequence[str] = manifests[0].classes if manifests else ()
        self.notes: Sequence[str] = ()
        if any(manifest.classes != self.classes for manifest in manifests):
            raise SourceError("the splits have different classes", where=where, hint="convert each split separately")

    @staticmethod
    def can_read(where: str) -> bool:
        """Return whether there is a shard set; in a local tree, look only in the usual folders, as it may be large."""
        try:
            folder = local_path(where)
            if folder is None or not folder.is_dir():
                return bool(find_shard_sets(where))
            if any(folder.glob(f"*/{MANIFEST}")):
                return True
            folders = [folder, *(folder / name for name in ("train", "val", "validation", "test"))]
            return any(_holds_shards(path) for path in folders if path.is_dir())
        except (StokerError, OSError):
            return False

    def scan(self, split: str) -> Iterator[Item]:
        """List the samples of one shard after the other; a remote shard is on disk only while it is read.

        All checksums and the manifest are verified: new shards would otherwise give damaged samples valid checksums.
        """
        shard_set = self._sets[split]
        shard_format = self._formats[split]
        manifest_shards = (
            {} if shard_set.manifest is None else {shard.name: shard for shard in shard_set.manifest.shards}
        )
        for number, entry in enumerate(shard_set.shards):
            where = shard_set.url_of(entry.name)
            with shard_set.map_shard(entry.name, self._scratch) as file:
                samples = _suggest_folder_tar(shard_format.iter_samples(file.view, where, check=True))
                if entry.name in manifest_shards:
                    samples = _check_against_manifest(samples, file, manifest_shards[entry.name], where)
                for located in samples:
                    file.release_before(located.end)
                    sample = located.sample
                    key = sample.key.removeprefix("./")  # as written by `tar cf x.tar .`
                    _check_key(key, located.start, where)
                    yield Item(
                        name=f"{key}.{sample.extension}",
                        label=sample.label,
                        size=located.end - located.start,
                        file=number,
                        offset=located.start,
                    )

    def read(self, split: str, item: Item) -> Content:
        """Read one sample with one range request."""
        shard_set = self._sets[split]
        name = shard_set.shards[item.file].name
        data = shard_set.store.range(shard_set.folder + name, item.offset, item.size)
        sample = self._formats[split].parse_sample(data, shard_set.url_of(name), check=True)
        return Content(sample.image, sample.extras)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _suggest_folder_tar(samples: Iterable[LocatedSample]) -> Iterator[LocatedSample]:
    """Yield the samples of a shard; if one has no label, raise SourceError with the option to read class folders."""
    try:
        yield from samples
    except MissingLabelError as error:
        hint = "if the tar contains class folders, pass --source folder-tar"
        raise SourceError(error.what, where=error.where, hint=hint) from error


def _check_against_manifest(
    samples: Iterable[LocatedSample], file: MappedFile, shard: Shard, where: str
) -> Iterator[LocatedSample]:
    """Yield the samples of a shard; raise SourceError if its size, digest or count does not match the manifest."""
    if len(file.view) != shard.bytes:
        raise _damaged_error(f"{len(file.view):,} bytes, but the manifest lists {shard.bytes:,}", where)
    digest = hashlib.sha256()
    count = hashed = 0
    for located in samples:
        digest.update(file.view[hashed : located.end])
        hashed = located.end
        count += 1
        yield located
    digest.update(file.view[hashed:])
    if digest.hexdigest() != shard.sha256:
        raise _damaged_error(f"SHA-256 is {digest.hexdigest()}, but the manifest lists {shard.sha256}", where)
    if count != shard.samples:
        raise _damaged_error(f"{count:,} samples, but the manifest lists {shard.samples:,}", where)


def _damaged_error(what: str, where: str) -> SourceError:
    return SourceError(f"the shard is corrupt: {what}", where=where, hint="run: stoker data verify")


def _check_key(key: str, at: int, where: str) -> None:
    """Raise SourceError for a key that is not UTF-8, or that would leave the folder a shard is unpacked in."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise SourceError(f"sample {key!r} at byte {at} has a key with an empty, '.' or '..' part", where=where)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise SourceError(f"sample {key!r} at byte {at} has a key that is not UTF-8", where=where) from None


def _holds_shards(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(guess_format(entry.name) is not None or entry.name == MANIFEST for entry in entries)


def _guess_dataset_name(shard_set: ShardSet) -> str:
    """Guess the name of a dataset from its shards: the part before the split."""
    head = shard_set.shards[0].name.lower().partition(f"-{shard_set.split}")[0]
    return head if head and head != shard_set.shards[0].name.lower() else "dataset"
