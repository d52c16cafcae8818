"""Node-local disk cache: verified copies of objects in a folder shared by all processes of a machine.

Layout of a cache's `objects` folder:

    <key>                         a verified copy; the key is its sha256, or else a hash of its URL and version
    <key>.<version>.<size>.part   a download of one version in progress; its name reserves all `size` bytes
    lock                          held briefly to evict, publish or delete

Locks are flock locks, which the kernel releases however a process ends: shared on a copy while it is in use,
exclusive on a part while it is fetched. Names change only under `lock`; processes share no other state.
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

from stoker.errors import InterruptError, ObjectChangedError, StorageFullError, UnavailableError, VerificationError
from stoker.storage import ObjectMeta, Store, redacted
from stoker.storage.local import translate_os_errors

CHUNK_BYTES = 8 << 20
MAX_CHANGES = 2
"""How often an object may change while it is fetched before the fetch fails."""
POLL_S = 0.02
POLLS_PER_LOCK_CHECK = 10
"""A process waiting for another's fetch polls for the copy this often before it checks that the other is alive."""
STALE_PART_S = 24 * 3600.0
"""Parts that were not written to for this long are deleted, even if there is space."""

_COPY_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PART_NAME = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\.[0-9a-f]{16}\.(?P<size>[0-9]{1,18})\.part")

log = logging.getLogger(__name__)

T = TypeVar("T")
NeededCheck = Callable[[], bool]


def always_needed() -> bool:
    """Return True: the fetch is never cancelled."""
    return True


class CacheStats(NamedTuple):
    """Counters of one cache in this process; a miss is a fetch that was started or found no space."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    evictions: int = 0


class CachedFile:
    """A verified local file, protected from eviction by any process until it is closed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._close = weakref.finalize(self, os.close, lock)

    def close(self) -> None:
        """Allow eviction again; what is mapped or open stays readable."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class DiskCache:
    """Copies of objects in a folder of at most `budget` bytes, downloads in progress included.

    Many processes and threads may share one folder and budget; concurrent requests for an object fetch it once.
    """

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self.folder, self.budget = folder, budget
        self._objects = folder / "objects"
        self._warned = False
        self._stats = CacheStats()
        self._stats_lock = threading.Lock()

    def find(self, store: Store, name: str, *, size: int | None = None, sha256: str = "") -> CachedFile | None:
        """Return the cached copy of an object, or None; the store is contacted only if no digest is given."""
        meta = ObjectMeta(-1, "") if sha256 else _head(store, name, size, sha256)
        with translate_os_errors(self._objects):
            cached = _open_copy(self._objects / _key(store, name, meta, sha256), size)
        if cached is not None:
            self._count(hits=1)
        return cached

    def find_digest(self, sha256: str) -> CachedFile | None:
        """Return the cached copy of the object with this digest, or None, without a store."""
        with translate_os_errors(self._objects):
            return _open_copy(self._objects / sha256, None)

    def open(
        self,
        store: Store,
        name: str,
        *,
        size: int | None = None,
        sha256: str = "",
        is_needed: NeededCheck = always_needed,
    ) -> CachedFile | None:
        """Return an object's copy, fetching it on a miss; None if neither budget nor disk has space for it."""
        if sha256 and (cached := self.find(store, name, size=size, sha256=sha256)):
            return cached
        try:
            cached = retry_bypassing_caches(
                store, lambda source: self._fetch_current_version(source, name, size, sha256, is_needed)
            )
            reason = f"{self.folder} is full of files in use"
        except StorageFullError as error:
            cached, reason = None, str(error)
        if cached is None and not self._warned:
            self._warned = True  # warn once: when one does not fit, many do not
            log.warning("%s is not cached: %s", _object_url(store, name), reason)
        return cached

    def stats(self) -> CacheStats:
        """Return the counters of this process."""
        return self._stats

    def _fetch_current_version(
        self, store: Store, name: str, size: int | None, sha256: str, is_needed: NeededCheck
    ) -> CachedFile | None:
        """Fetch the current version of an object; start over if it changes meanwhile."""
        changes = 0
        while True:
            meta = _head(store, name, size, sha256)
            if sha256 and changes == MAX_CHANGES:  # mirrors may disagree on the ETag of one object; the digest decides
                meta = meta._replace(etag="")
            try:
                with translate_os_errors(self._objects), suppress(FileNotFoundError):
                    return self._fetch_once(store, name, meta, sha256, is_needed)
                return None  # the folder was deleted meanwhile
            except ObjectChangedError:
                changes += 1
                if changes > MAX_CHANGES:
                    raise

    def _fetch_once(
        self, store: Store, name: str, meta: ObjectMeta, sha256: str, is_needed: NeededCheck
    ) -> CachedFile | None:
        """Fetch an object unless another process does: then wait for its copy, or resume its part if it died."""
        key = _key(store, name, meta, sha256)
        copy = self._objects / key
        part = self._objects / f"{key}.{_hash_text(meta.etag, 8)}.{meta.size}.part"
        while True:
            with self._exclusive_access():
                if cached := _open_copy(copy, meta.size):
                    self._count(hits=1)
                    return cached
                if not self._is_being_fetched(key, part):
                    self._count(misses=1)
                    if not part.exists() and not self._evict_for(meta.size):
                        return None
                    lock = _lock(part, create=True)
                    assert lock is not None  # parts are only locked while holding the folder's lock
                    break
            for _ in range(POLLS_PER_LOCK_CHECK):
                if not is_needed():
                    raise _not_needed_error(store, name)
                if copy.exists():
                    break
                time.sleep(POLL_S)
        try:
            self._complete_part(lock, store, name, meta, sha256, is_needed)
            with self._exclusive_access():
                part.rename(copy)
                fcntl.flock(lock, fcntl.LOCK_SH)  # not atomic, but the folder's lock prevents eviction
                _exclusive_locks.discard(lock)
            return CachedFile(copy, lock)
        except BaseException as error:
            try:
                if isinstance(error, VerificationError | ObjectChangedError | OSError) or not os.fstat(lock).st_size:
                    with self._exclusive_access():
                        part.unlink(missing_ok=True)
            finally:
                _unlock(lock)
            raise

    def _complete_part(
        self, part: int, store: Store, name: str, meta: ObjectMeta, sha256: str, is_needed: NeededCheck
    ) -> None:
        """Fetch the rest of a part; resume it only if a digest or ETag can prove that its bytes match."""
        resumed = 0 < os.fstat(part).st_size <= meta.size and bool(sha256 or meta.etag)
        with open(part, "r+b", buffering=0, closefd=False) as file:
            rest = partial(
                complete_file,
                file,
                store,
                name,
                size=meta.size,
                sha256=sha256,
                etag=meta.etag,
                is_needed=is_needed,
                on_bytes=self._count_fetched,
            )
            try:
                if not resumed:
                    file.truncate(0)
                rest()
            except VerificationError:
                if not resumed:
                    raise
                file.seek(0)
                file.truncate()  # the resumed bytes may be the damaged ones: fetch all before raising
                rest()
        os.fsync(part)

    def _is_being_fetched(self, key: str, own_part: Path) -> bool:
        """Return whether another process fetches this object; delete parts of other versions and stale ones."""
        fetching = False
        for part in self._entries(_PART_NAME):
            same = part.key == key
            if part.is_stale() or (same and part.path != own_part):
                fetching |= not _remove_unless_locked(part.path) and same
            elif same:
                fetching |= not _is_unlocked(part.path)
        return fetching

    def _evict_for(self, size: int) -> bool:
        """Delete abandoned parts, then the least recently used copies, until `size` more bytes fit."""
        if self.budget is None:
            return True
        if size > self.budget:
            return False
        parts, copies = self._entries(_PART_NAME), self._entries(_COPY_NAME)
        free = self.budget - size - sum(entry.size for entry in parts + copies)
        for number, entry in enumerate(parts + copies):
            if free >= 0:
                break
            if _remove_unless_locked(entry.path):
                free += entry.size
                self._count(evictions=int(number >= len(parts)))
        return free >= 0

    def _entries(self, kind: re.Pattern[str]) -> list[_CacheFile]:
        """List parts or copies, least recently used first; ignore foreign files."""
        entries = []
        with os.scandir(self._objects) as scan:
            for file in scan:
                if (match := kind.fullmatch(file.name)) and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    size = int(match["size"]) if kind is _PART_NAME else status.st_size
                    entries.append(_CacheFile(status.st_mtime, Path(file.path), size))
        return sorted(entries)

    @contextmanager
    def _exclusive_access(self) -> Iterator[None]:
        """Hold the folder's exclusive lock."""
        self._objects.mkdir(parents=True, exist_ok=True)
        lock = _lock(self._objects / "lock", create=True, wait=True)
        assert lock is not None
        try:
            yield
        finally:
            _unlock(lock)

    def _count_fetched(self, length: int) -> None:
        self._count(fetched_bytes=length)

    def _count(self, **more: int) -> None:
        with self._stats_lock:
            now = self._stats
            self._stats = now._replace(**{key: getattr(now, key) + value for key, value in more.items()})


class _CacheFile(NamedTuple):
    """A file of the cache: when it was last used, its path, and the bytes it occupies or reserves."""

    last_used: float
    path: Path
    size: int

    @property
    def key(self) -> str:
        return self.path.name.partition(".")[0]

    def is_stale(self) -> bool:
        """Return whether a part is too old, or older than the last boot, so that it may have holes."""
        now = time.time()
        return self.last_used < max(now - STALE_PART_S, now - time.clock_gettime(time.CLOCK_BOOTTIME))


def retry_bypassing_caches(store: Store, attempt: Callable[[Store], T | None]) -> T | None:
    """Fetch an object; if it is damaged, retry once bypassing the caches on the way, and log if that helped."""
    try:
        return attempt(store)
    except VerificationError as error:
        fault = error
    bypassing_caches = getattr(store, "bypassing_caches", None)
    result = attempt(bypassing_caches() if bypassing_caches else store)
    if result is not None:
        cause = "a cache on the way holds a corrupt copy" if bypassing_caches else "it was corrupted in transit"
        log.warning("%s: %s; fetching it again succeeded: %s", fault.where, fault.what, cause)
    return result


def fetch(
    store: Store, name: str, path: Path, *, size: int, sha256: str = "", is_needed: NeededCheck = always_needed
) -> None:
    """Download and verify an object into a new file while `is_needed`; a failure leaves no file."""

    def attempt(source: Store) -> Path:
        with path.open("w+b", buffering=0) as file:
            complete_file(file, source, name, size=size, sha256=sha256, is_needed=is_needed)
        return path

    try:
        with translate_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            retry_bypassing_caches(store, attempt)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def complete_file(
    file: FileIO,
    store: Store,
    name: str,
    *,
    size: int,
    sha256: str = "",
    etag: str = "",
    is_needed: NeededCheck = always_needed,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Append the rest of an object to a file that may hold its first bytes; raise if the digest differs."""
    digest = hashlib.sha256()
    start = 0
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        start += len(chunk)
    while start < size:
        if not is_needed():
            raise _not_needed_error(store, name)
        chunk = store.range(name, start, min(CHUNK_BYTES, size - start), etag=etag)
        on_bytes(len(chunk))
        digest.update(chunk)
        start += len(chunk)
        rest = memoryview(chunk)
        while rest:
            rest = rest[file.write(rest) :]
    if sha256 and digest.hexdigest() != sha256:
        raise VerificationError(
            f"sha256 is {digest.hexdigest()[:12]}…, expected {sha256[:12]}… from the manifest",
            where=_object_url(store, name),
            hint="it was corrupted or replaced: restore the shard, or convert the dataset again",
        )


def _head(store: Store, name: str, size: int | None, sha256: str) -> ObjectMeta:
    """Return an object's metadata; a server without HEAD is tolerated if size and digest are known."""
    try:
        meta = store.head(name)
    except UnavailableError:
        if size is None or not sha256:
            raise
        return ObjectMeta(size, "")
    if size not in (None, meta.size):
        raise VerificationError(
            f"size is {meta.size:,} bytes, expected {size:,}",
            where=_object_url(store, name),
            hint="it was truncated or replaced; run: stoker data verify",
        )
    return meta


def _key(store: Store, name: str, meta: ObjectMeta, sha256: str) -> str:
    return sha256 or _hash_text(f"{store.url}\0{name}\0{meta.size}\0{meta.etag}", 20)


def _hash_text(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def _object_url(store: Store, name: str) -> str:
    return f"{redacted(store.url).rstrip('/')}/{name}"


def _not_needed_error(store: Store, name: str) -> InterruptError:
    return InterruptError("fetch cancelled", where=_object_url(store, name))


def _open_copy(copy: Path, size: int | None) -> CachedFile | None:
    """Open a copy and mark it as used; None if it does not exist or has another size."""
    try:
        lock = os.open(copy, os.O_RDONLY)
    except FileNotFoundError:
        return None
    cached = CachedFile(copy, lock)
    fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a process that is deleting it
    status = os.fstat(lock)
    if not status.st_nlink or size not in (None, status.st_size):
        cached.close()
        return None
    with suppress(OSError):  # another user's file keeps its mtime
        os.utime(lock)
    return cached


_exclusive_locks: set[int] = set()
"""Exclusive locks of this process; a forked child inherits them and would keep them after its parent exits."""


def _close_inherited_locks() -> None:
    while _exclusive_locks:
        os.close(_exclusive_locks.pop())


os.register_at_fork(after_in_child=_close_inherited_locks)


def _lock(path: Path, *, create: bool = False, wait: bool = False) -> int | None:
    """Open a file with an exclusive lock; None if another process holds it."""
    lock = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    _exclusive_locks.add(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        _exclusive_locks.discard(lock)
        os.close(lock)
        return None
    except BaseException:
        _unlock(lock)
        raise
    return lock


def _unlock(lock: int) -> None:
    _exclusive_locks.discard(lock)
    fcntl.flock(lock, fcntl.LOCK_UN)  # also releases it in a process forked meanwhile
    os.close(lock)


def _is_unlocked(path: Path) -> bool:
    lock = _lock(path)
    if lock is None:
        return False
    _unlock(lock)
    return True


def _remove_unless_locked(path: Path) -> bool:
    """Delete a file and return True, unless another process has locked it."""
    lock = _lock(path)
    if lock is None:
        return False
    path.unlink()
    _unlock(lock)
    return True
