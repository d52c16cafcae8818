"""Shard sets made elsewhere: scanned once, and what a manifest would have told is kept in the local cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from stoker.core import spec
from stoker.errors import DataFaultError, InputError, NotFoundError, SourceError, UnavailableError
from stoker.shards.formats import FORMATS, LocatedSample
from stoker.shards.images import MAX_BYTES, too_large_reason
from stoker.shards.index import MAX_LABEL, IndexBuilder, index_name
from stoker.shards.manifest import MANIFEST, VERSION, WINDOW, Manifest, Shard, SourceInfo, default_lanes, read_manifest
from stoker.shards.shard_set import ShardSet
from stoker.storage import Entry, Store, local_path, open_store
from stoker.storage.local import translate_os_errors


def ensure_manifest(
    shard_set: ShardSet, *, jobs: int = 1, cache: Path | None = None, progress: Callable[[int], None] = lambda _: None
) -> ShardSet:
    """Give a set its manifest and indexes: its own, those that an earlier scan has kept, or those of a scan now.

    `progress` is told the bytes of each shard as it is done, from several threads.
    """
    if shard_set.manifest is not None:
        return shard_set
    cache = default_scan_cache() if cache is None else cache
    place = _canonical_location(shard_set)
    kept = cache / _cache_key(shard_set, place)
    with suppress(NotFoundError):
        return _load_cached(shard_set, kept)
    with _scan_lock(cache):
        with suppress(NotFoundError):
            return _load_cached(shard_set, kept)  # another process has scanned it meanwhile
        return _scan_into_cache(shard_set, kept, place, jobs, progress)


def _scan_into_cache(
    shard_set: ShardSet, kept: Path, place: str, jobs: int, progress: Callable[[int], None]
) -> ShardSet:
    cache = kept.parent
    with _cache_errors(cache):
        temporary = tempfile.TemporaryDirectory(prefix=f"{kept.name}.", dir=cache, ignore_cleanup_errors=True)
    with temporary as private:
        made = Path(private) / "scan"  # one deeper, for others may read what is kept
        store = open_store(str(made))
        shards = _scan_shards(shard_set, store, jobs, progress)
        manifest = _build_manifest(shard_set, Path(place).name or "dataset", shards)
        with _cache_errors(cache):
            store.put(MANIFEST, spec.to_json(manifest))
            read_manifest(store)  # what could not be read again must not be kept
            _move_into_cache(made, kept)
    return _load_cached(shard_set, kept)


def default_scan_cache() -> Path:
    """Where scans are kept: below STOKER_CACHE_DIR, else in the user's cache folder."""
    if own := os.environ.get("STOKER_CACHE_DIR"):
        return Path(own).expanduser() / "scans"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoker" / "scans"


@contextmanager
def _scan_lock(cache: Path) -> Iterator[None]:
    """Let one process scan at a time: all ranks of a machine begin at once, and the first can do it for all."""
    with _cache_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        folder = os.open(cache, os.O_RDONLY)
    try:
        with suppress(OSError):  # a filesystem without locks: each scans for itself
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _canonical_location(shard_set: ShardSet) -> str:
    """Where a set lies, without secrets, and the same from every working directory."""
    folder = local_path(shard_set.store.url)
    return shard_set.url if folder is None else str((folder / shard_set.folder).resolve())


def _cache_key(shard_set: ShardSet, place: str) -> str:
    """Name a set by all that can be told of it without reading: other shards must not be taken for these."""
    local = local_path(shard_set.store.url) is not None
    shards = [[*entry, _mtime_ns(Path(place, entry.name)) if local else None] for entry in shard_set.shards]
    facts = json.dumps([VERSION, place, shard_set.split, shard_set.format, shards])
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _mtime_ns(path: Path) -> int:
    with translate_os_errors(path):
        return path.stat().st_mtime_ns


def _load_cached(shard_set: ShardSet, kept: Path) -> ShardSet:
    """Give the set as a finished scan has described it."""
    store = open_store(str(kept))
    try:
        with _cache_errors(kept):
            return replace(shard_set, manifest=read_manifest(store), indexes=store)
    except InputError as error:
        error.hint = f"remove {kept} and the set is scanned anew"
        raise


def _move_into_cache(made: Path, kept: Path) -> None:
    """Put a finished scan in its place, or leave there what a process that scanned at the same time has put."""
    try:
        made.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise


def _scan_shards(shard_set: ShardSet, store: Store, jobs: int, progress: Callable[[int], None]) -> list[Shard]:
    """Walk every shard, one a thread, and write its index at once, so that memory does not grow with the set."""

    def scan(entry: Entry) -> Shard:
        rows = _index_shard(shard_set, entry)
        data = rows.to_bytes()
        with _cache_errors(Path(store.url)):
            store.put(index_name(entry.name), data)
        progress(entry.size)
        digest = hashlib.sha256(data).hexdigest()
        return Shard(name=entry.name, samples=len(rows), bytes=entry.size, sha256="", index_sha256=digest)

    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="scan") as pool:
        return list(pool.map(scan, shard_set.shards))


def _index_shard(shard_set: ShardSet, entry: Entry) -> IndexBuilder:
    """Find the images of one shard; their bytes are not looked at."""
    where = shard_set.url_of(entry.name)
    rows = IndexBuilder()
    with shard_set.map_shard(entry.name) as file:
        if len(file.view) != entry.size:
            what = f"{len(file.view):,} bytes, and {entry.size:,} a moment ago"
            raise DataFaultError(what, where=where, hint="try again when nobody writes it any more")
        try:
            for found in FORMATS.get(shard_set.format).iter_samples(file.view, where):
                _check_sample(found, where)
                rows.add(found.image_offset, len(found.sample.image), found.sample.label)
                file.release_before(found.end)
        except SourceError as error:
            hint = "mend or leave out this shard; stoker data verify tells every fault"
            raise DataFaultError(error.what, where=where, hint=hint) from error
    return rows


def _check_sample(found: LocatedSample, where: str) -> None:
    """Refuse what an index cannot hold."""
    sample = found.sample
    if not 0 <= sample.label <= MAX_LABEL:
        what = f"the label {sample.label}, not 0 to {MAX_LABEL}"
    elif len(sample.image) > MAX_BYTES:
        what = f"an image of {too_large_reason(len(sample.image))}"
    else:
        return
    raise SourceError(f"sample {sample.key!r} at byte {found.start} has {what}", where=where)


def _build_manifest(shard_set: ShardSet, name: str, shards: list[Shard]) -> Manifest:
    """Sum a scan up; what only the set's maker could know stays empty: class names, the shards' digests, the plan."""
    samples = sum(shard.samples for shard in shards)
    if samples == 0:
        what = f"there are no samples in its {len(shards):,} shards"
        raise InputError(what, where=shard_set.url, hint="name other shards, or make some with: stoker data convert")
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        digest.update(spec.to_json(shard))
    return Manifest(
        version=VERSION,
        name=name,
        split=shard_set.split,
        format=shard_set.format,
        samples=samples,
        bytes=sum(shard.bytes for shard in shards),
        quarantined=0,
        classes=(),
        seed=0,
        lanes=default_lanes(len(shards)),
        window=WINDOW,
        source=SourceInfo(kind="scan", samples=samples, digest=digest.hexdigest()),
        shrunk=None,
        plan="",
        shards=tuple(shards),
    )


@contextmanager
def _cache_errors(path: Path) -> Iterator[None]:
    """Say what helps when the cache cannot be used."""
    try:
        with translate_os_errors(path):
            yield
    except (NotFoundError, UnavailableError) as error:
        error.hint = "set STOKER_CACHE_DIR to a folder that can be written and has space"
        raise
