"""Read encoded samples by shard and number: from mapped files, or by range requests while a shard downloads."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from stoker.core.scratch import scratch_directory
from stoker.core.threads import ThreadPool
from stoker.errors import InterruptError, StokerError, VerificationError
from stoker.sampling.order import Int64Array, SampleLocation
from stoker.shards.index import Index
from stoker.shards.sample import Buffer
from stoker.shards.shard_set import MappedFile, ShardSet
from stoker.storage import Entry, Store, check_name, local_path
from stoker.storage.cache import CachedFile, CacheStats, DiskCache, fetch

THREADS = {"fetch": 2, "range": 16}
"""Few threads download whole shards; many read single samples, each of which waits for one response."""
MAX_RESIDENT_BYTES = 96 << 20
"""Pages of the mapped shards are released after this many bytes were read, to limit the resident memory."""
FAULT_AROUND_BYTES = 64 << 10  # mapped by the kernel around each page fault


class EncodedSamples(NamedTuple):
    """Encoded images with their labels, and the seconds spent waiting for the network."""

    images: list[Buffer]
    labels: Int64Array
    fetch_s: float


class SampleBytes(NamedTuple):
    """Where an image is: the URL of its shard, offset and length, and the digest of the shard if it is known."""

    shard: str
    offset: int
    length: int
    sha256: str


class _ObjectArgs(TypedDict):
    """The arguments that name an object of a store."""

    store: Store
    name: str
    size: int
    sha256: str


class _OpenShard:
    """A shard in use: its index, and its mapped file once it is local."""

    def __init__(self, entry: Entry, index: Index) -> None:
        self.name, self.size = entry
        self.offsets = index["offset"].astype(np.int64)
        self.lengths = index["length"].astype(np.int64)
        self.labels = index["label"].astype(np.int64)
        self.file: MappedFile | None = None
        self.lease: CachedFile | None = None
        """Held while the file is in use, so that the cache does not evict it."""
        self.download: Future[MappedFile] | None = None
        self.needed = True
        self.read_unverified = False
        """Whether samples were read before the digest of the whole shard could be verified."""

    def release(self) -> None:
        """Cancel the download and allow eviction; threads that still read from it use range requests."""
        self.needed = False
        if self.download is not None:
            self.download.cancel()
        if self.lease is not None:
            self.lease.close()

    def keep_lease(self, cached: CachedFile) -> None:
        """Keep the file in the cache from now on, unless the shard was released in the meantime."""
        self.lease = cached
        if not self.needed:
            cached.close()


class Reader:
    """Reader of the samples of a shard set for many threads; opens shards on demand until keep_only() releases them."""

    def __init__(self, shard_set: ShardSet, *, cache: DiskCache | None = None) -> None:
        self._shard_set = shard_set
        self._local = local_path(shard_set.store.url)
        self._lock = threading.Lock()
        self._open: dict[int, Future[_OpenShard]] = {}
        self._touched = 0
        self._failed = False
        self._corrupt: VerificationError | None = None
        self._unverified: set[_OpenShard] = set()
        self._cache = cache
        self._scratch_dir: Path | None = None
        self._scratch = ExitStack()
        self._numbers = itertools.count()
        self._pools: dict[str, ThreadPool] = {}

    def start_iteration(self) -> None:
        """Prepare for an iteration: after a failure, release all shards so that they are fetched again."""
        if self._failed:
            self._failed = False
            self.keep_only(())

    def keep_only(self, shards: Iterable[int]) -> None:
        """Release all other shards and start to fetch these, in this order."""
        needed = dict.fromkeys(shards)
        with self._lock:
            released = [self._open.pop(number) for number in list(self._open) if number not in needed]
        for shard in released:
            shard.add_done_callback(_release)
        if self._local is None:
            for number in needed:
                self._open_shard(number)

    def read(self, location: SampleLocation) -> EncodedSamples:
        """Read samples from their shards: mapped if the shard is local, else by range requests."""
        images: list[Buffer] = []
        labels = np.empty(len(location.shards), dtype=np.int64)
        shards: dict[int, _OpenShard] = {}
        by_range: dict[int, tuple[_OpenShard, int]] = {}
        touched = 0
        started = time.perf_counter()
        if self._corrupt is not None:
            self._failed = True
            corrupt, self._corrupt = self._corrupt, None
            raise corrupt
        for number in set(location.shards.tolist()):
            shards[number] = shard = self._open_shard(number).result()
            try:
                self._take_download(shard)
            except StokerError as error:
                self._failed = True
                if not isinstance(error, VerificationError):
                    raise
                raise _name_sample(error, shard, int(location.samples[location.shards == number][0])) from error
        opened = time.perf_counter()
        for row, (number, sample) in enumerate(zip(location.shards.tolist(), location.samples.tolist(), strict=True)):
            shard = shards[number]
            labels[row] = shard.labels[sample]
            if shard.file is None:
                self._track_unverified(shard, sample)
                by_range[row] = (shard, sample)
                images.append(b"")
                continue
            offset, length = int(shard.offsets[sample]), int(shard.lengths[sample])
            images.append(shard.file.view[offset : offset + length])
            touched += length + FAULT_AROUND_BYTES
        self._release_pages(touched)
        if not by_range:
            return EncodedSamples(images, labels, 0.0 if self._local else opened - started)
        ranged = time.perf_counter()
        for row, data in zip(by_range, self._pool("range").map(self._read_range, by_range.values()), strict=True):
            images[row] = data
        return EncodedSamples(images, labels, opened - started + time.perf_counter() - ranged)

    def locate(self, number: int, sample: int) -> SampleBytes:
        """Return where the image of a sample is."""
        shard = self._open_shard(number).result()
        url, digest = self._shard_set.url_of(shard.name), self._object_args(shard)["sha256"]
        return SampleBytes(url, int(shard.offsets[sample]), int(shard.lengths[sample]), digest)

    @property
    def cache_stats(self) -> CacheStats | None:
        """The counters of the disk cache in this process; None without one."""
        return None if self._cache is None else self._cache.stats()

    def close(self) -> None:
        """Release all shards and stop all threads; shards fetched without a cache directory are deleted."""
        with self._lock:
            opened, self._open = self._open, {}
        for shard in opened.values():
            shard.add_done_callback(lambda done: _release(done, closing=True))
        for unverified in list(self._unverified):
            unverified.release()
        while self._pools:  # the last task of a pool may have started another pool
            with self._lock:
                pools, self._pools = self._pools, {}
            for pool in pools.values():
                pool.shutdown(wait=True, cancel_futures=True)
        for shard in opened.values():
            with suppress(InvalidStateError):  # it will not be opened any more, and a thread may wait for it
                shard.set_exception(InterruptError("loader was closed", where=self._shard_set.url))
        with self._lock:
            self._scratch_dir = None
            self._scratch.close()

    def _open_shard(self, number: int) -> Future[_OpenShard]:
        """Open a shard unless it is open: in this thread if it is local, otherwise in another."""
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                return shard
            shard = self._open[number] = Future()
        if self._local is None:
            self._pool("range").submit(self._load_shard, number, shard)
        else:
            self._load_shard(number, shard)
        return shard

    def _load_shard(self, number: int, shard: Future[_OpenShard]) -> None:
        try:
            entry = self._shard_set.shards[number]
            opened = _OpenShard(entry, self._shard_set.read_index(entry.name))
            if self._local is not None:
                opened.file = self._map_file(opened, self._local / check_name(self._shard_set.folder + entry.name))
            elif self._cache is not None and (cached := self._cache.find(**self._object_args(opened))):
                opened.file = self._map_cached(opened, cached)
            else:
                opened.download = self._pool("fetch").submit(self._fetch, opened)
        except BaseException as error:
            with self._lock:
                if self._open.get(number) is shard:  # the next caller tries again
                    del self._open[number]
            with suppress(InvalidStateError):  # closed in the meantime
                shard.set_exception(error)
        else:
            with suppress(InvalidStateError):
                shard.set_result(opened)

    def _fetch(self, shard: _OpenShard) -> MappedFile:
        """Download a shard and map it; without a cache, unlink the file at once so that nothing is left behind."""
        args = self._object_args(shard)
        if self._cache is not None and (cached := self._cache.open(is_needed=lambda: shard.needed, **args)):
            return self._map_cached(shard, cached)
        with self._lock:
            if self._scratch_dir is None:
                self._scratch_dir = self._scratch.enter_context(scratch_directory())
            path = self._scratch_dir / str(
                next(self._numbers)
            )  # a shard that is needed again may be fetched twice at once
        fetch(path=path, is_needed=lambda: shard.needed, **args)
        file = self._map_file(shard, path)
        path.unlink()
        return file

    def _map_cached(self, shard: _OpenShard, cached: CachedFile) -> MappedFile:
        file = self._map_file(shard, cached.path)
        shard.keep_lease(cached)
        return file

    def _object_args(self, shard: _OpenShard) -> _ObjectArgs:
        manifest_shard = self._shard_set.manifest_shards.get(shard.name)
        return {
            "store": self._shard_set.store,
            "name": self._shard_set.folder + shard.name,
            "size": shard.size,
            "sha256": "" if manifest_shard is None else manifest_shard.sha256,
        }

    def _take_download(self, shard: _OpenShard) -> None:
        """Map a shard whose download has finished; raise its error here, where its samples are needed.

        Wait for the download if the server does not support range requests: reading a single sample would transfer
        everything before it.
        """
        if shard.file is not None or shard.download is None or shard.download.cancelled():
            return
        if not shard.download.done() and getattr(self._shard_set.store, "supports_ranges", True):
            return
        try:
            shard.file = shard.download.result()
        except (InterruptError, CancelledError):  # the shard was released
            return

    def _track_unverified(self, shard: _OpenShard, sample: int) -> None:
        """Watch a shard that is read before it was verified: if verification fails, the next read raises the error."""
        if shard.read_unverified or shard.download is None:
            return
        shard.read_unverified = True
        self._unverified.add(shard)

        reader = weakref.ref(self)  # the callback must not keep a discarded reader alive

        def on_verified(done: Future[MappedFile]) -> None:
            if (self_alive := reader()) is None:
                return
            self_alive._unverified.discard(shard)
            if not done.cancelled() and isinstance(error := done.exception(), VerificationError):
                self_alive._corrupt = _name_sample(error, shard, sample)

        shard.download.add_done_callback(on_verified)

    def _map_file(self, shard: _OpenShard, path: Path) -> MappedFile:
        file = MappedFile(path)
        if len(file.view) != shard.size:
            raise VerificationError(
                f"has {len(file.view):,} bytes, expected {shard.size:,}",
                where=self._shard_set.url_of(shard.name),
                hint="the file was truncated or replaced: check the shard set with `stoker data verify`",
            )
        return file

    def _read_range(self, shard_and_sample: tuple[_OpenShard, int]) -> Buffer:
        shard, sample = shard_and_sample
        offset, length = int(shard.offsets[sample]), int(shard.lengths[sample])
        return self._shard_set.store.range(self._shard_set.folder + shard.name, offset, length)

    def _release_pages(self, touched: int) -> None:
        """Release the pages of all mapped shards if enough was read since the last time."""
        with self._lock:
            self._touched += touched
            if self._touched < MAX_RESIDENT_BYTES:
                return
            self._touched = 0
            opened = [shard.result() for shard in self._open.values() if shard.done() and not shard.exception()]
        for shard in opened:
            if shard.file is not None:
                shard.file.release()

    def _pool(self, kind: str) -> ThreadPool:
        with self._lock:
            if kind not in self._pools:
                self._pools[kind] = ThreadPool(THREADS[kind], f"stoker-{kind}")
            return self._pools[kind]


def _name_sample(error: VerificationError, shard: _OpenShard, sample: int) -> VerificationError:
    """Add the sample that was being read to the error of a shard."""
    what = f"{error.what} (reading the sample at byte {int(shard.offsets[sample]):,})"
    return VerificationError(what, where=error.where, hint=error.hint)


def _release(opened: Future[_OpenShard], *, closing: bool = False) -> None:
    """Release a shard; if it was read before it was verified, let the download finish first, unless `closing`."""
    if opened.exception() is not None:
        return
    shard = opened.result()
    if shard.read_unverified and shard.download is not None and not closing:
        shard.download.add_done_callback(lambda _: shard.release())
    else:
        shard.release()
