"""Shard sets by URL: with a manifest, as a brace pattern, or as a folder of shards made elsewhere."""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import InputError, NotFoundError, UnavailableError
from stoker.shards.braces import expand, has_braces
from stoker.shards.formats import format_of
from stoker.shards.manifest import MANIFEST, Manifest, read_manifest
from stoker.storage import Entry, Store, checked, download, local_path, open_store, shown, split
from stoker.storage.local import explained

SPLIT_ORDER = ("train", "val", "test")

_SPLIT = re.compile(r"(?:^|[^a-z])(train|val|validation|test)(?=[^a-z]|$)", re.IGNORECASE)


class MappedFile:
    """A file as a view of memory; the file is unmapped when the last view into it is gone."""

    STEP = 64 << 20

    def __init__(self, path: Path) -> None:
        self._map: mmap.mmap | None = None
        self._forgotten = 0
        with explained(path), path.open("rb") as file:
            if path.stat().st_size > 0:  # an empty file cannot be mapped
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(b"" if self._map is None else self._map)

    def passed(self, position: int) -> None:
        """Give back what lies before `position`, now and then, so that memory does not grow with the file."""
        if position < self._forgotten:  # another walk, from the start
            self._forgotten = 0
        if self._map is not None and position - self._forgotten >= self.STEP:
            self._forgotten = position - position % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, 0, self._forgotten)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """Shards of one split and format; `folder` is empty or ends with a slash, names are relative to it."""

    store: Store
    folder: str
    split: str
    format: str
    shards: tuple[Entry, ...]
    manifest: Manifest | None = None

    @property
    def url(self) -> str:
        """Where the set lies."""
        return f"{shown(self.store.url).rstrip('/')}/{self.folder}".rstrip("/")

    def url_of(self, name: str) -> str:
        """Where one object of the set lies."""
        return f"{self.url}/{name}"

    @contextmanager
    def mapped(self, name: str, scratch: Path | None = None) -> Iterator[MappedFile]:
        """Map a shard; a remote shard is fetched for the while."""
        folder = local_path(self.store.url)
        if folder is not None:
            yield MappedFile(folder / checked(self.folder + name))
            return
        with tempfile.TemporaryDirectory(dir=scratch, prefix="stoker-") as temporary:
            path = Path(temporary) / "shard"
            download(self.store, self.folder + name, path)
            yield MappedFile(path)


def find_sets(url: str) -> list[ShardSet]:
    """Find the shard sets that a URL names: one, or the splits below a folder."""
    if has_braces(url):
        return _from_pattern(url)
    if format_of(url) is not None:
        root, name = split(url)
        store = open_store(root)
        return _group(store, [Entry(name, store.size(name))])
    store = open_store(url)
    try:
        return [_with_manifest(store, "")]
    except NotFoundError:
        return _below(store)


def _from_pattern(url: str) -> list[ShardSet]:
    root, slash, _ = url[: url.index("{")].rpartition("/")
    store = open_store(root + slash or ".")
    names = list(expand(url[len(root + slash) :]))
    try:
        sizes = {entry.name: entry.size for entry in store.list()}
    except (InputError, UnavailableError):  # an http server that lists nothing
        sizes = {}
    if not sizes:
        sizes = {name: store.size(name) for name in names}
    if missing := [name for name in names if name not in sizes]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotFoundError(f"{missing[0]}{more} of {len(names)} shards do not exist", where=url)
    return _group(store, [Entry(name, sizes[name]) for name in names])


def _below(store: Store) -> list[ShardSet]:
    entries = list(store.list())
    manifests = [entry.name.removesuffix(MANIFEST) for entry in entries if entry.name.endswith(f"/{MANIFEST}")]
    if manifests:
        return sorted((_with_manifest(store, folder) for folder in manifests), key=_rank)
    shards = [entry for entry in entries if format_of(entry.name) is not None and "_work/" not in entry.name]
    if not shards:
        raise NotFoundError("there are no shards here", where=store.url, hint="make some with: stoker data convert")
    return _group(store, shards)


def _with_manifest(store: Store, folder: str) -> ShardSet:
    manifest = read_manifest(store, folder)
    return ShardSet(
        store=store,
        folder=folder,
        split=manifest.split,
        format=manifest.format,
        shards=tuple(Entry(shard.name, shard.bytes) for shard in manifest.shards),
        manifest=manifest,
    )


def _group(store: Store, entries: Sequence[Entry]) -> list[ShardSet]:
    """Part shards without a manifest by folder, split and format."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        folder, slash, name = entry.name.rpartition("/")
        kind = format_of(name)
        if kind is None:
            raise InputError(
                "its name tells no shard format",
                where=entry.name,
                hint="shards end in .tar, .tfrecord or -of-NNNNN",
            )
        groups.setdefault((folder + slash, split_of(name), kind), []).append(Entry(name, entry.size))
    sets = (
        ShardSet(store=store, folder=folder, split=part, format=kind, shards=tuple(shards))
        for (folder, part, kind), shards in groups.items()
    )
    return sorted(sets, key=_rank)


def _rank(one: ShardSet) -> tuple[int, str]:
    """Put training data first."""
    return (SPLIT_ORDER.index(one.split) if one.split in SPLIT_ORDER else len(SPLIT_ORDER), one.url)


def split_of(name: str) -> str:
    """Guess a shard's split from its name; a name that does not tell is training data."""
    found = _SPLIT.findall(name)
    return "train" if not found else found[-1].lower().replace("validation", "val")


def splits_of(sets: Iterable[ShardSet]) -> dict[str, ShardSet]:
    """Map sets by split; refuse two sets of one split, for neither is meant more than the other."""
    out: dict[str, ShardSet] = {}
    for one in sets:
        if one.split in out:
            raise InputError(f"{out[one.split].url} and {one.url} are both the {one.split!r} split; name one of them")
        out[one.split] = one
    return out
