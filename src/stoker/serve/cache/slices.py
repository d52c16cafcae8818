"""Objects on disk in slices, within a budget: what the caching proxy keeps.

`DIR/objects/ab/<key>/` holds one version of one object: `about.json`, and a file for each slice that has come. A slice
appears by a rename, whole; `about.json` says `whole` only once all of them are there and were checked together. An
object is evicted as a whole, the least recently used first, and never while anyone reads it. What the disk refuses is
no error: then there is no room, and the object passes by.
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
from stoker.errors import ConflictError, DataFaultError, InputError
from stoker.storage.local import explained

SLICE = 8 << 20
OBJECT = 8 << 10
"""What an object takes beside its slices: its folder, and what is known about it."""
_BLOCK = 4 << 10
_PIECE = 1 << 20

Fetch = Callable[[int, int], bytes]

log = logging.getLogger(__name__)


class NoRoomError(Exception):
    """Everything in the cache is in use, or the object is larger than all of it, or the disk refuses."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an object that is kept."""

    name: str
    """Where it comes from, for people."""
    size: int
    tag: str
    """By which the origin knows this version."""
    etag: str
    """By which our clients do."""
    sha256: str = ""
    """What the manifest says it is, if there is one."""
    slice: int = SLICE
    whole: bool = False


class Kept:
    """One version of one object; its fields belong to the cache's lock. On disk it begins with its first slice."""

    def __init__(self, key: str, folder: Path, about: About) -> None:
        self.key, self.folder, self.about = key, folder, about
        self.present: set[int] = set()
        self.coming: dict[int, Future[None]] = {}
        self.on_disk = False
        self.readers = 0
        self.dropped = False
        self.checking = threading.Lock()
        self.fresh_until = 0.0
        """Until then the origin need not be asked whether this is still its version."""
        self.stale = False
        """Whether the origin, when it was asked last, did not answer."""
        self.anew_until = 0.0
        """Until then it is as new as whoever asks past the cache could wish."""

    @property
    def count(self) -> int:
        """How many slices it has when it is whole."""
        return -(-self.about.size // self.about.slice)

    @property
    def complete(self) -> bool:
        """Whether all of it is there, checked or not."""
        return len(self.present) == self.count

    def length(self, number: int) -> int:
        """How long a slice is."""
        return min(self.about.slice, self.about.size - number * self.about.slice)

    def cost(self, number: int) -> int:
        """How much of the disk a slice takes."""
        return -(-self.length(number) // _BLOCK) * _BLOCK

    @property
    def costs(self) -> int:
        """How much of the disk all of it takes."""
        return sum(map(self.cost, self.present)) + OBJECT * self.on_disk

    def path(self, number: int) -> Path:
        """Where a slice lies."""
        return self.folder / f"{number:06d}"


class SliceCache:
    """All that is kept in one folder; one process owns it."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self.evictions = 0
        self._objects: dict[str, Kept] = {}
        """By key, the least recently used first."""
        self._lock = threading.Condition()
        self._used = self._leaving = 0
        """Bytes that are taken, and how many of these are just being deleted."""
        self._numbers = itertools.count()
        self._closed = False
        self._told = float("-inf")
        with explained(folder):
            (folder / "objects").mkdir(parents=True, exist_ok=True)
            self._owner = _owned(folder / "lock")
            shutil.rmtree(folder / "trash", ignore_errors=True)
            (folder / "trash").mkdir(exist_ok=True)
        self._load()

    def close(self) -> None:
        """Keep nothing more, and let another process have the folder."""
        with self._lock:
            self._closed = True
        os.close(self._owner)

    @property
    def held(self) -> int:
        """Bytes on disk, and promised to what is on its way."""
        return self._used

    @contextmanager
    def reading(self, key: str) -> Iterator[Kept | None]:
        """Hold an object, if there is one, so that it is not evicted meanwhile."""
        with self._lock:
            kept = self._objects.pop(key, None)
            if kept is not None:
                self._objects[key] = kept
                kept.readers += 1
        if kept is None:
            yield None
            return
        with suppress(OSError):
            os.utime(kept.folder / "about.json")  # so that a restart knows what was used last
        try:
            yield kept
        finally:
            self._leave(kept)

    @contextmanager
    def beginning(self, key: str, about: About) -> Iterator[Kept]:
        """Hold an object of this version: the one there is, or a new one in place of another version."""
        with self._lock:
            kept = self._objects.get(key)
            former = kept if kept is not None and kept.about.etag != about.etag else None
            if former is not None:
                former.readers += 1  # until the lock is free
                self._forget(former)
            if kept is None or former is not None:
                kept = self._objects[key] = Kept(key, self.folder / "objects" / key[:2] / key, about)
            kept.readers += 1
        if former is not None:
            self._leave(former)
        try:
            yield kept
        finally:
            self._leave(kept)

    def open(self, kept: Kept, number: int, fetch: Fetch) -> int:
        """Open a slice; fetch it first if need be, one fetch for all who wait. The caller closes the file."""
        with self._lock:
            if number in kept.present:
                return self._opened(kept, number)
            coming = kept.coming.get(number)
            leads = coming is None
            if coming is None:
                coming = kept.coming[number] = Future()
        if leads:
            try:
                self._bring(kept, number, fetch)
            except BaseException as error:
                self._arrived(kept, number, False)
                coming.set_exception(error)
            else:
                coming.set_result(None)
        coming.result()
        with self._lock:
            return self._opened(kept, number)

    def check(self, kept: Kept) -> None:
        """Check an object that is complete: with the right digest it is whole, with another it is dropped."""
        with kept.checking:
            if kept.about.whole:
                return
            if kept.about.sha256 and self.digest(kept, range(kept.count)).hexdigest() != kept.about.sha256:
                self.drop(kept)
                raise DataFaultError("its sha256 is not the manifest's", where=kept.about.name)
            with self._lock:
                kept.about = msgspec.structs.replace(kept.about, whole=True)
                if not kept.dropped:
                    with suppress(OSError):  # then it is checked once more after a restart
                        _write_about(kept)

    def digest(self, kept: Kept, numbers: range) -> hashlib._Hash:
        """Digest slices that are there."""
        digest = hashlib.sha256()
        for number in numbers:
            try:
                with kept.path(number).open("rb", buffering=0) as file:
                    while piece := file.read(_PIECE):
                        digest.update(piece)
            except OSError as error:
                raise self._spoilt(kept) from error
        return digest

    def drop(self, kept: Kept) -> None:
        """Forget an object, which the caller holds: nobody gets it any more, and it goes with its last reader."""
        with self._lock:
            self._forget(kept)

    def _opened(self, kept: Kept, number: int) -> int:
        try:
            return os.open(kept.path(number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            self._forget(kept)
            raise self._spoilt(kept) from error

    def _spoilt(self, kept: Kept) -> DataFaultError:
        return DataFaultError("a part of it has vanished from the cache's folder", where=kept.about.name)

    def _bring(self, kept: Kept, number: int, fetch: Fetch) -> None:
        """Fetch a slice and put it in its place."""
        cost = kept.cost(number)
        taken = cost if kept.on_disk else cost + OBJECT
        self._take_room(taken, kept)
        temporary = self.folder / "trash" / f"{next(self._numbers)}.slice"
        try:
            data = fetch(number * kept.about.slice, kept.length(number))
            if len(data) != kept.length(number):
                raise DataFaultError(f"{len(data)} bytes came instead of {kept.length(number)}", where=kept.about.name)
            with self._kept_or_no_room():
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fdatasync(file.fileno())
                with self._lock:
                    if self._closed:
                        raise NoRoomError
                    if not kept.on_disk:
                        kept.folder.mkdir(parents=True, exist_ok=True)
                        kept.on_disk, taken = True, taken - OBJECT
                        _write_about(kept)
                    temporary.replace(kept.path(number))
                    taken -= cost
                    self._arrived(kept, number, True)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            with self._lock:
                self._used -= taken  # what was promised and not needed
                self._lock.notify_all()

    def _arrived(self, kept: Kept, number: int, well: bool) -> None:
        with self._lock:
            kept.coming.pop(number, None)
            if well:
                kept.present.add(number)

    @contextmanager
    def _kept_or_no_room(self) -> Iterator[None]:
        """Take whatever the disk refuses for a lack of room, and tell it now and then."""
        try:
            yield
        except OSError as error:
            if time.monotonic() - self._told > 60:
                self._told = time.monotonic()
                log.warning("%s: nothing is kept: %s", self.folder, (error.strerror or "").lower())
            raise NoRoomError from error

    def _take_room(self, length: int, wanted: Kept | None = None) -> None:
        """Take so much of the budget; evict for it, but nothing that is read. Files are deleted without the lock."""
        while True:
            with self._lock:
                while self._used + length > self.budget >= self._used - self._leaving + length:
                    self._lock.wait()
                if self._used + length <= self.budget:
                    self._used += length
                    return
                idle = (kept for kept in self._objects.values() if kept.readers == 0 and kept is not wanted)
                victim = next(idle, None)
                if victim is None:
                    raise NoRoomError
                self._forget(victim)
                self._leaving += victim.costs
                self.evictions += 1
            self._delete(victim)

    def _forget(self, kept: Kept) -> None:
        """Take an object out; its files, which go with its last reader, get a name that no restart knows."""
        if kept.dropped:
            return
        kept.dropped = True
        self._objects.pop(kept.key, None)
        gone = self.folder / "trash" / str(next(self._numbers))
        with suppress(OSError):
            kept.folder.replace(gone)
            kept.folder = gone

    def _leave(self, kept: Kept) -> None:
        with self._lock:
            kept.readers -= 1
            if kept.readers:
                return
            if not kept.dropped:
                if not kept.on_disk:  # somebody only asked about it
                    self._objects.pop(kept.key, None)
                return
            self._leaving += kept.costs
        self._delete(kept)

    def _delete(self, kept: Kept) -> None:
        shutil.rmtree(kept.folder, ignore_errors=True)
        with self._lock:
            self._used -= kept.costs
            self._leaving -= kept.costs
            self._lock.notify_all()

    def _load(self) -> None:
        """Take over what an earlier process left; what is not plainly right goes."""
        found = []
        for folder in (self.folder / "objects").glob("??/*"):
            kept = _loaded(folder)
            if kept is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                found.append(((folder / "about.json").stat().st_mtime, folder.name, kept))
        for _, key, kept in sorted(found, key=lambda one: one[:2]):
            self._objects[key] = kept
            self._used += kept.costs
        self._take_room(0)  # the budget may have been larger


def check_budget(folder: Path, budget: int) -> None:
    """Refuse a budget that the disk does not have, or that holds not even a few slices."""
    if budget < 4 * SLICE:
        raise InputError(f"--size is {format_bytes(budget)}, and must be at least {format_bytes(4 * SLICE)}")
    there = sum(map(_size, (folder / "objects").rglob("*")))
    disk = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(disk).free + there
    if budget > free:
        raise InputError(
            f"--size is {format_bytes(budget)}, and only {format_bytes(free)} are free", where=folder, hint="give less"
        )


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError:  # gone meanwhile: another cache uses the folder, which will be told
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _owned(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConflictError("another cache uses this folder", where=path.parent, hint="give it another --dir") from None
    return file


def _write_about(kept: Kept) -> None:
    temporary = kept.folder / "about.tmp"
    temporary.write_bytes(msgspec.json.encode(kept.about))  # one that a power cut has torn is not taken over
    temporary.replace(kept.folder / "about.json")


def _loaded(folder: Path) -> Kept | None:
    try:
        about = msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
        kept = Kept(folder.name, folder, about)
        kept.on_disk = True
        for number in range(kept.count):
            if (path := kept.path(number)).exists() and path.stat().st_size == kept.length(number):
                kept.present.add(number)
            else:
                path.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError):
        return None
    # What is missing of a whole one was checked, what would come anew was not.
    return None if about.whole and not kept.complete else kept
