"""A caching site in front of named origins: one fetch for all who wait, and only what was checked is a hit."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue

from stoker.errors import AccessError, ChangedError, FullError, NotFoundError, StokerError
from stoker.serve.http import Piece, RefusedError, Reply, Request, Span
from stoker.serve.origins import Origin, Origins
from stoker.serve.ranges import Asked, Version, asked
from stoker.serve.slices import SLICE, About, Kept, NoRoomError, SliceCache
from stoker.serve.stats import Stats

AHEAD = 2
"""Slices fetched before the one that is being sent is through."""
GRACE_S = 2.0
BYPASS = "x-stoker-bypass"

log = logging.getLogger(__name__)


class CacheSite:
    """Answers from the cache, and fills it from the origins."""

    def __init__(self, origins: Origins, cache: SliceCache, stats: Stats, *, fresh_s: float = 60.0) -> None:
        self._origins, self._cache, self._stats, self._fresh_s = origins, cache, stats, fresh_s
        self._flights: dict[str, Future[About]] = {}
        self._lock = threading.Lock()
        self._pool = _Ahead(32)

    def close(self) -> None:
        """End the threads, and let another process have the folder."""
        self._pool.close()
        self._cache.close()

    def __call__(self, request: Request) -> Reply:
        """Answer one request."""
        if request.method not in ("GET", "HEAD"):
            return Reply.text(405, "a cache is read-only", Allow="GET, HEAD")
        origin, name = self._origins.find(request.path)
        with _answered():
            if not name or name.endswith("/"):
                return origin.listing(name)
            return self._object(origin, name, request)

    def _object(self, origin: Origin, name: str, request: Request) -> Reply:
        key = hashlib.blake2b(f"{origin.url}\0{name}".encode(), digest_size=20).hexdigest()
        with ExitStack() as held:
            kept, how = self._current(origin, name, key, held, anew=BYPASS in request.headers)
            version = Version(kept.about.size, kept.about.etag)
            part = asked(request.headers, version)
            headers = version.headers() | part.headers(version.size)
            headers |= {"Content-Type": "application/octet-stream", "X-Cache": how}
            if request.method == "HEAD" or not part.length:
                return Reply(part.status, headers, (), part.length)
            self._stats.add(**{"misses" if how == "MISS" else "hits": 1})
            body = _Body(self._cache, kept, part, self._fetcher(origin, name, kept), self._pool, self._check)
            held.callback(body.stop)
            body.begin()
            body.release = held.pop_all().close
            return Reply(part.status, headers, body, part.length)

    def _current(self, origin: Origin, name: str, key: str, held: ExitStack, *, anew: bool) -> tuple[Kept, str]:
        """Hold the object's current version, and tell whether it is a hit."""
        kept = held.enter_context(self._cache.reading(key))
        if kept is not None and not anew and time.monotonic() < kept.fresh_until:
            return kept, "HIT" if kept.about.whole else "MISS"
        try:
            about = self._ask_once(origin, name, key)
        except (NotFoundError, AccessError):
            if kept is not None:
                self._cache.drop(kept)
            raise
        except StokerError:
            if kept is None or not kept.about.whole or anew:
                raise
            return kept, "STALE"
        if anew and kept is not None:
            self._cache.drop(kept)
        now = held.enter_context(self._cache.beginning(key, about))
        now.fresh_until = time.monotonic() + self._fresh_s
        return now, "HIT" if now.about.whole else "MISS"

    def _ask_once(self, origin: Origin, name: str, key: str) -> About:
        """Ask the origin for an object's version; many who ask at the same time ask once."""
        with self._lock:
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if leads:
            try:
                flight.set_result(_ask(origin, name))
            except BaseException as error:
                flight.set_exception(error)
            finally:
                with self._lock:
                    del self._flights[key]
        return flight.result()

    def _fetcher(self, origin: Origin, name: str, kept: Kept) -> Callable[[int, int], bytes]:
        """Give what fetches a part of this very version."""

        def fetch(start: int, length: int) -> bytes:
            try:
                data = origin.store.range(name, start, length, etag=kept.about.tag)
            except ChangedError:
                self._cache.drop(kept)  # the next request gets the new version
                raise
            self._stats.add(origin_requests=1, origin_bytes=len(data))
            return data

        return fetch

    def _check(self, kept: Kept) -> None:
        """Check an object as a whole once all of it is there."""
        try:
            self._cache.check(kept)
        except StokerError:
            self._stats.add(spoilt=1)
            raise


class _Body(Iterator[Piece]):
    """The slices of an answer, the next ones fetched while one is sent.

    The last slice of an object is sent only when the whole was checked: what is wrong never looks complete.
    """

    def __init__(
        self,
        cache: SliceCache,
        kept: Kept,
        part: Asked,
        fetch: Callable[[int, int], bytes],
        pool: _Ahead,
        check: Callable[[Kept], None],
    ) -> None:
        self._cache, self._kept, self._part, self._fetch, self._pool, self._check = (
            cache,
            kept,
            part,
            fetch,
            pool,
            check,
        )
        size = kept.about.slice
        self._next, self._last = part.start // size, (part.start + part.length - 1) // size
        self._file = -1
        self._first: Piece | None = None
        self._coming: list[Future[None]] = []
        self.release: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Have the first piece, so that what fails at once can still be told in an answer."""
        self._first = next(self)

    def __next__(self) -> Piece:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._close_file()
        if self._next > self._last:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        for later in range(self._next, min(number + AHEAD, self._last) + 1):
            if later not in self._kept.present and later not in self._kept.coming:
                self._coming.append(self._pool.submit(self._bring, later))
        return self._piece(number)

    def close(self) -> None:
        """Let go of everything; what is being fetched is waited for, because it needs the object's place."""
        self.stop()
        self.release()

    def stop(self) -> None:
        """Close the file, and end what is on its way."""
        self._close_file()
        coming, self._coming = self._coming, []
        for one in coming:
            if not one.cancel():
                one.exception()

    def _piece(self, number: int) -> Piece:
        size = self._kept.about.slice
        first = max(self._part.start, number * size)
        end = min(self._part.start + self._part.length, (number + 1) * size)
        try:
            self._file = self._open(number)
        except (NoRoomError, FullError):
            return self._fetch(first, end - first)  # past the cache, which keeps its budget
        if not self._kept.about.whole and len(self._kept.present) == self._kept.count:
            self._check(self._kept)
        return Span(self._file, first - number * size, end - first)

    def _open(self, number: int) -> int:
        if self._kept.about.size > self._cache.budget:
            raise NoRoomError
        return self._cache.open(self._kept, number, self._fetch)

    def _bring(self, number: int) -> None:
        with suppress(StokerError, NoRoomError, OSError):  # whoever comes to it will be told
            os.close(self._open(number))

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class _Ahead:
    """Threads that fetch ahead; an end waits for them only a moment, because an origin may be silent for long."""

    def __init__(self, count: int) -> None:
        self._tasks: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="stoker-ahead", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[int], None], number: int) -> Future[None]:
        future: Future[None] = Future()
        self._tasks.put((future, lambda: work(number)))
        return future

    def close(self) -> None:
        with suppress(Empty):
            while task := self._tasks.get_nowait():
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while task := self._tasks.get():
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)


def _ask(origin: Origin, name: str) -> About:
    size, tag = origin.store.tag(name)
    known = origin.digest(name)
    if known is not None and known.size != size:
        raise RefusedError(502, f"{name} is {size:,} bytes at the origin, and its manifest says {known.size:,}")
    sha256 = "" if known is None else known.sha256
    etag = f'"{hashlib.blake2b(f"{size}{tag}{sha256}".encode(), digest_size=12).hexdigest()}"'
    return About(name=f"{origin.shown}/{name}", size=size, tag=tag, etag=etag, sha256=sha256, slice=SLICE)


@contextmanager
def _answered() -> Iterator[None]:
    """Turn what goes wrong at an origin into an answer."""
    try:
        yield
    except NotFoundError as error:
        raise RefusedError(404, str(error)) from error
    except AccessError as error:
        raise RefusedError(403, str(error)) from error
    except StokerError as error:
        raise RefusedError(502, str(error)) from error
