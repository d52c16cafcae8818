"""The reader: local shards, and servers that delay, damage or lose shards."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from stoker.core.units import Bytes
from stoker.errors import InputError, NotFoundError, StokerError, UnavailableError, VerificationError
from stoker.load.loader import ITERATION_STOPPED, Batch, Loader
from stoker.load.planning import find_shard_set
from stoker.load.reader import Reader
from stoker.sampling.order import SampleLocation
from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample
from stoker.shards.scan import ensure_manifest
from stoker.shards.shard_set import ShardSet
from stoker.storage import MAX_GET_BYTES
from stoker.storage.cache import DiskCache
from stoker.storage.local import LocalStore
from tests.support.loaders import loader_threads
from tests.support.servers import RecordedRequest, Reply, scripted_server
from tests.support.trees import make_tree, stoker
from tests.support.waiting import wait_until

TIMEOUT_S = 60.0


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of 30 samples each."""
    return convert(tmp_path, 60, 30)


def convert(root: Path, samples: int, shard_samples: int, *options: object) -> Path:
    """Convert a dataset of three classes."""
    make_tree(root / "pets", dict.fromkeys(("ant", "bee", "cat"), samples // 3))
    assert stoker("data", "convert", root / "pets", root / "out", "--shard-samples", shard_samples, *options) == 0
    return root / "out/train"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary directories of this test."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def cached_digests(cache: Path) -> set[str]:
    """Return the digests of the whole shards in a cache."""
    return {path.name for path in (cache / "objects").glob("*") if re.fullmatch("[0-9a-f]{64}", path.name)}


def count_mapped(folder: Path) -> int:
    """Count the files of a directory that this process has mapped, including unlinked ones."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def locations(*pairs: tuple[int, int]) -> SampleLocation:
    shards, samples = zip(*pairs, strict=True)
    return SampleLocation(np.array(shards, dtype=np.int64), np.array(samples, dtype=np.int64))


def values(batches: list[Batch]) -> list[tuple[list[bytes], list[int]]]:
    """Return batches of encoded images as comparable values."""
    return [([bytes(image) for image in batch.images], batch.labels.tolist()) for batch in batches]


class Origin:
    """Files of a web server; a request from the first byte of a shard on is a download of the whole shard."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gate = threading.Event()
        self.gate.set()
        self.damaged_downloads = 0
        """The first downloads, this many, are damaged."""
        self.downloads: list[str] = []
        self.samples: list[str] = []

    def __call__(self, request: RecordedRequest, number: int) -> Reply:
        name = request.path.lstrip("/")
        path = self.root / name
        if not path.is_file():
            return Reply(404)
        data = path.read_bytes()
        span = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", request.headers.get("range", ""))
        if span is None:
            return Reply(200, data)
        first, last = int(span[1]), int(span[2])
        last = min(last, len(data) - 1)
        body = data[first : last + 1]
        if first == 0:
            self.downloads.append(name)
            self.gate.wait(TIMEOUT_S)
            if len(self.downloads) <= self.damaged_downloads:
                body = body[:-1] + b"\xff"
        else:
            self.samples.append(name)
        return Reply(206, body, {"Content-Range": f"bytes {first}-{last}/{len(data)}"})


def test_samples_are_read_by_range_while_a_shard_downloads(shards: Path, tmp_path: Path) -> None:
    options = {"global_batch": 6, "transform": None, "prefetch": 2}
    here = Loader(str(shards), **options)  # type: ignore[arg-type]
    expected = [values(list(here)) for _ in range(4)]
    origin, cache = Origin(shards), tmp_path / "cache"
    origin.gate.clear()
    names = {hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.glob("*.tar")}
    with scripted_server(origin) as server, Loader(server.url, cache=cache, **options) as loader:  # type: ignore[arg-type]
        batches = iter(loader)
        first = [next(batches) for _ in range(3)]
        wait_until(lambda: len(origin.downloads) == 2)
        assert not origin.gate.is_set()
        assert len(origin.samples) >= 18
        assert loader.times.fetch > 0
        origin.gate.set()
        wait_until(lambda: names <= cached_digests(cache))
        loaded = [values([*first, *batches]), values(list(loader)), values(list(loader))]
        requests = len(origin.samples)
        loaded.append(values(list(loader)))
        assert len(origin.samples) == requests
        assert len(origin.downloads) == 2
    assert loaded == expected


def test_a_shard_damaged_in_transit_is_fetched_again(shards: Path, tmp_path: Path) -> None:
    origin, cache = Origin(shards), tmp_path / "cache"
    origin.damaged_downloads = 1
    with scripted_server(origin) as server, Loader(server.url, global_batch=6, transform=None, cache=cache) as loader:
        for _ in range(3):
            assert sum(batch.count for batch in loader) == 60
        wait_until(lambda: len(cached_digests(cache)) == 2)
        assert sum(batch.count for batch in loader) == 60
    assert len(origin.downloads) == 3
    assert cached_digests(cache) == {hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.glob("*.tar")}


def epochs(loader: Loader) -> Iterator[Batch]:
    """Yield the batches of one epoch after the other, until the timeout."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        yield from loader


def test_a_permanently_damaged_shard_is_an_error_with_its_url(shards: Path, scratch: Path) -> None:
    origin = Origin(shards)
    origin.damaged_downloads = 1_000
    with scripted_server(origin) as server, Loader(server.url, global_batch=6, transform=None) as loader:
        with pytest.raises(VerificationError) as caught:
            for _ in epochs(loader):
                pass
        assert re.fullmatch(rf"{server.url}/pets-train-00000[01]\.tar", str(caught.value.where))
        assert re.search(r"sha256 .*\(.*sample at byte [0-9,]+\)", caught.value.what)
        assert "corrupted or replaced" in str(caught.value.hint)
        assert "convert the dataset again" in str(caught.value.hint)
    assert loader_threads() == []
    assert os.listdir(scratch) == []


class FakeRemoteStore(LocalStore):
    """A directory that acts as a remote store; each download of a whole shard waits for its own gate."""

    def __init__(self, folder: Path, *, blocked: bool = False) -> None:
        super().__init__(str(folder))
        self.url = "far://away"
        self.gates: list[threading.Event] = []
        self.blocked = blocked
        self.downloads: list[str] = []
        self.samples: list[str] = []
        self.index_gates: dict[str, threading.Event] = {}
        self.indexes: list[str] = []
        self.chunks = 0
        self.offline = False
        self._lock = threading.Lock()

    def get(self, name: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        if name.startswith("index/"):
            self.indexes.append(name)
            if name in self.index_gates:
                self.index_gates[name].wait(TIMEOUT_S)
        return super().get(name, max_bytes=max_bytes)

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        self.chunks += length > 1 << 20
        if start == 0:
            with self._lock:
                gate = threading.Event()
                self.gates.append(gate)
                self.downloads.append(name)
            if self.blocked:
                gate.wait(TIMEOUT_S)
            if self.offline:
                raise UnavailableError("server does not respond", where=name)
        elif length <= 1 << 20:
            self.samples.append(name)
        return super().range(name, start, length, etag=etag)

    def release(self) -> None:
        self.blocked = False
        for gate in list(self.gates):
            gate.set()


def remote(shards: Path, *, blocked: bool = False) -> tuple[ShardSet, FakeRemoteStore]:
    store = FakeRemoteStore(shards, blocked=blocked)
    return replace(find_shard_set(str(shards)), store=store), store


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Sixty shards of two samples each."""
    return convert(tmp_path, 120, 2)


def test_reads_the_samples_of_the_index(shards: Path) -> None:
    shard_set = find_shard_set(str(shards))
    reader = Reader(shard_set)
    samples = reader.read(locations((1, 29), (0, 0), (1, 3), (1, 29)))
    for (shard, row), image, label in zip(
        [(1, 29), (0, 0), (1, 3), (1, 29)], samples.images, samples.labels, strict=True
    ):
        index = shard_set.read_index(shard_set.shards[shard].name)[row]
        data = (shards / shard_set.shards[shard].name).read_bytes()
        assert bytes(image) == data[int(index["offset"]) :][: int(index["length"])]
        assert label == index["label"]
    url, offset, length, digest = reader.locate(1, 3)
    assert Path(url).read_bytes()[offset : offset + length] == bytes(samples.images[2])
    assert digest == hashlib.sha256(Path(url).read_bytes()).hexdigest()
    reader.close()
    assert bytes(reader.read(locations((1, 3))).images[0]) == bytes(samples.images[2])


@pytest.mark.parametrize("size", [-1000, 512])
def test_a_shard_of_the_wrong_size_is_named(shards: Path, size: int) -> None:
    shard = sorted(shards.glob("*.tar"))[1]
    before = shard.stat().st_size
    os.truncate(shard, before + size)
    with pytest.raises(VerificationError) as caught:
        list(Loader(str(shards), global_batch=10, transform=None))
    assert caught.value.where == str(shard)
    assert re.search(rf"\b{before + size:,} bytes\b.*\b{before:,}\b", caught.value.what)
    assert "truncated or replaced" in str(caught.value.hint)
    assert "stoker data verify" in str(caught.value.hint)


def test_a_missing_shard_is_named(shards: Path) -> None:
    shard = sorted(shards.glob("*.tar"))[1]
    shard.unlink()
    with pytest.raises(NotFoundError, match=shard.name):
        list(Loader(str(shards), global_batch=10, transform=None))
    assert loader_threads() == []


def test_a_missing_or_truncated_remote_shard_is_named(shards: Path, scratch: Path) -> None:
    shard = sorted(shards.glob("*.tar"))[1]
    data = shard.read_bytes()
    with scripted_server(Origin(shards)) as server:
        shard.write_bytes(data[:-100])
        with Loader(server.url, global_batch=6, transform=None) as loader, pytest.raises(VerificationError) as cut:
            list(epochs(loader))
        assert f"{server.url}/{shard.name}" in str(cut.value)
        shard.unlink()
        with Loader(server.url, global_batch=6, transform=None) as loader, pytest.raises(NotFoundError) as gone:
            list(epochs(loader))
        assert f"{server.url}/{shard.name}" in str(gone.value)
    assert os.listdir(scratch) == []


def test_an_index_of_another_shard_is_named(shards: Path) -> None:
    one, two = sorted((shards / "index").iterdir())
    two.write_bytes(one.read_bytes())
    with pytest.raises(VerificationError, match=two.name):
        list(Loader(str(shards), global_batch=10, transform=None))


def test_only_kept_shards_stay_on_disk(many: Path, scratch: Path) -> None:
    shard_set, store = remote(many)
    reader = Reader(shard_set)
    reader.keep_only([0, 1, 2])
    wait_until(lambda: count_mapped(scratch) == 3)
    wait_until(lambda: not list(scratch.glob("*/files/*")))  # unlinked, so that a kill leaves nothing behind
    reader.keep_only([2, 3])
    wait_until(lambda: len(store.downloads) == 4 and count_mapped(scratch) == 2)
    assert isinstance(reader.read(locations((2, 0))).images[0], memoryview)
    reader.close()
    assert os.listdir(scratch) == []
    assert loader_threads() == []
    assert len(store.downloads) == 4


def test_views_of_a_released_shard_stay_readable(many: Path, scratch: Path) -> None:
    shard_set, _ = remote(many)
    reader = Reader(shard_set)
    reader.keep_only([0])
    wait_until(lambda: isinstance(reader.read(locations((0, 1))).images[0], memoryview))
    held = reader.read(locations((0, 1))).images[0]
    copy = bytes(held)
    reader.keep_only([])
    reader.close()
    gc.collect()
    assert bytes(held) == copy


def test_a_shard_released_while_its_index_loads_is_still_read(many: Path) -> None:
    """A thread that reads a sample gets it, even if the shard is released in the meantime."""
    shard_set, store = remote(many, blocked=True)
    index = f"index/{shard_set.shards[2].name}.npy"
    store.index_gates[index] = threading.Event()
    reader = Reader(shard_set)
    with ThreadPoolExecutor(1) as pool:
        try:
            reader.keep_only([0, 1])
            wait_until(lambda: len(store.downloads) == 2)  # both download threads are busy
            pending = pool.submit(reader.read, locations((2, 0)))
            wait_until(lambda: index in store.indexes)
            reader.keep_only([0, 1])
            store.index_gates[index].set()
            image = pending.result(TIMEOUT_S).images[0]
        finally:
            store.index_gates[index].set()
            store.release()
            reader.close()
    here = Reader(find_shard_set(str(many)))
    assert bytes(image) == bytes(here.read(locations((2, 0))).images[0])


def test_a_shard_released_and_needed_again_is_not_removed(many: Path, scratch: Path) -> None:
    """The first download, which is not needed any more, ends after the second and must not remove its file."""
    shard_set, store = remote(many, blocked=True)
    reader = Reader(shard_set)
    try:
        reader.keep_only([0])
        wait_until(lambda: len(store.downloads) == 1)
        reader.keep_only([])
        reader.keep_only([0])
        wait_until(lambda: len(store.downloads) == 2)
        store.gates[1].set()
        wait_until(lambda: count_mapped(scratch) == 1)
        store.gates[0].set()
        reader.keep_only([0, 1, 2])
        wait_until(lambda: len(store.downloads) == 4)  # both threads are done with shard 0
        assert bytes(reader.read(locations((0, 0))).images[0])
    finally:
        store.release()
        reader.close()


@pytest.mark.parametrize("cached", [False, True])
def test_batches_beyond_the_kept_shards_are_correct(many: Path, tmp_path: Path, scratch: Path, cached: bool) -> None:
    """Eight batches of twelve samples span 48 shards, of which four are kept."""
    options = {"global_batch": 12, "transform": None, "prefetch": 8, "threads": 4}
    here = Loader(str(many), **options)  # type: ignore[arg-type]
    expected = [values(list(here)) for _ in range(5)]
    shard_set, _ = remote(many)
    cache = tmp_path / "cache" if cached else None
    with Loader(shard_set, cache=cache, **options) as loader:  # type: ignore[arg-type]
        assert [values(list(loader)) for _ in range(5)] == expected


def test_a_warm_cache_is_used_instead_of_the_store(shards: Path, tmp_path: Path) -> None:
    shard_set, store = remote(shards)
    reader = Reader(shard_set, cache=DiskCache(tmp_path / "cache"))
    reader.keep_only([0, 1])
    wait_until(lambda: len(cached_digests(tmp_path / "cache")) == 2)
    reader.close()
    assert len(cached_digests(tmp_path / "cache")) == 2  # the cache outlives the reader
    store.samples.clear()
    for _ in range(20):
        reader = Reader(shard_set, cache=DiskCache(tmp_path / "cache"))
        reader.keep_only([0, 1])
        reader.read(locations((0, 0), (1, 1)))
        reader.close()
    assert len(store.downloads) == 2
    assert store.samples == []


def test_only_shards_in_use_are_protected_from_eviction(many: Path, tmp_path: Path) -> None:
    """The cache has room for 3 of 60 shards: all others are read too, and released shards make room."""
    shard_set, _ = remote(many)
    largest = max(entry.size for entry in shard_set.shards)
    cache = DiskCache(tmp_path / "cache", 3 * largest)
    reader = Reader(shard_set, cache=cache)
    here = Reader(find_shard_set(str(many)))
    for shards in ([0, 1, 2], [3, 4, 5], range(6, 20)):
        reader.keep_only(shards)
        wait_until(lambda: all(reader._open[number].done() for number in shards))  # noqa: B023
        opened = [reader._open[number].result() for number in shards]
        wait_until(lambda: all(shard.file or (shard.download and shard.download.done()) for shard in opened))  # noqa: B023
        kept = {str(shard.lease.path) for shard in opened if shard.lease is not None}
        assert 2 <= len(kept) <= 3
        assert all(Path(path).exists() for path in kept)
        for number in shards:
            assert bytes(reader.read(locations((number, 1))).images[0]) == bytes(
                here.read(locations((number, 1))).images[0]
            )
    reader.close()
    with (
        first := cache.open(shard_set.store, shard_set.shards[50].name, size=shard_set.shards[50].size)
    ) or pytest.fail("cache has no room"):
        assert first.path.stat().st_size == shard_set.shards[50].size


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_cache_smaller_than_the_set_gives_the_same_batches(
    many: Path, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    options = {"global_batch": 12, "transform": None, "prefetch": 2, "threads": 2}
    here = Loader(str(many), **options)  # type: ignore[arg-type]
    expected = [values(list(here)) for _ in range(3)]
    shard_set, _ = remote(many)
    size = f"{4 * max(entry.size for entry in shard_set.shards)}"
    limits = {"cache": tmp_path / "cache", "cache_size": size}
    if from_environment:
        monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("STOKER_CACHE_SIZE", size)
        limits = {}
    with Loader(shard_set, **options, **limits) as loader:  # type: ignore[arg-type]
        assert [values(list(loader)) for _ in range(3)] == expected
    assert 1 <= len(cached_digests(tmp_path / "cache")) <= 8
    assert sum(path.stat().st_size for path in (tmp_path / "cache/objects").iterdir()) <= int(size)


def test_an_invalid_cache_size_is_rejected(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=rf"cache_size: must be {Bytes.expected}, got 'much'"):
        Loader(str(shards), global_batch=6, cache_size="much")
    monkeypatch.setenv("STOKER_CACHE_SIZE", "lots")
    with pytest.raises(InputError, match=rf"STOKER_CACHE_SIZE: must be {Bytes.expected}, got 'lots'"):
        Loader(str(shards), global_batch=6)


def test_a_store_that_was_offline_is_tried_again(shards: Path) -> None:
    shard_set, store = remote(shards)
    store.offline = True
    with Loader(shard_set, global_batch=6, transform=None) as loader:
        with pytest.raises(UnavailableError):
            list(epochs(loader))
        store.offline = False
        loader.load_state_dict(loader.plan.start_cursor().state())
        assert sum(batch.count for batch in loader) == 60


def test_close_does_not_wait_for_the_rest_of_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "scans"))
    tar = FORMATS.get("tar")
    (tmp_path / "set").mkdir()
    with (tmp_path / "set/large-000000.tar").open("wb") as file:
        for number in range(10):
            file.writelines(tar.encode(Sample(f"{number}", bytes(4 << 20), "jpg", 0)).chunks)
        file.write(tar.trailer)
    store = FakeRemoteStore(tmp_path / "set", blocked=True)
    shard_set = replace(ensure_manifest(find_shard_set(f"{tmp_path}/set/large-{{000000..000000}}.tar")), store=store)
    reader = Reader(shard_set)
    reader.keep_only([0])
    wait_until(lambda: store.chunks == 1)  # of five
    shard = reader._open[0].result()
    closer = threading.Thread(target=reader.close)
    closer.start()
    wait_until(lambda: not shard.needed)
    store.release()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    assert store.chunks <= 2


def test_a_deleted_loader_leaves_nothing_behind(shards: Path, scratch: Path) -> None:
    shard_set, _ = remote(shards)
    loader = Loader(shard_set, global_batch=6, transform=None)
    for _ in loader:
        break
    del loader
    gc.collect()
    wait_until(lambda: loader_threads() == [])
    assert os.listdir(scratch) == []


def test_a_closed_remote_loader_can_be_used_again(shards: Path, scratch: Path) -> None:
    shard_set, _ = remote(shards)
    loader = Loader(shard_set, global_batch=6, transform=None)
    for _ in range(3):
        batches = iter(loader)
        taken = [next(batches), next(batches)]
        loader.close()
        assert loader_threads() == []
        assert os.listdir(scratch) == []
        with pytest.raises(InputError, match=ITERATION_STOPPED):
            next(batches)
        assert all(bytes(image)[:2] == b"\xff\xd8" for batch in taken for image in batch.images)
    assert loader.state_dict()["consumed"] == 36
    assert sum(batch.count for batch in loader) == 24
    loader.close()


def test_close_does_not_leave_a_reading_thread_waiting(many: Path) -> None:
    """Threads of worker_batches() may still read when the loader is closed."""
    shard_set, store = remote(many)
    store.index_gates = {f"index/{entry.name}.npy": threading.Event() for entry in shard_set.shards}
    reader = Reader(shard_set)
    reader.keep_only(range(16))
    wait_until(lambda: len(store.indexes) == 16)  # every thread that can open a shard is busy
    waiting = threading.Thread(target=read_or_fail, args=(reader, 20), daemon=True)
    waiting.start()
    wait_until(lambda: 20 in reader._open)
    closer = threading.Thread(target=reader.close)
    closer.start()
    wait_until(lambda: not reader._pools)
    for gate in store.index_gates.values():
        gate.set()
    closer.join(TIMEOUT_S)
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    reader.close()


def read_or_fail(reader: Reader, shard: int) -> None:
    """Read from a shard; it may fail, but must return."""
    with suppress(StokerError, RuntimeError, CancelledError):
        reader.read(locations((shard, 0)))


def test_a_damaged_shard_is_an_error_even_if_samples_were_read_before(many: Path) -> None:
    """Samples read by range are not verified; if the downloaded shard turns out to be damaged, the next read raises."""
    shard_set, store = remote(many, blocked=True)
    assert shard_set.manifest is not None
    damaged = [replace_struct(shard, sha256="0" * 64) for shard in shard_set.manifest.shards]
    shard_set = replace(shard_set, manifest=replace_struct(shard_set.manifest, shards=tuple(damaged)))
    with Loader(shard_set, global_batch=6, transform=None, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        store.release()
        with pytest.raises(VerificationError, match=r"sha256 .*\(.*sample at byte [0-9,]+\)"):
            list(itertools.chain(batches, epochs(loader)))


def test_a_server_without_ranges_gets_no_requests_for_single_samples(shards: Path) -> None:
    requested: list[str] = []

    def serve_whole(request: RecordedRequest, number: int) -> Reply:
        path = shards / request.path.lstrip("/")
        if path.suffix == ".tar":
            requested.append(path.name)
        return Reply(200, path.read_bytes()) if path.is_file() else Reply(404)

    with (
        scripted_server(serve_whole) as server,
        Loader(server.url, global_batch=6, transform=None, prefetch=1) as loader,
    ):
        loader.shard_set.store.range(loader.shard_set.shards[0].name, 0, 1)  # now the missing range support is known
        assert sum(batch.count for batch in loader) == 60
    assert len(requested) <= 1 + 2
