"""Samples by shard and number: mapped where shards are local, range-read while a remote one is still coming."""

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

from stoker.core.scratch import scratch_folder
from stoker.core.threads import Threads
from stoker.errors import DataFaultError, StokerError, StoppedError
from stoker.sampling.order import Numbers, Place
from stoker.shards.index import Index
from stoker.shards.sample import Buffer
from stoker.shards.shard_set import MappedFile, ShardSet
from stoker.storage import Entry, Store, checked, local_path
from stoker.storage.cache import Cache, Held, fetch

THREADS = {"fetch": 2, "range": 16}
"""Whole shards come by few threads; single samples, each of which waits for one answer, by many."""
TOUCHED_BYTES = 96 << 20
"""Once so much of the mapped shards was read, all of it is given back to the system, so that memory stays small."""
AROUND_BYTES = 64 << 10  # that the system maps around what is touched


class Samples(NamedTuple):
    """Encoded images with their labels, and the seconds spent waiting for the network."""

    images: list[Buffer]
    labels: Numbers
    fetch_s: float


class _Object(TypedDict):
    """An object of a store, as a fetch wants it named."""

    store: Store
    name: str
    size: int
    sha256: str


class _Open:
    """One shard in use: its index, and its bytes once they are at hand."""

    def __init__(self, entry: Entry, rows: Index) -> None:
        self.name, self.size = entry
        self.offsets = rows["offset"].astype(np.int64)
        self.lengths = rows["length"].astype(np.int64)
        self.labels = rows["label"].astype(np.int64)
        self.file: MappedFile | None = None
        self.held: Held | None = None
        """What keeps its copy in the cache."""
        self.coming: Future[MappedFile] | None = None
        self.wanted = True
        self.read_cold = False
        """Whether samples were read from it before it could be checked as a whole."""

    def let_go(self) -> None:
        """Stop what is on its way; who still reads from it does so by ranges."""
        self.wanted = False
        if self.coming is not None:
            self.coming.cancel()
        if self.held is not None:
            self.held.close()

    def hold(self, held: Held) -> None:
        """Keep its copy in the cache from now on, unless it was let go meanwhile."""
        self.held = held
        if not self.wanted:
            held.close()


class Reader:
    """Reads a set's samples for many threads; holds the shards that it was told to keep, or was asked for since."""

    def __init__(self, one: ShardSet, *, cache: Cache | None = None) -> None:
        self._set = one
        self._local = local_path(one.store.url)
        self._lock = threading.Lock()
        self._open: dict[int, Future[_Open]] = {}
        self._touched = 0
        self._failed = False
        self._spoilt: DataFaultError | None = None
        self._unchecked: set[_Open] = set()
        self._cache = cache
        self._folder: Path | None = None
        self._scratch = ExitStack()
        self._numbers = itertools.count()
        self._pools: dict[str, Threads] = {}

    def begin(self) -> None:
        """Begin an iteration: after a failure everything is asked for anew."""
        if self._failed:
            self._failed = False
            self.keep(())

    def keep(self, shards: Iterable[int]) -> None:
        """Let go of all other shards, and begin to fetch these, the first ones first."""
        wanted = dict.fromkeys(shards)
        with self._lock:
            dropped = [self._open.pop(number) for number in list(self._open) if number not in wanted]
        for shard in dropped:
            shard.add_done_callback(_let_go)
        if self._local is None:
            for number in wanted:
                self._begin(number)

    def read(self, place: Place) -> Samples:
        """Read samples wherever they lie."""
        images: list[Buffer] = []
        labels = np.empty(len(place.shards), dtype=np.int64)
        shards: dict[int, _Open] = {}
        cold: dict[int, tuple[_Open, int]] = {}
        touched = 0
        started = time.perf_counter()
        if self._spoilt is not None:
            self._failed = True
            spoilt, self._spoilt = self._spoilt, None
            raise spoilt
        for number in set(place.shards.tolist()):
            shards[number] = shard = self._begin(number).result()
            try:
                self._arrive(shard)
            except StokerError as error:
                self._failed = True
                if not isinstance(error, DataFaultError):
                    raise
                raise _with_sample(error, shard, int(place.samples[place.shards == number][0])) from error
        opened = time.perf_counter()
        for row, (number, sample) in enumerate(zip(place.shards.tolist(), place.samples.tolist(), strict=True)):
            shard = shards[number]
            labels[row] = shard.labels[sample]
            if shard.file is None:
                self._note_cold(shard, sample)
                cold[row] = (shard, sample)
                images.append(b"")
                continue
            offset, length = int(shard.offsets[sample]), int(shard.lengths[sample])
            images.append(shard.file.view[offset : offset + length])
            touched += length + AROUND_BYTES
        self._forget(touched)
        if not cold:
            return Samples(images, labels, 0.0 if self._local else opened - started)
        ranged = time.perf_counter()
        for row, data in zip(cold, self._pool("range").map(self._range, cold.values()), strict=True):
            images[row] = data
        return Samples(images, labels, opened - started + time.perf_counter() - ranged)

    def where(self, number: int, sample: int) -> tuple[str, int]:
        """Tell the URL of a shard, and at which byte one of its samples lies."""
        shard = self._begin(number).result()
        return self._set.url_of(shard.name), int(shard.offsets[sample])

    def close(self) -> None:
        """Let go of everything and end all threads; what was fetched without a cache folder is gone then."""
        with self._lock:
            opened, self._open = self._open, {}
        for shard in opened.values():
            shard.add_done_callback(lambda done: _let_go(done, closing=True))
        for cold in list(self._unchecked):
            cold.let_go()
        while self._pools:  # the last task of one may have started another
            with self._lock:
                pools, self._pools = self._pools, {}
            for pool in pools.values():
                pool.shutdown(wait=True, cancel_futures=True)
        for shard in opened.values():
            with suppress(InvalidStateError):  # nobody will open it any more, and somebody may wait for it
                shard.set_exception(StoppedError("the loader was closed", where=self._set.url))
        with self._lock:
            self._folder = None
            self._scratch.close()

    def _begin(self, number: int) -> Future[_Open]:
        """Open a shard unless it is open: here if it is local, else in a thread."""
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                return shard
            shard = self._open[number] = Future()
        if self._local is None:
            self._pool("range").submit(self._make, number, shard)
        else:
            self._make(number, shard)
        return shard

    def _make(self, number: int, shard: Future[_Open]) -> None:
        try:
            entry = self._set.shards[number]
            made = _Open(entry, self._set.index(entry.name))
            if self._local is not None:
                made.file = self._mapped(made, self._local / checked(self._set.folder + entry.name))
            elif self._cache is not None and (held := self._cache.find(**self._object(made))):
                made.file = self._kept(made, held)
            else:
                made.coming = self._pool("fetch").submit(self._fetch, made)
        except BaseException as error:
            with self._lock:
                if self._open.get(number) is shard:  # whoever asks again tries again
                    del self._open[number]
            with suppress(InvalidStateError):  # closed meanwhile
                shard.set_exception(error)
        else:
            with suppress(InvalidStateError):
                shard.set_result(made)

    def _fetch(self, shard: _Open) -> MappedFile:
        """Fetch a shard and map it; where no cache keeps it, its copy has no name from then on, and none is left."""
        this = self._object(shard)
        if self._cache is not None and (held := self._cache.open(wanted=lambda: shard.wanted, **this)):
            return self._kept(shard, held)
        with self._lock:
            if self._folder is None:
                self._folder = self._scratch.enter_context(scratch_folder())
            path = self._folder / str(next(self._numbers))  # two may fetch one shard, when it is wanted again
        fetch(path=path, wanted=lambda: shard.wanted, **this)
        file = self._mapped(shard, path)
        path.unlink()
        return file

    def _kept(self, shard: _Open, held: Held) -> MappedFile:
        file = self._mapped(shard, held.path)
        shard.hold(held)
        return file

    def _object(self, shard: _Open) -> _Object:
        known = self._set.known.get(shard.name)
        return {
            "store": self._set.store,
            "name": self._set.folder + shard.name,
            "size": shard.size,
            "sha256": "" if known is None else known.sha256,
        }

    def _arrive(self, shard: _Open) -> None:
        """Take a remote shard that has come; its failure is raised here, where its samples are wanted.

        From a server that knows no ranges it is waited for: each single sample would cost all that lies before it.
        """
        if shard.file is not None or shard.coming is None or shard.coming.cancelled():
            return
        if not shard.coming.done() and getattr(self._set.store, "ranged", True):
            return
        try:
            shard.file = shard.coming.result()
        except (StoppedError, CancelledError):  # it was let go
            return

    def _note_cold(self, shard: _Open, sample: int) -> None:
        """Remember a shard that is read before it could be checked: should the check fail, the next read says so."""
        if shard.read_cold or shard.coming is None:
            return
        shard.read_cold = True
        self._unchecked.add(shard)

        reader = weakref.ref(self)  # one that is forgotten must not live on in what it waits for

        def was_checked(done: Future[MappedFile]) -> None:
            if (me := reader()) is None:
                return
            me._unchecked.discard(shard)
            if not done.cancelled() and isinstance(error := done.exception(), DataFaultError):
                me._spoilt = _with_sample(error, shard, sample)

        shard.coming.add_done_callback(was_checked)

    def _mapped(self, shard: _Open, path: Path) -> MappedFile:
        file = MappedFile(path)
        if len(file.view) != shard.size:
            raise DataFaultError(
                f"is {len(file.view):,} bytes, and should be {shard.size:,}",
                where=self._set.url_of(shard.name),
                hint="it was cut short or replaced: stoker data verify tells more",
            )
        return file

    def _range(self, one: tuple[_Open, int]) -> Buffer:
        shard, sample = one
        offset, length = int(shard.offsets[sample]), int(shard.lengths[sample])
        return self._set.store.range(self._set.folder + shard.name, offset, length)

    def _forget(self, touched: int) -> None:
        with self._lock:
            self._touched += touched
            if self._touched < TOUCHED_BYTES:
                return
            self._touched = 0
            opened = [shard.result() for shard in self._open.values() if shard.done() and not shard.exception()]
        for shard in opened:
            if shard.file is not None:
                shard.file.forget()

    def _pool(self, kind: str) -> Threads:
        with self._lock:
            if kind not in self._pools:
                self._pools[kind] = Threads(THREADS[kind], f"stoker-{kind}")
            return self._pools[kind]


def _with_sample(error: DataFaultError, shard: _Open, sample: int) -> DataFaultError:
    """Say of a shard's fault which sample was wanted."""
    what = f"{error.what} (its sample at byte {int(shard.offsets[sample]):,} is wanted)"
    return DataFaultError(what, where=error.where, hint=error.hint)


def _let_go(opened: Future[_Open], *, closing: bool = False) -> None:
    """Let go of a shard; one that was read before it was checked still comes, to be checked, unless all is closed."""
    if opened.exception() is not None:
        return
    shard = opened.result()
    if shard.read_cold and shard.coming is not None and not closing:
        shard.coming.add_done_callback(lambda _: shard.let_go())
    else:
        shard.let_go()
