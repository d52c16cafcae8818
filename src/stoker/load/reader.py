"""Samples by shard and number: mapped where shards are local, range-read while a remote one is still coming."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.core.scratch import scratch_folder
from stoker.errors import DataFaultError, StokerError
from stoker.sampling.order import Numbers, Place
from stoker.shards.index import Index
from stoker.shards.locate import MappedFile, ShardSet
from stoker.shards.sample import Buffer
from stoker.storage import Entry, checked, local_path
from stoker.storage.cached import fetched

THREADS = {"fetch": 2, "range": 16}
"""Whole shards come by few threads; single samples, each of which waits for one answer, by many."""
TOUCHED_BYTES = 96 << 20
"""Once so much of the mapped shards was read, all of it is given back to the system, so that memory stays small."""


class Samples(NamedTuple):
    """Encoded images with their labels, and the seconds spent waiting for the network."""

    images: list[Buffer]
    labels: Numbers
    fetch_s: float


class _Open:
    """One shard in use: its index, and its bytes once they are at hand."""

    def __init__(self, entry: Entry, rows: Index) -> None:
        self.name, self.size = entry
        self.offsets = rows["offset"].astype(np.int64)
        self.lengths = rows["length"].astype(np.int64)
        self.labels = rows["label"].astype(np.int64)
        self.file: MappedFile | None = None
        self.coming: Future[Path] | None = None


class Reader:
    """Reads a set's samples for many threads; holds the shards that it was told to keep, or was asked for since."""

    def __init__(self, one: ShardSet, *, cache: Path | None = None) -> None:
        self._set = one
        self._local = local_path(one.store.url)
        self._lock = threading.Lock()
        self._open: dict[int, Future[_Open]] = {}
        self._touched = 0
        self._cache = self._folder = cache
        self._scratch = ExitStack()
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def keep(self, shards: Iterable[int]) -> None:
        """Let go of all other shards, and begin to fetch these, the first ones first."""
        wanted = dict.fromkeys(shards)
        with self._lock:
            dropped = [self._open.pop(number) for number in list(self._open) if number not in wanted]
        for shard in dropped:
            shard.add_done_callback(self._drop)
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
        for number in set(place.shards.tolist()):
            shards[number] = shard = self._begin(number).result()
            try:
                self._arrive(shard)
            except DataFaultError as error:
                wanted = int(shard.offsets[place.samples[place.shards == number][0]])
                what = f"{error.what} (its sample at byte {wanted:,} is wanted)"
                raise DataFaultError(what, where=error.where, hint=error.hint) from error
        opened = time.perf_counter()
        for row, (number, sample) in enumerate(zip(place.shards.tolist(), place.samples.tolist(), strict=True)):
            shard = shards[number]
            labels[row] = shard.labels[sample]
            if shard.file is None:
                cold[row] = (shard, sample)
                images.append(b"")
                continue
            offset, length = int(shard.offsets[sample]), int(shard.lengths[sample])
            images.append(shard.file.view[offset : offset + length])
            touched += length
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
        """Let go of everything and end all threads; what was fetched without a cache folder is removed."""
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._open.clear()
            self._folder = self._cache
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
            else:
                made.coming = self._fetch(made)
            shard.set_result(made)
        except BaseException as error:
            with self._lock:  # whoever asks again tries again
                self._open.pop(number, None)
            shard.set_exception(error)

    def _fetch(self, shard: _Open) -> Future[Path]:
        with self._lock:
            if self._folder is None:
                self._folder = self._scratch.enter_context(scratch_folder())
            folder = self._folder
        name, known = self._set.folder + shard.name, self._set.known.get(shard.name)
        digest = "" if known is None else known.sha256
        return self._pool("fetch").submit(fetched, self._set.store, name, folder, size=shard.size, sha256=digest)

    def _arrive(self, shard: _Open) -> None:
        """Map a remote shard that has come; its failure is raised here, where its samples are wanted."""
        if shard.file is None and shard.coming is not None and shard.coming.done():
            shard.file = self._mapped(shard, shard.coming.result())

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

    def _drop(self, opened: Future[_Open]) -> None:
        """Let go of one shard; a fetched copy that no cache folder keeps is removed."""
        if opened.exception() is not None:
            return
        coming = opened.result().coming
        if coming is not None and not coming.cancel() and self._cache is None:
            coming.add_done_callback(_remove)

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

    def _pool(self, kind: str) -> ThreadPoolExecutor:
        with self._lock:
            if kind not in self._pools:
                self._pools[kind] = ThreadPoolExecutor(THREADS[kind], thread_name_prefix=f"stoker-{kind}")
            return self._pools[kind]


def _remove(done: Future[Path]) -> None:
    try:
        done.result().unlink(missing_ok=True)
    except (StokerError, OSError):
        return  # it never came
