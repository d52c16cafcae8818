"""Slice cache of the caching proxy: objects on disk in slices, within a byte budget.

`DIR/objects/ab/<key>/` holds one version of one object: `about.json`, and one file per fetched slice. A slice appears
atomically by a rename; `about.json` has `whole` set only after all slices were verified together. Objects are evicted
as a whole, least recently used first, and never while pinned. Disk errors are not fatal: the cache counts as full, and
the object is served without caching.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from stoker.core.units import format_bytes
from stoker.errors import ConflictError, InputError, VerificationError
from stoker.storage.local import translate_os_errors

SLICE_BYTES = 8 << 20
OBJECT_OVERHEAD_BYTES = 8 << 10
"""Disk space of an object beside its slices: its folder and about.json."""
_BLOCK_BYTES = 4 << 10
_READ_BYTES = 1 << 20

Fetch = Callable[[int, int], bytes]

log = logging.getLogger(__name__)


class CacheFullError(Exception):
    """No space: all objects are pinned, the object exceeds the budget, or the disk failed."""


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a cached object, stored as about.json."""

    name: str
    """The object's URL, for messages."""
    size: int
    origin_etag: str = msgspec.field(name="tag")
    """The validator of this version at the origin."""
    etag: str
    """The ETag that clients get."""
    sha256: str = ""
    """The digest in the manifest, if it lists the object."""
    slice_bytes: int = msgspec.field(name="slice", default=SLICE_BYTES)
    verified: bool = msgspec.field(name="whole", default=False)
    """Whether all slices are on disk and were verified together."""


class CachedObject:
    """One version of one object, guarded by the cache's lock; its folder is created with its first slice."""

    def __init__(self, key: str, folder: Path, info: ObjectInfo) -> None:
        self.key, self.folder, self.info = key, folder, info
        self.present: set[int] = set()
        self.fetches: dict[int, Future[None]] = {}
        self.on_disk = False
        self.pins = 0
        self.dropped = False
        self.verify_lock = threading.Lock()
        self.fresh_until = 0.0
        """The object is fresh until then; after that it is revalidated with the origin."""
        self.stale = False
        """Whether the origin did not respond to the last revalidation."""
        self.bypass_fresh_until = 0.0
        """A request that bypasses the cache may be served from it until then."""

    @property
    def slice_count(self) -> int:
        """The number of slices of the complete object."""
        return -(-self.info.size // self.info.slice_bytes)

    @property
    def is_complete(self) -> bool:
        """Whether all slices are on disk, verified or not."""
        return len(self.present) == self.slice_count

    def slice_length(self, number: int) -> int:
        """Return the length of a slice in bytes."""
        return min(self.info.slice_bytes, self.info.size - number * self.info.slice_bytes)

    def slice_disk_bytes(self, number: int) -> int:
        """Return the disk space of a slice in bytes."""
        return -(-self.slice_length(number) // _BLOCK_BYTES) * _BLOCK_BYTES

    @property
    def disk_bytes(self) -> int:
        """The disk space of the object in bytes."""
        return sum(map(self.slice_disk_bytes, self.present)) + OBJECT_OVERHEAD_BYTES * self.on_disk

    def slice_path(self, number: int) -> Path:
        """Return the path of a slice."""
        return self.folder / f"{number:06d}"


class SliceCache:
    """The cached objects in one folder, owned by one process."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self.evictions = 0
        self._objects: dict[str, CachedObject] = {}
        """By key, least recently used first."""
        self._lock = threading.Condition()
        self._used_bytes = self._deleting_bytes = 0
        """Bytes in use or reserved, and how many of them are being deleted."""
        self._numbers = itertools.count()
        self._closed = False
        self._warned_at = float("-inf")
        with translate_os_errors(folder):
            (folder / "objects").mkdir(parents=True, exist_ok=True)
            self._owner = _lock_folder(folder / "lock")
            shutil.rmtree(folder / "trash", ignore_errors=True)
            (folder / "trash").mkdir(exist_ok=True)
        self._load()

    def close(self) -> None:
        """Stop caching, and unlock the folder for another process."""
        with self._lock:
            self._closed = True
        os.close(self._owner)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk, and reserved for running fetches."""
        return self._used_bytes

    @contextmanager
    def pin(self, key: str) -> Iterator[CachedObject | None]:
        """Yield the cached object of a key, or None; it is not evicted meanwhile."""
        with self._lock:
            cached = self._objects.pop(key, None)
            if cached is not None:
                self._objects[key] = cached
                cached.pins += 1
        if cached is None:
            yield None
            return
        with suppress(OSError):
            os.utime(cached.folder / "about.json")  # keeps the LRU order across restarts
        try:
            yield cached
        finally:
            self._unpin(cached)

    @contextmanager
    def pin_version(self, key: str, info: ObjectInfo) -> Iterator[CachedObject]:
        """Yield the cached object of this version; a new one replaces an object of another version."""
        with self._lock:
            cached = self._objects.get(key)
            outdated = cached if cached is not None and cached.info.etag != info.etag else None
            if outdated is not None:
                outdated.pins += 1  # delete it only after the lock is released
                self._detach(outdated)
            if cached is None or outdated is not None:
                cached = self._objects[key] = CachedObject(key, self.folder / "objects" / key[:2] / key, info)
            cached.pins += 1
        if outdated is not None:
            self._unpin(outdated)
        try:
            yield cached
        finally:
            self._unpin(cached)

    def open_slice(self, cached: CachedObject, number: int, fetch: Fetch) -> int:
        """Open a slice, fetching it on a miss, once for all concurrent readers. The caller closes the file."""
        with self._lock:
            if number in cached.present:
                return self._open_file(cached, number)
            fetching = cached.fetches.get(number)
            is_first = fetching is None
            if fetching is None:
                fetching = cached.fetches[number] = Future()
        if is_first:
            try:
                self._fetch_slice(cached, number, fetch)
            except BaseException as error:
                self._finish_fetch(cached, number, False)
                fetching.set_exception(error)
            else:
                fetching.set_result(None)
        fetching.result()
        with self._lock:
            return self._open_file(cached, number)

    def verify(self, cached: CachedObject) -> None:
        """Verify a complete object against its digest; drop it and raise VerificationError on a mismatch."""
        with cached.verify_lock:
            if cached.info.verified:
                return
            if cached.info.sha256 and self.digest(cached, range(cached.slice_count)).hexdigest() != cached.info.sha256:
                self.drop(cached)
                raise VerificationError("sha256 does not match the manifest", where=cached.info.name)
            with self._lock:
                cached.info = msgspec.structs.replace(cached.info, verified=True)
                if not cached.dropped:
                    with suppress(OSError):  # then it is verified again after a restart
                        _write_info(cached)

    def digest(self, cached: CachedObject, numbers: range) -> hashlib._Hash:
        """Return the sha256 of slices on disk."""
        digest = hashlib.sha256()
        for number in numbers:
            try:
                with cached.slice_path(number).open("rb", buffering=0) as file:
                    while chunk := file.read(_READ_BYTES):
                        digest.update(chunk)
            except OSError as error:
                raise self._missing_slice_error(cached) from error
        return digest

    def drop(self, cached: CachedObject) -> None:
        """Remove a pinned object from the cache; its files are deleted when the last pin is released."""
        with self._lock:
            self._detach(cached)

    def _open_file(self, cached: CachedObject, number: int) -> int:
        try:
            return os.open(cached.slice_path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            self._detach(cached)
            raise self._missing_slice_error(cached) from error

    def _missing_slice_error(self, cached: CachedObject) -> VerificationError:
        return VerificationError("a slice is missing in the cache directory", where=cached.info.name)

    def _fetch_slice(self, cached: CachedObject, number: int, fetch: Fetch) -> None:
        """Fetch a slice and store it."""
        slice_cost = cached.slice_disk_bytes(number)
        reserved = slice_cost if cached.on_disk else slice_cost + OBJECT_OVERHEAD_BYTES
        self._reserve(reserved, cached)
        temporary = self.folder / "trash" / f"{next(self._numbers)}.slice"
        try:
            data = fetch(number * cached.info.slice_bytes, cached.slice_length(number))
            if len(data) != cached.slice_length(number):
                raise VerificationError(
                    f"received {len(data)} bytes, expected {cached.slice_length(number)}", where=cached.info.name
                )
            with self._disk_errors_as_full():
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fdatasync(file.fileno())
                with self._lock:
                    if self._closed:
                        raise CacheFullError
                    if not cached.on_disk:
                        cached.folder.mkdir(parents=True, exist_ok=True)
                        cached.on_disk, reserved = True, reserved - OBJECT_OVERHEAD_BYTES
                        _write_info(cached)
                    temporary.replace(cached.slice_path(number))
                    reserved -= slice_cost
                    self._finish_fetch(cached, number, True)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            with self._lock:
                self._used_bytes -= reserved  # the unused part of the reservation
                self._lock.notify_all()

    def _finish_fetch(self, cached: CachedObject, number: int, succeeded: bool) -> None:
        with self._lock:
            cached.fetches.pop(number, None)
            if succeeded:
                cached.present.add(number)

    @contextmanager
    def _disk_errors_as_full(self) -> Iterator[None]:
        """Convert disk errors into CacheFullError; log them at most once a minute."""
        try:
            yield
        except OSError as error:
            if time.monotonic() - self._warned_at > 60:
                self._warned_at = time.monotonic()
                log.warning("%s: cannot write to the cache: %s", self.folder, (error.strerror or "").lower())
            raise CacheFullError from error

    def _reserve(self, length: int, keep: CachedObject | None = None) -> None:
        """Reserve bytes of the budget, evicting unpinned objects. Files are deleted without holding the lock."""
        while True:
            with self._lock:
                while self._used_bytes + length > self.budget >= self._used_bytes - self._deleting_bytes + length:
                    self._lock.wait()
                if self._used_bytes + length <= self.budget:
                    self._used_bytes += length
                    return
                idle = (cached for cached in self._objects.values() if cached.pins == 0 and cached is not keep)
                victim = next(idle, None)
                if victim is None:
                    raise CacheFullError
                self._detach(victim)
                self._deleting_bytes += victim.disk_bytes
                self.evictions += 1
            self._delete(victim)

    def _detach(self, cached: CachedObject) -> None:
        """Remove an object from the index and move its files to the trash, which a restart empties."""
        if cached.dropped:
            return
        cached.dropped = True
        self._objects.pop(cached.key, None)
        trash = self.folder / "trash" / str(next(self._numbers))
        with suppress(OSError):
            cached.folder.replace(trash)
            cached.folder = trash

    def _unpin(self, cached: CachedObject) -> None:
        with self._lock:
            cached.pins -= 1
            if cached.pins:
                return
            if not cached.dropped:
                if not cached.on_disk:  # only its metadata was requested
                    self._objects.pop(cached.key, None)
                return
            self._deleting_bytes += cached.disk_bytes
        self._delete(cached)

    def _delete(self, cached: CachedObject) -> None:
        shutil.rmtree(cached.folder, ignore_errors=True)
        with self._lock:
            self._used_bytes -= cached.disk_bytes
            self._deleting_bytes -= cached.disk_bytes
            self._lock.notify_all()

    def _load(self) -> None:
        """Load the objects of a previous process; delete incomplete or unreadable ones."""
        objects = []
        for folder in (self.folder / "objects").glob("??/*"):
            cached = _load_object(folder)
            if cached is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                objects.append(((folder / "about.json").stat().st_mtime, folder.name, cached))
        for _, key, cached in sorted(objects, key=lambda entry: entry[:2]):
            self._objects[key] = cached
            self._used_bytes += cached.disk_bytes
        self._reserve(0)  # the budget may have been reduced


def check_budget(folder: Path, budget: int) -> None:
    """Raise InputError if a budget exceeds the disk or is smaller than four slices."""
    if budget < 4 * SLICE_BYTES:
        raise InputError(f"--size must be >= {format_bytes(4 * SLICE_BYTES)}, got {format_bytes(budget)}")
    used = sum(map(_size, (folder / "objects").rglob("*")))
    disk = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(disk)
    if not usage.total:  # /proc and /sys
        raise InputError("this file system stores no files", where=folder, hint="pass another --dir")
    free = usage.free + used
    if budget > free:
        raise InputError(
            f"--size is {format_bytes(budget)}, but the disk has {format_bytes(free)} free",
            where=folder,
            hint="pass a smaller --size",
        )


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError:  # deleted meanwhile by another cache on this folder, which is reported later
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _lock_folder(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConflictError(
            "directory is in use by another cache", where=path.parent, hint="pass another --dir"
        ) from None
    return file


def _write_info(cached: CachedObject) -> None:
    temporary = cached.folder / "about.tmp"
    temporary.write_bytes(msgspec.json.encode(cached.info))  # a torn file after a power failure is discarded on load
    temporary.replace(cached.folder / "about.json")


def _load_object(folder: Path) -> CachedObject | None:
    try:
        info = msgspec.json.decode((folder / "about.json").read_bytes(), type=ObjectInfo)
        cached = CachedObject(folder.name, folder, info)
        cached.on_disk = True
        for number in range(cached.slice_count):
            if (path := cached.slice_path(number)).exists() and path.stat().st_size == cached.slice_length(number):
                cached.present.add(number)
            else:
                path.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError):
        return None
    # The missing slices of a verified object were verified; refetched ones would not be.
    return None if info.verified and not cached.is_complete else cached
