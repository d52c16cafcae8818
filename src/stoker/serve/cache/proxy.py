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

from stoker.errors import AccessError, ChangedError, DataFaultError, NotFoundError, StokerError
from stoker.serve.cache.origins import Origin, Origins
from stoker.serve.cache.slices import SLICE, About, Fetch, Kept, NoRoomError, SliceCache
from stoker.serve.http import Piece, RefusedError, Reply, Request, Span
from stoker.serve.ranges import Asked, Version, asked
from stoker.serve.stats import Stats

AHEAD = 2
"""Slices fetched before the one that is being sent is through."""
FETCHES = 32
"""Fetches at once; each holds a slice in memory."""
PASSING = 1 << 20
"""What passes by goes in pieces of this size, because each client holds one as long as it likes."""
ASK_AGAIN_S = 10.0
"""How long an origin that did not answer is not asked about what there is a copy of."""
ANEW_S = 30.0
"""How long what was fetched past the cache counts as fetched just now: a reader asks for it piece by piece."""
BYPASS = "x-stoker-bypass"

log = logging.getLogger(__name__)


class CacheSite:
    """Answers from the cache, and fills it from the origins."""

    def __init__(self, origins: Origins, cache: SliceCache, stats: Stats, *, fresh_s: float = 60.0) -> None:
        self._origins, self._cache, self._stats, self._fresh_s = origins, cache, stats, fresh_s
        self._flights: dict[str, Future[About]] = {}
        self._lock = threading.Lock()
        self._fetching = threading.BoundedSemaphore(FETCHES)

    def close(self) -> None:
        """Keep nothing more, and let another process have the folder."""
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
        anew = BYPASS in request.headers and request.method == "GET"
        with ExitStack() as held:
            kept, how = self._current(origin, name, key, held, anew=anew)
            version = Version(kept.about.size, kept.about.etag)
            part = asked(request.method, request.headers, version)
            headers = version.headers() | part.headers(version.size)
            headers |= {"Content-Type": "application/octet-stream", "X-Cache": how}
            if request.method == "HEAD" or not part.length:
                return Reply(part.status, headers, (), part.length)
            self._stats.add(**{"misses" if how == "MISS" else "hits": 1})
            body = _Body(
                self._cache, kept, part, self._fetcher(origin, name, kept), lambda: self._check(origin, name, kept)
            )
            held.callback(body.stop)
            body.begin()
            body.release = held.pop_all().close
            return Reply(part.status, headers, body, part.length)

    def _current(self, origin: Origin, name: str, key: str, held: ExitStack, *, anew: bool) -> tuple[Kept, str]:
        """Hold the object's current version, and tell whether it is a hit."""
        kept = held.enter_context(self._cache.reading(key))
        now = time.monotonic()
        if kept is not None and ((kept.about.whole and kept.about.sha256) or now < kept.anew_until):
            anew = False  # it could not be any better
        if kept is not None and not anew and now < kept.fresh_until:
            return kept, _how(kept)
        if kept is not None and kept.about.whole and not anew and now < origin.silent_until:
            kept.stale = True
            return kept, _how(kept)
        try:
            about = self._ask_once(origin, name, key)
        except NotFoundError:
            if kept is not None:
                self._cache.drop(kept)
            raise
        except (StokerError, RefusedError):
            origin.silent_until = time.monotonic() + ASK_AGAIN_S
            if kept is None or not kept.about.whole or anew:
                raise
            kept.stale = True
            return kept, _how(kept)
        if anew and kept is not None:
            self._cache.drop(kept)
        current = held.enter_context(self._cache.beginning(key, about))
        current.stale, current.fresh_until = False, time.monotonic() + self._fresh_s
        if anew:
            current.anew_until = time.monotonic() + ANEW_S
        return current, _how(current)

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

    def _fetcher(self, origin: Origin, name: str, kept: Kept) -> Fetch:
        """Give what fetches a part of this very version."""

        def fetch(start: int, length: int) -> bytes:
            try:
                with self._fetching:
                    data = origin.store.range(name, start, length, etag=kept.about.tag)
            except ChangedError:
                self._cache.drop(kept)  # the next request gets the new version
                raise
            self._stats.add(origin_requests=1, origin_bytes=len(data))
            return data

        return fetch

    def _check(self, origin: Origin, name: str, kept: Kept) -> None:
        """Check an object as a whole once all of it is there."""
        try:
            self._cache.check(kept)
        except DataFaultError:
            self._stats.add(spoilt=1)
            origin.forget_digests(name)  # the manifest may be the older one of the two
            raise


class _Body(Iterator[Piece]):
    """The slices of an answer, the next ones fetched while one is sent.

    The last bytes of a whole object are sent only when all of it was checked: what is wrong never looks complete.
    """

    def __init__(self, cache: SliceCache, kept: Kept, part: Asked, fetch: Fetch, check: Callable[[], None]) -> None:
        self._cache, self._kept, self._fetch, self._check = cache, kept, fetch, check
        self._at, self._end = part.start, part.start + part.length
        self._is_all = part.length == kept.about.size
        # Without any mark of its version, nothing tells whether two slices belong together.
        self._passes = kept.about.size > cache.budget or not (kept.about.tag or kept.about.sha256)
        self._passed: hashlib._Hash | None = None
        """The digest of what was sent, from the first piece on that passed by the cache."""
        self._file = -1
        self._first: Piece | None = None
        self._coming: list[threading.Thread] = []
        self.release: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Have the first piece, so that what fails at once can still be told in an answer."""
        self._first = next(self)

    def __next__(self) -> Piece:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        self._close_file()
        if self._at >= self._end:
            raise StopIteration
        piece = self._piece()
        self._digest(piece)
        self._at += len(piece) if isinstance(piece, bytes) else piece.length
        if self._at >= self._end:
            self._check_all()
        return piece

    def close(self) -> None:
        """Let go of everything; what is being fetched is waited for, because it needs the object's place."""
        self.stop()
        self.release()

    def stop(self) -> None:
        """Close the file, and wait for what is on its way."""
        self._close_file()
        for thread in self._coming:
            thread.join()
        self._coming = []

    def _piece(self) -> Piece:
        """Give what comes next: the rest of a slice, or a piece that passes by the cache, which keeps its budget."""
        size = self._kept.about.slice
        number = self._at // size
        end = min(self._end, (number + 1) * size)
        if not self._passes:
            self._fetch_ahead(number + 1, (self._end - 1) // size)
            with suppress(NoRoomError):
                self._file = self._cache.open(self._kept, number, self._fetch)
                return Span(self._file, self._at - number * size, end - self._at)
        return self._fetch(self._at, min(PASSING, end - self._at))

    def _fetch_ahead(self, first: int, last: int) -> None:
        for number in range(first, min(first + AHEAD - 1, last) + 1):
            if number not in self._kept.present and number not in self._kept.coming:
                thread = threading.Thread(target=self._bring, args=(number,), name="stoker-ahead", daemon=True)
                thread.start()
                self._coming.append(thread)

    def _bring(self, number: int) -> None:
        with suppress(StokerError, NoRoomError, OSError):  # whoever comes to it will be told
            os.close(self._cache.open(self._kept, number, self._fetch))

    def _digest(self, piece: Piece) -> None:
        """Follow what is sent of a whole object that does not all go through the cache."""
        if not (self._is_all and self._kept.about.sha256) or self._kept.about.whole:
            return
        if isinstance(piece, bytes):
            if self._passed is None:
                # Pieces pass by from a slice's beginning on: those before it lie in the cache.
                self._passed = self._cache.digest(self._kept, range(self._at // self._kept.about.slice))
            self._passed.update(piece)
        elif self._passed is not None:
            self._passed.update(os.pread(piece.file, piece.length, piece.offset))

    def _check_all(self) -> None:
        if self._kept.about.whole:
            return
        if self._passed is not None:
            if self._passed.hexdigest() != self._kept.about.sha256:
                raise DataFaultError("its sha256 is not the manifest's", where=self._kept.about.name)
        elif self._kept.complete and not self._passes:
            self._check()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _how(kept: Kept) -> str:
    if not kept.about.whole:
        return "MISS"
    return "STALE" if kept.stale else "HIT"


def _ask(origin: Origin, name: str) -> About:
    size, tag = origin.store.tag(name)
    known = origin.digest(name)
    if known is not None and known.size != size:
        origin.forget_digests(name)
        known = origin.digest(name)
    if known is not None and known.size != size:
        raise RefusedError(502, f"{name} is {size:,} bytes at the origin, and its manifest says {known.size:,}")
    sha256 = "" if known is None else known.sha256
    etag = f'"{hashlib.blake2b(f"{size} {sha256} {tag}".encode(), digest_size=12).hexdigest()}"'
    return About(name=f"{origin.shown}/{name}", size=size, tag=tag, etag=etag, sha256=sha256, slice=SLICE)


@contextmanager
def _answered() -> Iterator[None]:
    """Turn what goes wrong at an origin into an answer; logins and places are for the log alone."""
    try:
        yield
    except NotFoundError as error:
        raise RefusedError(404, error.what) from error
    except StokerError as error:
        log.warning("%s", error)
        raise RefusedError(403 if isinstance(error, AccessError) else 502, error.what) from error
