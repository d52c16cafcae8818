"""Shard sets by URL: with a manifest, as a brace pattern, or as a folder of shards made elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from stoker.core.scratch import scratch_folder
from stoker.errors import DataFaultError, InputError, NotFoundError, StokerError, UnavailableError
from stoker.shards.braces import expand_braces, has_braces
from stoker.shards.formats import guess_format
from stoker.shards.index import Index, index_name, parse_index
from stoker.shards.manifest import MANIFEST, PLAN, Manifest, Shard, read_manifest
from stoker.storage import Entry, Store, check_name, download, local_path, open_store, redacted, split
from stoker.storage.local import translate_os_errors

SPLIT_ORDER = ("train", "val", "test")

_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|validation|test)(?=[^a-z]|$)", re.IGNORECASE)


class MappedFile:
    """A file as a view of memory; the file is unmapped when the last view into it is gone."""

    RELEASE_BYTES = 64 << 20

    def __init__(self, path: Path) -> None:
        self._map: mmap.mmap | None = None
        self._released = 0
        with translate_os_errors(path), path.open("rb") as file:
            if path.stat().st_size > 0:  # an empty file cannot be mapped
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(b"" if self._map is None else self._map)

    def release_before(self, position: int) -> None:
        """Give back what lies before `position`, now and then, so that memory does not grow with the file."""
        if position < self._released:  # another walk, from the start
            self._released = 0
        if self._map is not None and position - self._released >= self.RELEASE_BYTES:
            self._released = position - position % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, 0, self._released)

    def release(self) -> None:
        """Give all of it back; what is looked at again is read again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """Shards of one split and format; `folder` is empty or ends with a slash, names are relative to it.

    Index files lie beside the shards, or in the store `indexes` where the set was made elsewhere and scanned here.
    """

    store: Store
    folder: str
    split: str
    format: str
    shards: tuple[Entry, ...]
    missing: tuple[str, ...] = ()
    manifest: Manifest | None = None
    indexes: Store | None = None

    @property
    def url(self) -> str:
        """Where the set lies."""
        return f"{redacted(self.store.url).rstrip('/')}/{self.folder}".rstrip("/")

    def url_of(self, name: str) -> str:
        """Where one object of the set lies."""
        return f"{self.url}/{name}"

    @cached_property
    def manifest_shards(self) -> dict[str, Shard]:
        """What the manifest tells of each shard, by name."""
        return {} if self.manifest is None else {shard.name: shard for shard in self.manifest.shards}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.shards)

    def read_index(self, name: str) -> Index:
        """Read where a shard's images lie; refuse an index that is not the manifest's or leads out of the shard."""
        place = self if self.indexes is None else replace(self, store=self.indexes, folder="")
        where = place.url_of(index_name(name))
        hint = "see: stoker data verify" if place is self else f"remove {place.url} and the set is scanned anew"
        if name not in self._sizes:
            raise NotFoundError("the set has no such shard", where=self.url_of(name))
        data = place.store.get(place.folder + index_name(name))
        shard = self.manifest_shards.get(name)
        if shard and shard.index_sha256 and hashlib.sha256(data).hexdigest() != shard.index_sha256:
            raise DataFaultError("the sha256 of this index is not the manifest's", where=where, hint=hint)
        rows = parse_index(data, where)
        if shard and len(rows) != shard.samples:
            what = f"the index tells of {len(rows):,} samples, and the manifest of {shard.samples:,}"
            raise DataFaultError(what, where=where, hint=hint)
        _check_bounds(rows, self._sizes[name], where, hint)
        return rows

    @contextmanager
    def map_shard(self, name: str, scratch: Path | None = None) -> Iterator[MappedFile]:
        """Map a shard; a remote shard is fetched for the while."""
        folder = local_path(self.store.url)
        if folder is not None:
            yield MappedFile(folder / check_name(self.folder + name))
            return
        with scratch_folder(scratch) as temporary:
            path = temporary / "shard"
            download(self.store, self.folder + name, path)
            yield MappedFile(path)


def read_images(shard_set: ShardSet, name: str) -> Iterator[tuple[memoryview, int]]:
    """Give every image of a shard with its label, as views of the mapped file; the index tells where they lie."""
    rows = shard_set.read_index(name)
    with shard_set.map_shard(name) as file:
        view = file.view
        _check_bounds(rows, len(view), shard_set.url_of(name), "the shard is cut off; see: stoker data verify")
        for offset, length, label in rows.tolist():
            yield view[offset : offset + length], label


def _check_bounds(rows: Index, size: int, where: str, hint: str) -> None:
    """Refuse rows that lead out of a shard: a slice would quietly give less, and a range request would fail late."""
    offsets, lengths = rows["offset"], rows["length"]
    # Compared one by one, for the sum of an offset and a length may pass 64 bits and come out small.
    outside = (offsets > size) | (lengths > size - offsets)
    if outside.any():
        row = int(outside.argmax())
        what = f"image {row} would lie at byte {offsets[row]}, {lengths[row]} bytes long, in a shard of {size} bytes"
        raise DataFaultError(what, where=where, hint=hint)


def find_shard_sets(url: str, *, allow_missing: bool = False) -> list[ShardSet]:
    """Find the shard sets that a URL names: one, or the splits below a folder.

    With `gaps`, shards that a pattern or a manifest names and that are not there are told as missing, not refused.
    """
    path = local_path(url)
    if has_braces(url) and (path is None or not path.exists()):
        return _find_by_pattern(url, allow_missing)
    if guess_format(url) is not None and (path is None or not path.is_dir()):
        root, name = split(url)
        store = open_store(root)
        return _group_shards(store, [Entry(name, store.size(name))])
    store = open_store(url)
    try:
        return [_open_shard_set(store, "", allow_missing)]
    except NotFoundError:
        _check_not_unfinished(url)
        return _find_below(store, allow_missing)


def _check_not_unfinished(url: str) -> None:
    """Refuse what a conversion that was killed, or still runs, has left: neither a set nor all of its shards."""
    places = [url]
    with contextlib.suppress(InputError):
        places.append(split(url.rstrip("/"))[0])  # the URL may name a split
    for place in places:
        try:
            open_store(place).size(PLAN)
        except StokerError:
            continue
        raise _unfinished_error(url)


def _find_by_pattern(url: str, allow_missing: bool) -> list[ShardSet]:
    url, mark, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    root, slash, _ = url[: url.index("{")].rpartition("/")
    store = open_store((root + slash or ".") + mark + query)
    pattern = url[len(root + slash) :]
    names = list(expand_braces(pattern))
    try:
        sizes = {entry.name: entry.size for entry in store.list(pattern[: pattern.index("{")])}
    except (InputError, UnavailableError):  # an http server that lists nothing
        sizes = {}
    if not sizes:
        sizes = _request_sizes(store, names, allow_missing)
    missing = [name for name in names if name not in sizes]
    if missing and (not allow_missing or len(missing) == len(names)):
        raise NotFoundError(f"{len(missing)} of {len(names)} shards are missing, {missing[0]} the first", where=url)
    sets = _group_shards(store, [Entry(name, sizes[name]) for name in names if name in sizes])
    return [replace(sets[0], missing=tuple(missing)), *sets[1:]]


def _request_sizes(store: Store, names: Sequence[str], allow_missing: bool) -> dict[str, int]:
    """Ask for one object after the other; without `gaps` the first that is missing ends it."""
    sizes = {}
    for name in names:
        try:
            sizes[name] = store.size(name)
        except NotFoundError:
            if not allow_missing:
                raise
    return sizes


def _find_below(store: Store, allow_missing: bool) -> list[ShardSet]:
    entries = list(store.list())
    if any(entry.name == PLAN or entry.name.endswith(f"/{PLAN}") for entry in entries):
        raise _unfinished_error(store.url)
    described = [entry.name.removesuffix(MANIFEST) for entry in entries if entry.name.endswith(f"/{MANIFEST}")]
    sets = [_open_shard_set(store, folder, allow_missing) for folder in described]
    # A split that lost its manifest is still there to be seen.
    shards = [entry for entry in entries if guess_format(entry.name) and not entry.name.startswith(tuple(described))]
    if shards:
        sets += _group_shards(store, shards)
    if not sets:
        raise NotFoundError("there are no shards here", where=store.url, hint="make some with: stoker data convert")
    return sorted(sets, key=_sort_key)


def _unfinished_error(where: str) -> InputError:
    hint = "run its `stoker data convert` again to finish it"
    return InputError("an unfinished conversion lies here", where=where, hint=hint)


def _open_shard_set(store: Store, folder: str, allow_missing: bool = False) -> ShardSet:
    manifest = read_manifest(store, folder)
    shards = [Entry(shard.name, shard.bytes) for shard in manifest.shards]
    missing: list[str] = []
    if allow_missing:
        try:
            there = {entry.name.removeprefix(folder) for entry in store.list(folder)}
        except (InputError, UnavailableError):  # an http server that lists nothing
            there = {shard.name for shard in shards}
        missing = [shard.name for shard in shards if shard.name not in there]
        shards = [shard for shard in shards if shard.name in there]
    return ShardSet(
        store=store,
        folder=folder,
        split=manifest.split,
        format=manifest.format,
        shards=tuple(shards),
        missing=tuple(missing),
        manifest=manifest,
    )


def _group_shards(store: Store, entries: Sequence[Entry]) -> list[ShardSet]:
    """Part shards without a manifest by folder, split and format."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        folder, slash, name = entry.name.rpartition("/")
        kind = guess_format(name)
        if kind is None:
            raise InputError(
                "its name tells no shard format",
                where=entry.name,
                hint="shards end in .tar, .tfrecord or -of-NNNNN",
            )
        groups.setdefault((folder + slash, guess_split(entry.name), kind), []).append(Entry(name, entry.size))
    sets = (
        _attach_manifest(ShardSet(store=store, folder=folder, split=part, format=kind, shards=tuple(shards)))
        for (folder, part, kind), shards in groups.items()
    )
    return sorted(sets, key=_sort_key)


def _attach_manifest(shard_set: ShardSet) -> ShardSet:
    """Give a set that was named by its shards the manifest that lies beside them, if it knows them all."""
    try:
        manifest = read_manifest(shard_set.store, shard_set.folder)
    except NotFoundError:
        return shard_set
    known = {shard.name for shard in manifest.shards}
    if manifest.format != shard_set.format or not known.issuperset(entry.name for entry in shard_set.shards):
        return shard_set
    return replace(shard_set, split=manifest.split, manifest=manifest)


def _sort_key(shard_set: ShardSet) -> tuple[int, str]:
    """Put training data first."""
    return (SPLIT_ORDER.index(shard_set.split) if shard_set.split in SPLIT_ORDER else len(SPLIT_ORDER), shard_set.url)


def guess_split(name: str) -> str:
    """Guess a shard's split from its name, else from its folder's; what does not tell is training data."""
    folder, _, file = name.rpartition("/")
    found = _SPLIT.findall(file) or _SPLIT.findall(folder)
    return "train" if not found else found[-1].lower().replace("validation", "val")


def group_by_split(sets: Iterable[ShardSet]) -> dict[str, ShardSet]:
    """Map sets by split; refuse two sets of one split, for neither is meant more than the other."""
    out: dict[str, ShardSet] = {}
    for one in sets:
        if one.split in out:
            raise InputError(f"{out[one.split].url} and {one.url} are both the {one.split!r} split; name one of them")
        out[one.split] = one
    return out
