"""Scan foreign shard sets, written by other tools, once; keep their manifest and indexes in the local cache."""

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
from stoker.errors import InputError, NotFoundError, SourceError, UnavailableError, VerificationError
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
    """Return a shard set with manifest and indexes: its own, those of an earlier scan in the cache, or of a scan now.

    `progress` is called with the bytes of each finished shard, from several threads.
    """
    if shard_set.manifest is not None:
        return shard_set
    cache = default_scan_cache() if cache is None else cache
    location = _canonical_location(shard_set)
    cached = cache / _cache_key(shard_set, location)
    with suppress(NotFoundError):
        return _load_cached(shard_set, cached)
    with _scan_lock(cache):
        with suppress(NotFoundError):
            return _load_cached(shard_set, cached)  # another process has scanned it in the meantime
        return _scan_into_cache(shard_set, cached, location, jobs, progress)


def _scan_into_cache(
    shard_set: ShardSet, cached: Path, location: str, jobs: int, progress: Callable[[int], None]
) -> ShardSet:
    cache = cached.parent
    with _translate_cache_errors(cache):
        temporary = tempfile.TemporaryDirectory(prefix=f"{cached.name}.", dir=cache, ignore_cleanup_errors=True)
    with temporary as private:
        scan = Path(private) / "scan"  # a subfolder, because the temporary folder itself is private to this user
        store = open_store(str(scan))
        shards = _scan_shards(shard_set, store, jobs, progress)
        manifest = _build_manifest(shard_set, Path(location).name or "dataset", shards)
        with _translate_cache_errors(cache):
            store.put(MANIFEST, spec.to_json(manifest))
            read_manifest(store)  # never cache a manifest that cannot be read
            _move_into_cache(scan, cached)
    return _load_cached(shard_set, cached)


def default_scan_cache() -> Path:
    """Return the folder for scans: below STOKER_CACHE_DIR, else in the user's cache folder."""
    if own := os.environ.get("STOKER_CACHE_DIR"):
        return Path(own).expanduser() / "scans"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoker" / "scans"


@contextmanager
def _scan_lock(cache: Path) -> Iterator[None]:
    """Hold a lock so that one process scans at a time: all ranks of a machine start at once, and need only one scan."""
    with _translate_cache_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        folder = os.open(cache, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: every process scans
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _canonical_location(shard_set: ShardSet) -> str:
    """Return the URL or absolute path of a shard set, without secrets."""
    folder = local_path(shard_set.store.url)
    return shard_set.url if folder is None else str((folder / shard_set.folder).resolve())


def _cache_key(shard_set: ShardSet, location: str) -> str:
    """Return a digest of everything known about a shard set without reading it: location, names, sizes and times."""
    local = local_path(shard_set.store.url) is not None
    shards = [[*entry, _mtime_ns(Path(location, entry.name)) if local else None] for entry in shard_set.shards]
    facts = json.dumps([VERSION, location, shard_set.split, shard_set.format, shards])
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _mtime_ns(path: Path) -> int:
    with translate_os_errors(path):
        return path.stat().st_mtime_ns


def _load_cached(shard_set: ShardSet, cached: Path) -> ShardSet:
    """Return the shard set with the manifest and indexes of a finished scan."""
    store = open_store(str(cached))
    try:
        with _translate_cache_errors(cached):
            return replace(shard_set, manifest=read_manifest(store), indexes=store)
    except InputError as error:
        error.hint = f"remove {cached} to scan the shard set again"
        raise


def _move_into_cache(scan: Path, cached: Path) -> None:
    """Move a finished scan into the cache, unless another process was faster."""
    try:
        scan.rename(cached)
    except OSError:
        if not cached.is_dir():
            raise


def _scan_shards(shard_set: ShardSet, store: Store, jobs: int, progress: Callable[[int], None]) -> list[Shard]:
    """Scan the shards, one per thread; write each index immediately, so that memory does not grow with the dataset."""

    def scan(entry: Entry) -> Shard:
        rows = _index_shard(shard_set, entry)
        data = rows.to_bytes()
        with _translate_cache_errors(Path(store.url)):
            store.put(index_name(entry.name), data)
        progress(entry.size)
        digest = hashlib.sha256(data).hexdigest()
        return Shard(name=entry.name, samples=len(rows), bytes=entry.size, sha256="", index_sha256=digest)

    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="scan") as pool:
        return list(pool.map(scan, shard_set.shards))


def _index_shard(shard_set: ShardSet, entry: Entry) -> IndexBuilder:
    """Build the index of one shard, without decoding its images."""
    where = shard_set.url_of(entry.name)
    rows = IndexBuilder()
    with shard_set.map_shard(entry.name) as file:
        if len(file.view) != entry.size:
            what = f"the size changed during the scan, from {entry.size:,} to {len(file.view):,} bytes"
            raise VerificationError(what, where=where, hint="scan again when nothing writes to the shard")
        try:
            for located in FORMATS.get(shard_set.format).iter_samples(file.view, where):
                _check_sample(located, where)
                rows.add(located.image_offset, len(located.sample.image), located.sample.label)
                file.release_before(located.end)
        except SourceError as error:
            hint = "fix or leave out this shard; run stoker data verify to list every problem"
            raise VerificationError(error.what, where=where, hint=hint) from error
    return rows


def _check_sample(located: LocatedSample, where: str) -> None:
    """Raise SourceError for a sample that an index cannot hold."""
    sample = located.sample
    if not 0 <= sample.label <= MAX_LABEL:
        what = f"the label {sample.label}, which must be between 0 and {MAX_LABEL}"
    elif len(sample.image) > MAX_BYTES:
        what = f"an image that is too large: {too_large_reason(len(sample.image))}"
    else:
        return
    raise SourceError(f"sample {sample.key!r} at byte {located.start} has {what}", where=where)


def _build_manifest(shard_set: ShardSet, name: str, shards: list[Shard]) -> Manifest:
    """Build the manifest of a scan; class names, shard digests and plan stay empty, as a scan cannot know them."""
    samples = sum(shard.samples for shard in shards)
    if samples == 0:
        what = f"none of the {len(shards):,} shards has samples"
        raise InputError(
            what, where=shard_set.url, hint="choose other shards, or create some with: stoker data convert SOURCE DEST"
        )
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
def _translate_cache_errors(path: Path) -> Iterator[None]:
    """Translate OSErrors; when the cache cannot be used, add the hint to choose another folder."""
    try:
        with translate_os_errors(path):
            yield
    except (NotFoundError, UnavailableError) as error:
        error.hint = "set STOKER_CACHE_DIR to a writable directory with free space"
        raise
