"""Objects on disk in slices, within a budget: what the caching proxy keeps.

`DIR/objects/ab/<key>/` holds one version of one object: `about.json`, and a file for each slice that has come. A slice
appears by a rename, whole; `about.json` says `whole` only once all of them are there and were checked together. An
object is evicted as a whole, the least recently used first, and never while anyone reads it.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from stoker.core.units import format_bytes
from stoker.errors import ConflictError, DataFaultError, InputError
from stoker.storage.local import explained

SLICE = 8 << 20
_PIECE = 1 << 20


class NoRoomError(Exception):
    """Everything in the cache is in use, or the object is larger than all of it."""


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
    """One version of one object; all its fields belong to the cache's lock."""

    def __init__(self, folder: Path, about: About) -> None:
        self.folder, self.about = folder, about
        self.present: set[int] = set()
        self.coming: dict[int, threading.Event] = {}
        self.readers = 0
        self.dropped = False
        self.fresh_until = 0.0
        """Until then the origin need not be asked whether this is still its version."""

    @property
    def count(self) -> int:
        """How many slices it has when it is whole."""
        return -(-self.about.size // self.about.slice)

    def length(self, number: int) -> int:
        """How long a slice is."""
        return min(self.about.slice, self.about.size - number * self.about.slice)

    @property
    def bytes(self) -> int:
        """How much of it is there."""
        return sum(map(self.length, self.present))

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
        self._lock = threading.Lock()
        self._used = 0
        self._numbers = itertools.count()
        with explained(folder):
            (folder / "objects").mkdir(parents=True, exist_ok=True)
            self._owner = _owned(folder / "lock")
            shutil.rmtree(folder / "trash", ignore_errors=True)
            (folder / "trash").mkdir()
        self._load()

    def close(self) -> None:
        """Let another process have the folder."""
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
        try:
            if kept is not None:
                with suppress(OSError):
                    os.utime(kept.folder / "about.json")  # so that a restart knows what was used last
            yield kept
        finally:
            if kept is not None:
                self._leave(kept)

    @contextmanager
    def beginning(self, key: str, about: About) -> Iterator[Kept]:
        """Hold an object of this version: the one there is, or a new one in place of another version."""
        former = None
        with self._lock:
            kept = self._objects.get(key)
            if kept is not None and kept.about.etag != about.etag:
                former, kept = self._forget(key), None
                former.readers += 1  # until the lock is free
            if kept is None:
                kept = Kept(self.folder / "objects" / key[:2] / key, about)
                with explained(kept.folder):
                    kept.folder.mkdir(parents=True, exist_ok=True)
                    _write_about(kept)
                self._objects[key] = kept
            kept.readers += 1
        if former is not None:
            self._leave(former)
        try:
            yield kept
        finally:
            self._leave(kept)

    def open(self, kept: Kept, number: int, fetch: Callable[[int, int], bytes]) -> int:
        """Open a slice; fetch it first if need be, one fetch for all who wait. The caller closes the file."""
        while True:
            with self._lock:
                if number in kept.present:
                    try:
                        return os.open(kept.path(number), os.O_RDONLY | os.O_CLOEXEC)
                    except FileNotFoundError:  # somebody cleaned up
                        kept.present.remove(number)
                        self._used -= kept.length(number)
                coming = kept.coming.get(number)
                if coming is None:
                    kept.coming[number] = threading.Event()
            if coming is not None:
                coming.wait()
                continue  # it may have failed: then this one tries, and fails for itself
            self._bring(kept, number, fetch)

    def _bring(self, kept: Kept, number: int, fetch: Callable[[int, int], bytes]) -> None:
        taken = arrived = False
        temporary = self.folder / "trash" / f"{next(self._numbers)}.slice"
        try:
            self._take_room(kept.length(number), kept)
            taken = True
            data = fetch(number * kept.about.slice, kept.length(number))
            if len(data) != kept.length(number):
                raise DataFaultError(f"{len(data)} bytes came instead of {kept.length(number)}", where=kept.about.name)
            with explained(self.folder):
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fdatasync(file.fileno())
                with self._lock:
                    temporary.replace(kept.path(number))
            arrived = True
        finally:
            temporary.unlink(missing_ok=True)
            with self._lock:
                if arrived:
                    kept.present.add(number)
                elif taken:
                    self._used -= kept.length(number)
                kept.coming.pop(number).set()

    def check(self, kept: Kept) -> None:
        """Check an object whose slices are all there: with the right digest it is whole, with another it is dropped."""
        if kept.about.sha256 and self._digest(kept) != kept.about.sha256:
            self.drop(kept)
            raise DataFaultError("its sha256 is not the manifest's", where=kept.about.name)
        with self._lock:
            kept.about = msgspec.structs.replace(kept.about, whole=True)
            if not kept.dropped:
                with explained(kept.folder):
                    _write_about(kept)

    def drop(self, kept: Kept) -> None:
        """Forget an object: nobody gets it any more, and it goes when its last reader has gone."""
        with self._lock:
            for key, one in list(self._objects.items()):
                if one is kept:
                    self._forget(key)

    def _digest(self, kept: Kept) -> str:
        digest = hashlib.sha256()
        for number in range(kept.count):
            with kept.path(number).open("rb", buffering=0) as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        return digest.hexdigest()

    def _take_room(self, length: int, wanted: Kept | None = None) -> None:
        """Take so much of the budget; evict for it, but nothing that is read. Files are deleted without the lock."""
        while True:
            with self._lock:
                if self._used + length <= self.budget:
                    self._used += length
                    return
                idle = (key for key, kept in self._objects.items() if kept.readers == 0 and kept is not wanted)
                key = next(idle, None)
                if key is None:
                    raise NoRoomError
                victim = self._forget(key)
                self.evictions += 1
            self._delete(victim)

    def _forget(self, key: str) -> Kept:
        """Take an object out; its files, which go with its last reader, get a name that no restart knows."""
        kept = self._objects.pop(key)
        kept.dropped = True
        gone = self.folder / "trash" / str(next(self._numbers))
        with suppress(FileNotFoundError):
            kept.folder.replace(gone)
        kept.folder = gone
        return kept

    def _leave(self, kept: Kept) -> None:
        with self._lock:
            kept.readers -= 1
            last = kept.dropped and kept.readers == 0
        if last:
            self._delete(kept)

    def _delete(self, kept: Kept) -> None:
        shutil.rmtree(kept.folder, ignore_errors=True)
        with self._lock:
            self._used -= kept.bytes

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
            self._used += kept.bytes
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
        kept = Kept(folder, about)
        for number in range(kept.count):
            if (path := kept.path(number)).exists() and path.stat().st_size == kept.length(number):
                kept.present.add(number)
            else:
                path.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError):
        return None
    if about.whole and len(kept.present) < kept.count:  # what is missing was checked, what comes anew was not
        kept.about = msgspec.structs.replace(about, whole=False)
    return kept
