"""Objects of any store as verified local files, kept in a folder that all processes of a machine share.

What lies in the folder `objects` of a cache:

    <key>                         a copy, whole and verified; the key is its sha256, or else tells its URL and version
    <key>.<version>.<size>.part   a copy on its way, of one version; its name keeps room for all `size` bytes
    lock                          held for a moment by who makes room, publishes or removes

Locks are flock's, which end with their process however it ends: a shared one on a copy while it is in use, an
exclusive one on a part while it is fetched. Names change only under `lock`, so that there is nothing else to agree on.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from stoker.errors import ChangedError, DataFaultError, FullError, StoppedError, UnavailableError
from stoker.storage import Store, Tag, shown
from stoker.storage.local import explained

CHUNK = 8 << 20
CHANGES = 2
"""How often an object may be replaced while it is fetched before it is given up."""
POLL_S = 0.02
POLLS = 10
"""How often who waits for another's fetch looks for the copy before it looks whether that other one still lives."""
STALE_S = 24 * 3600.0
"""Parts that nobody has gone on with for so long are removed, also where there is room."""

_COPY = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PART = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\.[0-9a-f]{16}\.(?P<size>[0-9]{1,18})\.part")

log = logging.getLogger(__name__)

T = TypeVar("T")
Wanted = Callable[[], bool]


def always() -> bool:
    """Want it, whatever happens."""
    return True


class Stats(NamedTuple):
    """What one cache did in this process; a miss is a fetch that it began, or had no room for."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    evictions: int = 0


class Held:
    """A verified local file that no process removes until this is closed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._close = weakref.finalize(self, os.close, lock)

    def close(self) -> None:
        """Let others remove the file; what is mapped or open stays readable."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Cache:
    """Copies of objects in a folder, at most `budget` bytes of them with all that is on its way.

    Many processes and threads may use one folder, with one budget; an object that several want is fetched by one.
    """

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self.folder, self.budget = folder, budget
        self._place = folder / "objects"
        self._told = False
        self._stats = Stats()
        self._counting = threading.Lock()

    def find(self, store: Store, name: str, *, size: int | None = None, sha256: str = "") -> Held | None:
        """Give an object's copy if there is one; only where no digest is known is the store asked, for its version."""
        tag = Tag(-1, "") if sha256 else _tag(store, name, size, sha256)
        with explained(self._place):
            held = _held(self._place / _key(store, name, tag, sha256), size)
        if held is not None:
            self._count(hits=1)
        return held

    def open(
        self, store: Store, name: str, *, size: int | None = None, sha256: str = "", wanted: Wanted = always
    ) -> Held | None:
        """Give an object's copy, fetched if need be; None where the budget or the disk has no room for it."""
        if sha256 and (held := self.find(store, name, size=size, sha256=sha256)):
            return held
        try:
            held = twice(store, lambda source: self._open(source, name, size, sha256, wanted))
            reason = f"{self.folder} has no room for it beside what is in use"
        except FullError as error:
            held, reason = None, str(error)
        if held is None and not self._told:
            self._told = True  # once, for where there is no room for one there is none for many
            log.warning("%s is not kept in the cache: %s", _where(store, name), reason)
        return held

    def stats(self) -> Stats:
        """Tell what this cache did in this process."""
        return self._stats

    def _open(self, store: Store, name: str, size: int | None, sha256: str, wanted: Wanted) -> Held | None:
        """Fetch one version of an object, and another one if it is replaced meanwhile."""
        changes = 0
        while True:
            tag = _tag(store, name, size, sha256)
            if sha256 and changes == CHANGES:  # mirrors may disagree on the tag of one object; its digest decides
                tag = tag._replace(etag="")
            try:
                with explained(self._place), suppress(FileNotFoundError):
                    return self._one_flight(store, name, tag, sha256, wanted)
                return None  # somebody has removed the folder meanwhile
            except ChangedError:
                changes += 1
                if changes > CHANGES:
                    raise

    def _one_flight(self, store: Store, name: str, tag: Tag, sha256: str, wanted: Wanted) -> Held | None:
        """Wait while another process fetches the object, then take its copy or go on with its part."""
        key = _key(store, name, tag, sha256)
        copy = self._place / key
        part = self._place / f"{key}.{_short(tag.etag, 8)}.{tag.size}.part"
        while True:
            with self._alone():
                if held := _held(copy, tag.size):
                    self._count(hits=1)
                    return held
                if not self._is_coming(key, part):
                    self._count(misses=1)
                    if not part.exists() and not self._make_room(tag.size):
                        return None
                    lock = _lock(part, create=True)
                    assert lock is not None  # parts are locked only by who holds the folder's lock
                    break
            for _ in range(POLLS):
                if not wanted():
                    raise _unwanted(store, name)
                if copy.exists():
                    break
                time.sleep(POLL_S)
        try:
            self._fill(lock, store, name, tag, sha256, wanted)
            with self._alone():
                part.rename(copy)
                fcntl.flock(lock, fcntl.LOCK_SH)  # not in one step, but nobody removes anything meanwhile
                _exclusive.discard(lock)
            return Held(copy, lock)
        except BaseException as error:
            try:
                if isinstance(error, DataFaultError | ChangedError | OSError) or not os.fstat(lock).st_size:
                    with self._alone():
                        part.unlink(missing_ok=True)
            finally:
                _unlock(lock)
            raise

    def _fill(self, part: int, store: Store, name: str, tag: Tag, sha256: str, wanted: Wanted) -> None:
        """Fetch what a part lacks; its first bytes are used if a digest or tag can tell that they fit the rest."""
        resumed = 0 < os.fstat(part).st_size <= tag.size and bool(sha256 or tag.etag)
        with open(part, "r+b", buffering=0, closefd=False) as file:
            rest = partial(
                fill, file, store, name, size=tag.size, sha256=sha256, etag=tag.etag, wanted=wanted, got=self._fetched
            )
            try:
                if not resumed:
                    file.truncate(0)
                rest()
            except DataFaultError:
                if not resumed:
                    raise
                file.seek(0)
                file.truncate()  # the beginning may be to blame, and so nobody else yet
                rest()
        os.fsync(part)

    def _is_coming(self, key: str, ours: Path) -> bool:
        """Tell whether somebody fetches this object; remove parts of its other versions, and all that are stale."""
        coming = False
        for part in self._entries(_PART):
            same = part.key == key
            if part.is_stale() or (same and part.path != ours):
                coming |= not _remove(part.path) and same
            elif same:
                coming |= not _is_free(part.path)
        return coming

    def _make_room(self, size: int) -> bool:
        """Remove parts of dead fetches, then the copies used longest ago, until `size` more bytes fit."""
        if self.budget is None:
            return True
        if size > self.budget:
            return False
        parts, copies = self._entries(_PART), self._entries(_COPY)
        free = self.budget - size - sum(entry.size for entry in parts + copies)
        for number, entry in enumerate(parts + copies):
            if free >= 0:
                break
            if _remove(entry.path):
                free += entry.size
                self._count(evictions=int(number >= len(parts)))
        return free >= 0

    def _entries(self, kind: re.Pattern[str]) -> list[_Entry]:
        """List parts or copies, those used longest ago first; what else lies here is not ours."""
        found = []
        with os.scandir(self._place) as scan:
            for file in scan:
                if (match := kind.fullmatch(file.name)) and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    size = int(match["size"]) if kind is _PART else status.st_size
                    found.append(_Entry(status.st_mtime, Path(file.path), size))
        return sorted(found)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock."""
        self._place.mkdir(parents=True, exist_ok=True)
        lock = _lock(self._place / "lock", create=True, wait=True)
        assert lock is not None
        try:
            yield
        finally:
            _unlock(lock)

    def _fetched(self, length: int) -> None:
        self._count(fetched_bytes=length)

    def _count(self, **more: int) -> None:
        with self._counting:
            now = self._stats
            self._stats = now._replace(**{key: getattr(now, key) + value for key, value in more.items()})


class _Entry(NamedTuple):
    """A file of the cache: when it was used last, where it lies, and how much room it takes."""

    used: float
    path: Path
    size: int

    @property
    def key(self) -> str:
        return self.path.name.partition(".")[0]

    def is_stale(self) -> bool:
        """Tell of a part that was left long ago, or before the machine started, so that it may have holes."""
        now = time.time()
        return self.used < max(now - STALE_S, now - time.clock_gettime(time.CLOCK_BOOTTIME))


def twice(store: Store, attempt: Callable[[Store], T | None]) -> T | None:
    """Fetch an object; one that comes damaged once more, past the caches on the way, and tell if that helped."""
    try:
        return attempt(store)
    except DataFaultError as error:
        fault = error
    past_caches = getattr(store, "past_caches", None)
    got = attempt(past_caches() if past_caches else store)
    if got is not None:
        blame = "a cache on the way holds a spoilt copy" if past_caches else "it was damaged on the way"
        log.warning("%s: %s; fetched again it was right: %s", fault.where, fault.what, blame)
    return got


def fetch(store: Store, name: str, path: Path, *, size: int, sha256: str = "", wanted: Wanted = always) -> None:
    """Copy an object to a new file, verified, as long as it is wanted; a failure leaves none."""

    def attempt(source: Store) -> Path:
        with path.open("w+b", buffering=0) as file:
            fill(file, source, name, size=size, sha256=sha256, wanted=wanted)
        return path

    try:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            twice(store, attempt)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def fill(
    file: FileIO,
    store: Store,
    name: str,
    *,
    size: int,
    sha256: str = "",
    etag: str = "",
    wanted: Wanted = always,
    got: Callable[[int], None] = lambda _: None,
) -> None:
    """Append to a file, which may hold an object's first bytes, the rest of it; refuse another digest at the end."""
    digest = hashlib.sha256()
    start = 0
    while chunk := file.read(CHUNK):
        digest.update(chunk)
        start += len(chunk)
    while start < size:
        if not wanted():
            raise _unwanted(store, name)
        chunk = store.range(name, start, min(CHUNK, size - start), etag=etag)
        got(len(chunk))
        digest.update(chunk)
        start += len(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[file.write(rest) :]
    if sha256 and digest.hexdigest() != sha256:
        raise DataFaultError(
            f"its sha256 is {digest.hexdigest()[:12]}…, and the manifest says {sha256[:12]}…",
            where=_where(store, name),
            hint="it was damaged or replaced: put the right shard there, or convert the dataset again",
        )


def _tag(store: Store, name: str, size: int | None, sha256: str) -> Tag:
    """Ask for an object's version; a server that does not tell may still give an object with a known digest."""
    try:
        tag = store.tag(name)
    except UnavailableError:
        if size is None or not sha256:
            raise
        return Tag(size, "")
    if size not in (None, tag.size):
        raise DataFaultError(
            f"is {tag.size:,} bytes, and should be {size:,}",
            where=_where(store, name),
            hint="it was cut short or replaced: stoker data verify tells more",
        )
    return tag


def _key(store: Store, name: str, tag: Tag, sha256: str) -> str:
    return sha256 or _short(f"{store.url}\0{name}\0{tag.size}\0{tag.etag}", 20)


def _short(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _where(store: Store, name: str) -> str:
    return f"{shown(store.url).rstrip('/')}/{name}"


def _unwanted(store: Store, name: str) -> StoppedError:
    return StoppedError("is no longer wanted", where=_where(store, name))


def _held(copy: Path, size: int | None) -> Held | None:
    """Hold a copy that is there, and note that it is used; None if there is none, or one of another size."""
    try:
        lock = os.open(copy, os.O_RDONLY)
    except FileNotFoundError:
        return None
    held = Held(copy, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)  # waits for who removes it
    status = os.fstat(lock)
    if not status.st_nlink or size not in (None, status.st_size):
        held.close()
        return None
    with suppress(OSError):  # another user's: it counts as used when it came
        os.utime(lock)
    return held


_exclusive: set[int] = set()
"""Exclusive locks of this process; one that is forked has them too, and would keep them after its parent's end."""


def _forget_locks() -> None:
    while _exclusive:
        os.close(_exclusive.pop())


os.register_at_fork(after_in_child=_forget_locks)


def _lock(path: Path, *, create: bool = False, wait: bool = False) -> int | None:
    """Open a file with an exclusive lock; None if somebody else has locked it."""
    lock = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    _exclusive.add(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        _exclusive.discard(lock)
        os.close(lock)
        return None
    except BaseException:
        _unlock(lock)
        raise
    return lock


def _unlock(lock: int) -> None:
    _exclusive.discard(lock)
    fcntl.flock(lock, fcntl.LOCK_UN)  # of a process forked meanwhile too
    os.close(lock)


def _is_free(path: Path) -> bool:
    lock = _lock(path)
    if lock is None:
        return False
    _unlock(lock)
    return True


def _remove(path: Path) -> bool:
    """Remove a file that nobody uses."""
    lock = _lock(path)
    if lock is None:
        return False
    path.unlink()
    _unlock(lock)
    return True
