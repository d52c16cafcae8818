"""Find shard sets by URL: with a manifest, by brace pattern, or as a folder of shards written by another tool."""

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

from stoker.core.scratch import scratch_directory
from stoker.errors import InputError, NotFoundError, StokerError, UnavailableError, VerificationError
from stoker.shards.braces import expand_braces, has_braces
from stoker.shards.formats import guess_format
from stoker.shards.index import Index, index_name, max_index_bytes, parse_index
from stoker.shards.manifest import MANIFEST, PLAN, Manifest, Shard, read_manifest
from stoker.storage import Entry, Store, check_name, download, local_path, open_store, redacted, split_url
from stoker.storage.local import translate_os_errors

SPLIT_ORDER = ("train", "val", "test")
SHARD_NAMES_HINT = "shards end in .tar, .tfrecord or -of-NNNNN"

_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|validation|test)(?=[^a-z]|$)", re.IGNORECASE)


class MappedFile:
    """A memory-mapped file; it is unmapped when the last view of it is released."""

    RELEASE_BYTES = 64 << 20

    def __init__(self, path: Path) -> None:
        self._map: mmap.mmap | None = None
        self._released = 0
        with translate_os_errors(path), path.open("rb") as file:
            if path.stat().st_size > 0:  # an empty file cannot be mapped
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(b"" if self._map is None else self._map)

    def release_before(self, position: int) -> None:
        """Release the pages before `position` from time to time, so that memory does not grow with the file."""
        if position < self._released:  # reading has started again
            self._released = 0
        if self._map is not None and position - self._released >= self.RELEASE_BYTES:
            self._released = position - position % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, 0, self._released)

    def release(self) -> None:
        """Release all pages; they are read again when needed."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """Shards of one split and format; `folder` is empty or ends with a slash, names are relative to it.

    Index files are next to the shards, or in the store `indexes` for a foreign shard set (written by another tool).
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
        """The URL of the shard set, without secrets."""
        return f"{redacted(self.store.url).rstrip('/')}/{self.folder}".rstrip("/")

    def url_of(self, name: str) -> str:
        """Return the URL of one file of the shard set."""
        return f"{self.url}/{name}"

    @cached_property
    def manifest_shards(self) -> dict[str, Shard]:
        """The shards of the manifest, by name."""
        return {} if self.manifest is None else {shard.name: shard for shard in self.manifest.shards}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.shards)

    def read_index(self, name: str) -> Index:
        """Read the index of a shard; raise VerificationError if it does not match the manifest or the shard's size."""
        index_set = self if self.indexes is None else replace(self, store=self.indexes, folder="")
        where = index_set.url_of(index_name(name))
        hint = "run: stoker data verify" if index_set is self else f"remove {index_set.url} to scan the shard set again"
        if name not in self._sizes:
            raise NotFoundError("the shard set has no such shard", where=self.url_of(name))
        shard = self.manifest_shards.get(name)
        limit = max_index_bytes(shard.samples if shard else 0)
        data = index_set.store.get(index_set.folder + index_name(name), max_bytes=limit)
        if shard and shard.index_sha256 and hashlib.sha256(data).hexdigest() != shard.index_sha256:
            raise VerificationError("the SHA-256 of this index does not match the manifest", where=where, hint=hint)
        rows = parse_index(data, where)
        if shard and len(rows) != shard.samples:
            what = f"the index has {len(rows):,} samples, but the manifest lists {shard.samples:,}"
            raise VerificationError(what, where=where, hint=hint)
        _check_bounds(rows, self._sizes[name], where, hint)
        return rows

    @contextmanager
    def map_shard(self, name: str, scratch: Path | None = None) -> Iterator[MappedFile]:
        """Map a shard into memory; a remote shard is downloaded to scratch until the context ends."""
        folder = local_path(self.store.url)
        if folder is not None:
            yield MappedFile(folder / check_name(self.folder + name))
            return
        with scratch_directory(scratch) as temporary:
            path = temporary / "shard"
            download(self.store, self.folder + name, path)
            yield MappedFile(path)


def read_images(shard_set: ShardSet, name: str) -> Iterator[tuple[memoryview, int]]:
    """Yield every image of a shard, as a view of the mapped file, with its label."""
    rows = shard_set.read_index(name)
    with shard_set.map_shard(name) as file:
        view = file.view
        _check_bounds(rows, len(view), shard_set.url_of(name), "the shard is truncated; run: stoker data verify")
        for offset, length, label in rows.tolist():
            yield view[offset : offset + length], label


def _check_bounds(rows: Index, size: int, where: str, hint: str) -> None:
    """Raise VerificationError for rows beyond the end of a shard: slicing would silently return fewer bytes."""
    offsets, lengths = rows["offset"], rows["length"]
    # Compared separately, because the sum of offset and length may overflow 64 bits.
    outside = (offsets > size) | (lengths > size - offsets)
    if outside.any():
        row = int(outside.argmax())
        what = f"image {row} at byte {offsets[row]} with {lengths[row]} bytes exceeds the shard of {size} bytes"
        raise VerificationError(what, where=where, hint=hint)


def find_shard_sets(url: str, *, allow_missing: bool = False) -> list[ShardSet]:
    """Find the shard sets at a URL: one, or one for each split below a folder.

    With `allow_missing`, shards of a pattern or manifest that do not exist are listed in `ShardSet.missing`.
    """
    if "\0" in url:
        raise InputError("contains a NUL character", where=repr(url))
    path = local_path(url)
    if has_braces(url) and (path is None or not path.exists()):
        return _find_by_pattern(url, allow_missing)
    if guess_format(url) is not None and (path is None or not path.is_dir()):
        root, name = split_url(url)
        store = open_store(root)
        return _group_shards(store, [Entry(name, store.size(name))])
    if path is not None and path.is_file():
        raise InputError("is neither a shard nor a directory", where=url, hint=SHARD_NAMES_HINT)
    store = open_store(url)
    with contextlib.suppress(NotFoundError):  # outside of an `except` block, so that later errors are not chained to it
        return [_open_shard_set(store, "", allow_missing)]
    _check_not_unfinished(url)
    return _find_below(store, allow_missing)


def _check_not_unfinished(url: str) -> None:
    """Raise InputError for the destination of a conversion that was killed or is still running."""
    urls = [url]
    with contextlib.suppress(InputError):
        urls.append(split_url(url.rstrip("/"))[0])  # the URL may be that of a split
    for candidate in urls:
        try:
            open_store(candidate).size(PLAN)
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
        raise NotFoundError(f"{len(missing)} of {len(names)} shards are missing, the first is {missing[0]}", where=url)
    sets = _group_shards(store, [Entry(name, sizes[name]) for name in names if name in sizes])
    return [replace(sets[0], missing=tuple(missing)), *sets[1:]]


def _request_sizes(store: Store, names: Sequence[str], allow_missing: bool) -> dict[str, int]:
    """Request the size of each object; without `allow_missing`, raise NotFoundError for a missing one."""
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
    # A split without a manifest is still listed.
    shards = [entry for entry in entries if guess_format(entry.name) and not entry.name.startswith(tuple(described))]
    if shards:
        sets += _group_shards(store, shards)
    if not sets:
        path = local_path(store.url)
        if path is not None and not path.exists():
            raise NotFoundError("no such file or directory", where=store.url)
        hint = "create shards with: stoker data convert SOURCE DEST"
        raise NotFoundError("no shards found", where=store.url, hint=hint)
    return sorted(sets, key=_sort_key)


def _unfinished_error(where: str) -> InputError:
    hint = "run the same `stoker data convert` command again to finish it"
    return InputError("contains an unfinished conversion", where=where, hint=hint)


def _open_shard_set(store: Store, folder: str, allow_missing: bool = False) -> ShardSet:
    manifest = read_manifest(store, folder)
    shards = [Entry(shard.name, shard.bytes) for shard in manifest.shards]
    missing: list[str] = []
    if allow_missing:
        try:
            existing = {entry.name.removeprefix(folder) for entry in store.list(folder)}
        except (InputError, UnavailableError):  # an http server that lists nothing
            existing = {shard.name for shard in shards}
        missing = [shard.name for shard in shards if shard.name not in existing]
        shards = [shard for shard in shards if shard.name in existing]
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
    """Group shards by folder, split and format."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        folder, slash, name = entry.name.rpartition("/")
        kind = guess_format(name)
        if kind is None:
            raise InputError(
                "cannot tell the shard format from the name",
                where=entry.name,
                hint=SHARD_NAMES_HINT,
            )
        groups.setdefault((folder + slash, guess_split(entry.name), kind), []).append(Entry(name, entry.size))
    sets = (
        _attach_manifest(ShardSet(store=store, folder=folder, split=part, format=kind, shards=tuple(shards)))
        for (folder, part, kind), shards in groups.items()
    )
    return sorted(sets, key=_sort_key)


def _attach_manifest(shard_set: ShardSet) -> ShardSet:
    """Attach the manifest next to the shards, if it lists all of them."""
    try:
        manifest = read_manifest(shard_set.store, shard_set.folder)
    except NotFoundError:
        return shard_set
    known = {shard.name for shard in manifest.shards}
    if manifest.format != shard_set.format or not known.issuperset(entry.name for entry in shard_set.shards):
        return shard_set
    return replace(shard_set, split=manifest.split, manifest=manifest)


def _sort_key(shard_set: ShardSet) -> tuple[int, str]:
    """Return a sort key that puts training data first."""
    return (SPLIT_ORDER.index(shard_set.split) if shard_set.split in SPLIT_ORDER else len(SPLIT_ORDER), shard_set.url)


def guess_split(name: str) -> str:
    """Guess the split of a shard from its name, else from its folder's name; the default is `train`."""
    folder, _, file = name.rpartition("/")
    names = _SPLIT.findall(file) or _SPLIT.findall(folder)
    return "train" if not names else names[-1].lower().replace("validation", "val")


def group_by_split(sets: Iterable[ShardSet]) -> dict[str, ShardSet]:
    """Return the shard sets by split; raise InputError if there are two of one split."""
    by_split: dict[str, ShardSet] = {}
    for shard_set in sets:
        if shard_set.split in by_split:
            first = by_split[shard_set.split]
            raise InputError(
                f"{first.url} and {shard_set.url} are both the {shard_set.split!r} split",
                hint="pass the URL of one of them",
            )
        by_split[shard_set.split] = shard_set
    return by_split
