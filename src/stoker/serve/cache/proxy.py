"""Caching proxy in front of named origins: concurrent misses share one fetch, only verified objects are hits."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress

from stoker.errors import AccessDeniedError, NotFoundError, ObjectChangedError, StokerError, VerificationError
from stoker.serve.cache.origins import Origin, Origins
from stoker.serve.cache.slices import SLICE_BYTES, CachedObject, CacheFullError, Fetch, ObjectInfo, SliceCache
from stoker.serve.http import Chunk, FileRegion, HttpStatusError, Request, Response
from stoker.serve.ranges import ObjectVersion, ResponseRange, evaluate_request
from stoker.serve.stats import ServerStats

PREFETCH_SLICES = 2
"""Slices to prefetch while one is being sent."""
MAX_CONCURRENT_FETCHES = 32
"""Each running fetch holds a slice in memory."""
UNCACHED_CHUNK_BYTES = 1 << 20
"""Chunk size of uncached objects; each client holds one chunk in memory, however slow it is."""
ORIGIN_RETRY_S = 10.0
"""How long cached objects are not revalidated after their origin did not respond."""
BYPASS_FRESHNESS_S = 30.0
"""How long an object refetched by a bypassing request serves further ones: readers request it range by range."""
BYPASS_HEADER = "x-stoker-bypass"

log = logging.getLogger(__name__)


class CachingProxy:
    """Request handler that serves objects from the cache, and fetches misses from the origins."""

    def __init__(
        self, origins: Origins, cache: SliceCache, stats: ServerStats, *, revalidate_after_s: float = 60.0
    ) -> None:
        self._origins, self._cache, self._stats, self._revalidate_after_s = origins, cache, stats, revalidate_after_s
        self._lookups: dict[str, Future[ObjectInfo]] = {}
        self._lock = threading.Lock()
        self._fetch_slots = threading.BoundedSemaphore(MAX_CONCURRENT_FETCHES)

    def close(self) -> None:
        """Stop caching, and unlock the folder for another process."""
        self._cache.close()

    def __call__(self, request: Request) -> Response:
        """Handle one request."""
        if request.method not in ("GET", "HEAD"):
            return Response.text(405, "this cache is read-only", Allow="GET, HEAD")
        origin, name = self._origins.resolve(request.path)
        with _translate_errors():
            if not name or name.endswith("/"):
                return origin.list_folder(name)
            return self._serve_object(origin, name, request)

    def _serve_object(self, origin: Origin, name: str, request: Request) -> Response:
        key = hashlib.blake2b(f"{origin.url}\0{name}".encode(), digest_size=20).hexdigest()
        bypass = BYPASS_HEADER in request.headers and request.method == "GET"
        with ExitStack() as pins:
            cached, cache_status = self._pin_current(origin, name, key, pins, bypass=bypass)
            version = ObjectVersion(cached.info.size, cached.info.etag)
            selected = evaluate_request(request.method, request.headers, version)
            headers = version.headers() | selected.headers(version.size)
            headers |= {"Content-Type": "application/octet-stream", "X-Cache": cache_status}
            if request.method == "HEAD" or not selected.length:
                return Response(selected.status, headers, (), selected.length)
            self._stats.add(**{"misses" if cache_status == "MISS" else "hits": 1})
            body = _CachedBody(
                self._cache,
                cached,
                selected,
                self._fetcher(origin, name, cached),
                lambda: self._verify(origin, name, cached),
            )
            pins.callback(body.stop)
            body.load_first_chunk()
            body.release = pins.pop_all().close
            return Response(selected.status, headers, body, selected.length)

    def _pin_current(
        self, origin: Origin, name: str, key: str, pins: ExitStack, *, bypass: bool
    ) -> tuple[CachedObject, str]:
        """Pin the object's current version; return it and its cache status."""
        cached = pins.enter_context(self._cache.pin(key))
        now = time.monotonic()
        if cached is not None and ((cached.info.verified and cached.info.sha256) or now < cached.bypass_fresh_until):
            bypass = False  # verified or just refetched: a new fetch would not help
        if cached is not None and not bypass and now < cached.fresh_until:
            return cached, _cache_status(cached)
        if cached is not None and cached.info.verified and not bypass and now < origin.unavailable_until:
            cached.stale = True
            return cached, _cache_status(cached)
        try:
            info = self._lookup_once(origin, name, key)
        except NotFoundError:
            if cached is not None:
                self._cache.drop(cached)
            raise
        except (StokerError, HttpStatusError):
            origin.unavailable_until = time.monotonic() + ORIGIN_RETRY_S
            if cached is None or not cached.info.verified or bypass:
                raise
            cached.stale = True
            return cached, _cache_status(cached)
        if bypass and cached is not None:
            self._cache.drop(cached)
        current = pins.enter_context(self._cache.pin_version(key, info))
        current.stale, current.fresh_until = False, time.monotonic() + self._revalidate_after_s
        if bypass:
            current.bypass_fresh_until = time.monotonic() + BYPASS_FRESHNESS_S
        return current, _cache_status(current)

    def _lookup_once(self, origin: Origin, name: str, key: str) -> ObjectInfo:
        """Return an object's current metadata from the origin; concurrent calls share one request."""
        with self._lock:
            lookup = self._lookups.get(key)
            is_first = lookup is None
            if lookup is None:
                lookup = self._lookups[key] = Future()
        if is_first:
            try:
                lookup.set_result(_lookup(origin, name))
            except BaseException as error:
                lookup.set_exception(error)
            finally:
                with self._lock:
                    del self._lookups[key]
        return lookup.result()

    def _fetcher(self, origin: Origin, name: str, cached: CachedObject) -> Fetch:
        """Return a function that fetches a range of this version."""

        def fetch(start: int, length: int) -> bytes:
            try:
                with self._fetch_slots:
                    data = origin.store.range(name, start, length, etag=cached.info.origin_etag)
            except ObjectChangedError:
                self._cache.drop(cached)  # the next request fetches the new version
                raise
            self._stats.add(origin_requests=1, origin_bytes=len(data))
            return data

        return fetch

    def _verify(self, origin: Origin, name: str, cached: CachedObject) -> None:
        """Verify a complete object against its digest."""
        try:
            self._cache.verify(cached)
        except VerificationError:
            self._stats.add(spoilt=1)
            origin.forget_digests(name)  # the manifest may be the outdated one
            raise


class _CachedBody(Iterator[Chunk]):
    """A response body made of slices, with the next ones prefetched while one is sent.

    The last bytes of a whole object are sent only after it was verified: a corrupt object never looks complete.
    """

    def __init__(
        self, cache: SliceCache, cached: CachedObject, selected: ResponseRange, fetch: Fetch, verify: Callable[[], None]
    ) -> None:
        self._cache, self._cached, self._fetch, self._verify = cache, cached, fetch, verify
        self._offset, self._end = selected.start, selected.start + selected.length
        self._is_whole_object = selected.length == cached.info.size
        # Without a validator or digest, slices of different versions could be mixed.
        self._bypasses_cache = cached.info.size > cache.budget or not (cached.info.origin_etag or cached.info.sha256)
        self._sent_digest: hashlib._Hash | None = None
        """The running digest of a response that was partly sent without the cache."""
        self._file = -1
        self._first: Chunk | None = None
        self._prefetches: list[threading.Thread] = []
        self.release: Callable[[], None] = lambda: None

    def load_first_chunk(self) -> None:
        """Load the first chunk, so that an immediate failure still gets an error response."""
        self._first = next(self)

    def __next__(self) -> Chunk:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._close_file()
        if self._offset >= self._end:
            raise StopIteration
        chunk = self._next_chunk()
        self._update_digest(chunk)
        self._offset += len(chunk) if isinstance(chunk, bytes) else chunk.length
        if self._offset >= self._end:
            self._verify_complete()
        return chunk

    def close(self) -> None:
        """Release everything, after waiting for prefetches, which use the pinned object."""
        self.stop()
        self.release()

    def stop(self) -> None:
        """Close the file, and wait for prefetches."""
        self._close_file()
        for thread in self._prefetches:
            thread.join()
        self._prefetches = []

    def _next_chunk(self) -> Chunk:
        """Return the rest of a slice, or an uncached chunk if the cache is full."""
        size = self._cached.info.slice_bytes
        number = self._offset // size
        end = min(self._end, (number + 1) * size)
        if not self._bypasses_cache:
            self._start_prefetches(number + 1, (self._end - 1) // size)
            with suppress(CacheFullError):
                self._file = self._cache.open_slice(self._cached, number, self._fetch)
                return FileRegion(self._file, self._offset - number * size, end - self._offset)
        return self._fetch(self._offset, min(UNCACHED_CHUNK_BYTES, end - self._offset))

    def _start_prefetches(self, first: int, last: int) -> None:
        for number in range(first, min(first + PREFETCH_SLICES - 1, last) + 1):
            if number not in self._cached.present and number not in self._cached.fetches:
                thread = threading.Thread(target=self._prefetch, args=(number,), name="stoker-ahead", daemon=True)
                thread.start()
                self._prefetches.append(thread)

    def _prefetch(self, number: int) -> None:
        with suppress(Exception):  # reported to whoever reads the slice
            os.close(self._cache.open_slice(self._cached, number, self._fetch))

    def _update_digest(self, chunk: Chunk) -> None:
        """Update the digest of a whole object that is partly sent without the cache."""
        if not (self._is_whole_object and self._cached.info.sha256) or self._cached.info.verified:
            return
        if isinstance(chunk, bytes):
            if self._sent_digest is None:
                # Uncached chunks start at a slice boundary: the slices before it are cached.
                self._sent_digest = self._cache.digest(
                    self._cached, range(self._offset // self._cached.info.slice_bytes)
                )
            self._sent_digest.update(chunk)
        elif self._sent_digest is not None:
            self._sent_digest.update(os.pread(chunk.file, chunk.length, chunk.offset))

    def _verify_complete(self) -> None:
        if self._cached.info.verified:
            return
        if self._sent_digest is not None:
            if self._sent_digest.hexdigest() != self._cached.info.sha256:
                raise VerificationError("sha256 does not match the manifest", where=self._cached.info.name)
        elif self._cached.is_complete and not self._bypasses_cache:
            self._verify()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _cache_status(cached: CachedObject) -> str:
    if not cached.info.verified:
        return "MISS"
    return "STALE" if cached.stale else "HIT"


def _lookup(origin: Origin, name: str) -> ObjectInfo:
    size, origin_etag = origin.store.head(name)
    digest = origin.digest(name)
    if digest is not None and digest.size != size:
        origin.forget_digests(name)
        digest = origin.digest(name)
    if digest is not None and digest.size != size:
        raise HttpStatusError(502, f"{name} has {size:,} bytes on the origin, but its manifest lists {digest.size:,}")
    sha256 = "" if digest is None else digest.sha256
    etag = f'"{hashlib.blake2b(f"{size} {sha256} {origin_etag}".encode(), digest_size=12).hexdigest()}"'
    return ObjectInfo(
        name=f"{origin.redacted_url}/{name}",
        size=size,
        origin_etag=origin_etag,
        etag=etag,
        sha256=sha256,
        slice_bytes=SLICE_BYTES,
    )


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Convert errors of an origin into error responses; credentials and URLs only go to the log."""
    try:
        yield
    except NotFoundError as error:
        raise HttpStatusError(404, error.what) from error
    except StokerError as error:
        log.warning("%s", error)
        raise HttpStatusError(403 if isinstance(error, AccessDeniedError) else 502, error.what) from error
