"""Samples by shard and number, from folders, a web server that holds back or spoils shards, and one that is slow."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from stoker.errors import DataFaultError, InputError, NotFoundError, StokerError, UnavailableError
from stoker.load.loader import Batch, Loader, find_one
from stoker.load.reader import Reader
from stoker.sampling.order import Place
from stoker.shards.formats import FORMATS
from stoker.shards.sample import Sample
from stoker.shards.scan import described
from stoker.shards.shard_set import ShardSet
from stoker.storage.cache import Cache
from stoker.storage.local import LocalStore
from tests.support.servers import Asked, Reply, scripted
from tests.support.trees import make_tree, stoker

PATIENCE_S = 60.0


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of 30 samples."""
    return converted(tmp_path, 60, 30)


def converted(root: Path, samples: int, shard_samples: int, *options: object) -> Path:
    """Make a set of so many samples of three classes."""
    make_tree(root / "pets", dict.fromkeys(("ant", "bee", "cat"), samples // 3))
    assert stoker("data", "convert", root / "pets", root / "out", "--shard-samples", shard_samples, *options) == 0
    return root / "out/train"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders of this test are made."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread will bring about."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def copies(cache: Path) -> set[str]:
    """The digests of the whole shards in a cache."""
    return {path.name for path in (cache / "objects").glob("*") if re.fullmatch("[0-9a-f]{64}", path.name)}


def mapped(folder: Path) -> int:
    """Count the files of a folder that this process has mapped, whether they still have a name or not."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _earlier_threads() -> None:
    EARLIER.update(threading.enumerate())


def our_threads() -> list[str]:
    """The loader's threads that this test has started and that still run."""
    return [thread.name for thread in set(threading.enumerate()) - EARLIER if thread.name.startswith("stoker-")]


def place(*pairs: tuple[int, int]) -> Place:
    shards, samples = zip(*pairs, strict=True)
    return Place(np.array(shards, dtype=np.int64), np.array(samples, dtype=np.int64))


def plain(batches: list[Batch]) -> list[tuple[list[bytes], list[int]]]:
    """Batches of encoded images as values that can be compared."""
    return [([bytes(image) for image in batch.images], batch.labels.tolist()) for batch in batches]


class Origin:
    """The files behind a web server; what asks for a shard from its first byte on fetches all of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gate = threading.Event()
        self.gate.set()
        self.spoilt = 0
        """So many whole shards come damaged."""
        self.whole: list[str] = []
        self.single: list[str] = []

    def __call__(self, asked: Asked, number: int) -> Reply:
        name = asked.path.lstrip("/")
        path = self.root / name
        if not path.is_file():
            return Reply(404)
        data = path.read_bytes()
        span = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", asked.headers.get("range", ""))
        if span is None:
            return Reply(200, data)
        first, last = int(span[1]), int(span[2])
        last = min(last, len(data) - 1)
        body = data[first : last + 1]
        if first == 0:
            self.whole.append(name)
            self.gate.wait(PATIENCE_S)
            if len(self.whole) <= self.spoilt:
                body = body[:-1] + b"\xff"
        else:
            self.single.append(name)
        return Reply(206, body, {"Content-Range": f"bytes {first}-{last}/{len(data)}"})


def test_a_cold_shard_does_not_block(shards: Path, tmp_path: Path) -> None:
    options = {"global_batch": 6, "transform": None, "prefetch": 2}
    here = Loader(str(shards), **options)  # type: ignore[arg-type]
    expected = [plain(list(here)) for _ in range(4)]
    origin, cache = Origin(shards), tmp_path / "cache"
    origin.gate.clear()
    names = {hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.glob("*.tar")}
    with scripted(origin) as server, Loader(server.url, cache=cache, **options) as loader:  # type: ignore[arg-type]
        batches = iter(loader)
        first = [next(batches) for _ in range(3)]
        until(lambda: len(origin.whole) == 2)
        assert not origin.gate.is_set()
        assert len(origin.single) >= 18
        assert loader.times.fetch > 0
        origin.gate.set()
        until(lambda: names <= copies(cache))
        got = [plain([*first, *batches]), plain(list(loader)), plain(list(loader))]
        asked = len(origin.single)
        got.append(plain(list(loader)))
        assert len(origin.single) == asked
        assert len(origin.whole) == 2
    assert got == expected


def test_a_shard_damaged_on_the_way_is_fetched_again(shards: Path, tmp_path: Path) -> None:
    origin, cache = Origin(shards), tmp_path / "cache"
    origin.spoilt = 1
    with scripted(origin) as server, Loader(server.url, global_batch=6, transform=None, cache=cache) as loader:
        for _ in range(3):
            assert sum(batch.count for batch in loader) == 60
        until(lambda: len(copies(cache)) == 2)
        assert sum(batch.count for batch in loader) == 60
    assert len(origin.whole) == 3
    assert copies(cache) == {hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.glob("*.tar")}


def epochs(loader: Loader) -> Iterator[Batch]:
    """Batches of one epoch after the other, as long as there is patience."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        yield from loader


def test_a_shard_that_stays_damaged_is_told_with_its_url(shards: Path, scratch: Path) -> None:
    origin = Origin(shards)
    origin.spoilt = 1_000
    with scripted(origin) as server, Loader(server.url, global_batch=6, transform=None) as loader:
        with pytest.raises(DataFaultError) as caught:
            for _ in epochs(loader):
                pass
        message = str(caught.value)
        assert re.match(rf"{server.url}/pets-train-00000[01]\.tar: its sha256 is ", message)
        assert re.search(
            r"\(its sample at byte [0-9,]+ is wanted\); it was damaged or replaced: put the right", message
        )
    assert our_threads() == []
    assert os.listdir(scratch) == []


class Far(LocalStore):
    """A folder that passes for a distant store; each fetch of a whole shard waits for a gate of its own."""

    def __init__(self, folder: Path, *, held: bool = False) -> None:
        super().__init__(str(folder))
        self.url = "far://away"
        self.gates: list[threading.Event] = []
        self.held = held
        self.whole: list[str] = []
        self.single: list[str] = []
        self.index_gates: dict[str, threading.Event] = {}
        self.indexes: list[str] = []
        self.chunks = 0
        self.away = False
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes:
        if name.startswith("index/"):
            self.indexes.append(name)
            if name in self.index_gates:
                self.index_gates[name].wait(PATIENCE_S)
        return super().get(name)

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        self.chunks += length > 1 << 20
        if start == 0:
            with self._lock:
                gate = threading.Event()
                self.gates.append(gate)
                self.whole.append(name)
            if self.held:
                gate.wait(PATIENCE_S)
            if self.away:
                raise UnavailableError("the server does not answer", where=name)
        elif length <= 1 << 20:
            self.single.append(name)
        return super().range(name, start, length, etag=etag)

    def release(self) -> None:
        self.held = False
        for gate in list(self.gates):
            gate.set()


def far(shards: Path, *, held: bool = False) -> tuple[ShardSet, Far]:
    store = Far(shards, held=held)
    return replace(find_one(str(shards)), store=store), store


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Sixty shards of two samples."""
    return converted(tmp_path, 120, 2)


def test_reads_what_the_index_tells(shards: Path) -> None:
    one = find_one(str(shards))
    reader = Reader(one)
    samples = reader.read(place((1, 29), (0, 0), (1, 3), (1, 29)))
    for (shard, row), image, label in zip(
        [(1, 29), (0, 0), (1, 3), (1, 29)], samples.images, samples.labels, strict=True
    ):
        index = one.index(one.shards[shard].name)[row]
        data = (shards / one.shards[shard].name).read_bytes()
        assert bytes(image) == data[int(index["offset"]) :][: int(index["length"])]
        assert label == index["label"]
    url, offset = reader.where(1, 3)
    assert Path(url).read_bytes()[offset:].startswith(bytes(samples.images[2]))
    reader.close()
    assert bytes(reader.read(place((1, 3))).images[0]) == bytes(samples.images[2])


@pytest.mark.parametrize("size", [-1000, 512])
def test_a_shard_of_another_size_is_named(shards: Path, size: int) -> None:
    shard = sorted(shards.glob("*.tar"))[1]
    before = shard.stat().st_size
    os.truncate(shard, before + size)
    with pytest.raises(DataFaultError) as caught:
        list(Loader(str(shards), global_batch=10, transform=None))
    assert str(caught.value).startswith(f"{shard}: is {before + size:,} bytes, and should be {before:,}; it was cut")


def test_a_shard_that_is_gone_is_named(shards: Path) -> None:
    shard = sorted(shards.glob("*.tar"))[1]
    shard.unlink()
    with pytest.raises(NotFoundError, match=shard.name):
        list(Loader(str(shards), global_batch=10, transform=None))
    assert our_threads() == []


def test_a_remote_shard_that_is_gone_or_cut_short_is_named(shards: Path, scratch: Path) -> None:
    shard = sorted(shards.glob("*.tar"))[1]
    data = shard.read_bytes()
    with scripted(Origin(shards)) as server:
        shard.write_bytes(data[:-100])
        with Loader(server.url, global_batch=6, transform=None) as loader, pytest.raises(DataFaultError) as cut:
            list(epochs(loader))
        assert f"{server.url}/{shard.name}" in str(cut.value)
        shard.unlink()
        with Loader(server.url, global_batch=6, transform=None) as loader, pytest.raises(NotFoundError) as gone:
            list(epochs(loader))
        assert f"{server.url}/{shard.name}" in str(gone.value)
    assert os.listdir(scratch) == []


def test_an_index_of_another_set_is_named(shards: Path) -> None:
    one, two = sorted((shards / "index").iterdir())
    two.write_bytes(one.read_bytes())
    with pytest.raises(DataFaultError, match=two.name):
        list(Loader(str(shards), global_batch=10, transform=None))


def test_only_shards_to_keep_stay_on_the_disk(many: Path, scratch: Path) -> None:
    one, store = far(many)
    reader = Reader(one)
    reader.keep([0, 1, 2])
    until(lambda: mapped(scratch) == 3)
    until(lambda: not list(scratch.glob("*/files/*")))  # so that a kill leaves nothing
    reader.keep([2, 3])
    until(lambda: len(store.whole) == 4 and mapped(scratch) == 2)
    assert isinstance(reader.read(place((2, 0))).images[0], memoryview)
    reader.close()
    assert os.listdir(scratch) == []
    assert our_threads() == []
    assert len(store.whole) == 4


def test_what_is_let_go_stays_readable_for_who_holds_it(many: Path, scratch: Path) -> None:
    one, _ = far(many)
    reader = Reader(one)
    reader.keep([0])
    until(lambda: isinstance(reader.read(place((0, 1))).images[0], memoryview))
    held = reader.read(place((0, 1))).images[0]
    copy = bytes(held)
    reader.keep([])
    reader.close()
    gc.collect()
    assert bytes(held) == copy


def test_a_shard_let_go_while_its_index_comes_is_still_read(many: Path) -> None:
    """A thread that asked for a sample gets it, though the consumer no longer wants the shard kept."""
    one, store = far(many, held=True)
    index = f"index/{one.shards[2].name}.npy"
    store.index_gates[index] = threading.Event()
    reader = Reader(one)
    with ThreadPoolExecutor(1) as pool:
        try:
            reader.keep([0, 1])
            until(lambda: len(store.whole) == 2)  # both threads that fetch are busy
            wanted = pool.submit(reader.read, place((2, 0)))
            until(lambda: index in store.indexes)
            reader.keep([0, 1])
            store.index_gates[index].set()
            image = wanted.result(PATIENCE_S).images[0]
        finally:
            store.index_gates[index].set()
            store.release()
            reader.close()
    here = Reader(find_one(str(many)))
    assert bytes(image) == bytes(here.read(place((2, 0))).images[0])


def test_a_shard_let_go_and_wanted_again_is_not_removed(many: Path, scratch: Path) -> None:
    """The first fetch, which nobody wants any more, ends after the second and must not take the file away."""
    one, store = far(many, held=True)
    reader = Reader(one)
    try:
        reader.keep([0])
        until(lambda: len(store.whole) == 1)
        reader.keep([])
        reader.keep([0])
        until(lambda: len(store.whole) == 2)
        store.gates[1].set()
        until(lambda: mapped(scratch) == 1)
        store.gates[0].set()
        reader.keep([0, 1, 2])
        until(lambda: len(store.whole) == 4)  # both threads are done with shard 0
        assert bytes(reader.read(place((0, 0))).images[0])
    finally:
        store.release()
        reader.close()


@pytest.mark.parametrize("cached", [False, True])
def test_batches_far_ahead_of_what_is_kept_are_right(many: Path, tmp_path: Path, scratch: Path, cached: bool) -> None:
    """Eight batches of twelve samples reach over 48 shards, and four are kept."""
    options = {"global_batch": 12, "transform": None, "prefetch": 8, "threads": 4}
    here = Loader(str(many), **options)  # type: ignore[arg-type]
    expected = [plain(list(here)) for _ in range(5)]
    one, _ = far(many)
    cache = tmp_path / "cache" if cached else None
    with Loader(one, cache=cache, **options) as loader:  # type: ignore[arg-type]
        assert [plain(list(loader)) for _ in range(5)] == expected


def test_a_warm_cache_is_asked_instead_of_the_store(shards: Path, tmp_path: Path) -> None:
    one, store = far(shards)
    reader = Reader(one, cache=Cache(tmp_path / "cache"))
    reader.keep([0, 1])
    until(lambda: len(copies(tmp_path / "cache")) == 2)
    reader.close()
    assert len(copies(tmp_path / "cache")) == 2  # a cache folder outlives the reader
    store.single.clear()
    for _ in range(20):
        reader = Reader(one, cache=Cache(tmp_path / "cache"))
        reader.keep([0, 1])
        reader.read(place((0, 0), (1, 1)))
        reader.close()
    assert len(store.whole) == 2
    assert store.single == []


def test_only_shards_in_use_cannot_be_evicted(many: Path, tmp_path: Path) -> None:
    """Room for three shards of sixty: the others are read all the same, and what is let go makes room."""
    one, _ = far(many)
    largest = max(entry.size for entry in one.shards)
    cache = Cache(tmp_path / "cache", 3 * largest)
    reader = Reader(one, cache=cache)
    here = Reader(find_one(str(many)))
    for shards in ([0, 1, 2], [3, 4, 5], range(6, 20)):
        reader.keep(shards)
        until(lambda: all(reader._open[number].done() for number in shards))  # noqa: B023
        opened = [reader._open[number].result() for number in shards]
        until(lambda: all(shard.file or (shard.coming and shard.coming.done()) for shard in opened))  # noqa: B023
        kept = {str(shard.held.path) for shard in opened if shard.held is not None}
        assert 2 <= len(kept) <= 3
        assert all(Path(path).exists() for path in kept)
        for number in shards:
            assert bytes(reader.read(place((number, 1))).images[0]) == bytes(here.read(place((number, 1))).images[0])
    reader.close()
    with (first := cache.open(one.store, one.shards[50].name, size=one.shards[50].size)) or pytest.fail("no room"):
        assert first.path.stat().st_size == one.shards[50].size


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_cache_smaller_than_the_set_gives_the_same_batches(
    many: Path, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    options = {"global_batch": 12, "transform": None, "prefetch": 2, "threads": 2}
    here = Loader(str(many), **options)  # type: ignore[arg-type]
    expected = [plain(list(here)) for _ in range(3)]
    one, _ = far(many)
    size = f"{4 * max(entry.size for entry in one.shards)}"
    limits = {"cache": tmp_path / "cache", "cache_size": size}
    if from_environment:
        monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("STOKER_CACHE_SIZE", size)
        limits = {}
    with Loader(one, **options, **limits) as loader:  # type: ignore[arg-type]
        assert [plain(list(loader)) for _ in range(3)] == expected
    assert 1 <= len(copies(tmp_path / "cache")) <= 8
    assert sum(path.stat().st_size for path in (tmp_path / "cache/objects").iterdir()) <= int(size)


def test_a_size_of_the_cache_that_is_none_is_told(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cache_size: expected a size such as 200Gi"):
        Loader(str(shards), global_batch=6, cache_size="much")
    monkeypatch.setenv("STOKER_CACHE_SIZE", "lots")
    with pytest.raises(InputError, match=r"STOKER_CACHE_SIZE: expected .*'lots'"):
        Loader(str(shards), global_batch=6)


def test_a_store_that_was_away_is_asked_again(shards: Path) -> None:
    one, store = far(shards)
    store.away = True
    with Loader(one, global_batch=6, transform=None) as loader:
        with pytest.raises(UnavailableError):
            list(epochs(loader))
        store.away = False
        loader.load_state_dict(loader.plan.start().state())
        assert sum(batch.count for batch in loader) == 60


def test_closing_does_not_fetch_the_rest_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "scans"))
    tar = FORMATS.get("tar")
    (tmp_path / "set").mkdir()
    with (tmp_path / "set/large-000000.tar").open("wb") as file:
        for number in range(10):
            file.writelines(tar.encode(Sample(f"{number}", bytes(4 << 20), "jpg", 0)).chunks)
        file.write(tar.trailer)
    store = Far(tmp_path / "set", held=True)
    one = replace(described(find_one(f"{tmp_path}/set/large-{{000000..000000}}.tar")), store=store)
    reader = Reader(one)
    reader.keep([0])
    until(lambda: store.chunks == 1)  # of five
    closer = threading.Thread(target=reader.close)
    closer.start()
    closer.join(0.5)
    store.release()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert store.chunks <= 2


def test_a_loader_that_is_forgotten_leaves_nothing_behind(shards: Path, scratch: Path) -> None:
    one, _ = far(shards)
    loader = Loader(one, global_batch=6, transform=None)
    for _ in loader:
        break
    del loader
    gc.collect()
    until(lambda: our_threads() == [])
    assert os.listdir(scratch) == []


def test_a_remote_loader_that_is_closed_can_be_used_again(shards: Path, scratch: Path) -> None:
    one, _ = far(shards)
    loader = Loader(one, global_batch=6, transform=None)
    for _ in range(3):
        batches = iter(loader)
        taken = [next(batches), next(batches)]
        loader.close()
        assert our_threads() == []
        assert os.listdir(scratch) == []
        with pytest.raises(InputError, match="this iteration was ended"):
            next(batches)
        assert all(bytes(image)[:2] == b"\xff\xd8" for batch in taken for image in batch.images)
    assert loader.state_dict()["consumed"] == 36
    assert sum(batch.count for batch in loader) == 24
    loader.close()


def test_who_waits_for_a_shard_is_not_left_waiting_by_close(many: Path) -> None:
    """A share is an iteration of its own, so that its threads may still read when the loader is closed."""
    one, store = far(many)
    store.index_gates = {f"index/{entry.name}.npy": threading.Event() for entry in one.shards}
    reader = Reader(one)
    reader.keep(range(16))
    until(lambda: len(store.indexes) == 16)  # every thread that could open a shard is busy
    waiting = threading.Thread(target=ended, args=(reader, 20), daemon=True)
    waiting.start()
    until(lambda: 20 in reader._open)
    closer = threading.Thread(target=reader.close)
    closer.start()
    until(lambda: not reader._pools)
    for gate in store.index_gates.values():
        gate.set()
    closer.join(PATIENCE_S)
    waiting.join(3)
    assert not waiting.is_alive()
    reader.close()


def ended(reader: Reader, shard: int) -> None:
    """Read from a shard; that it fails is as good as that it works, as long as it ends."""
    with suppress(StokerError, RuntimeError, CancelledError):
        reader.read(place((shard, 0)))


def test_a_spoilt_shard_is_told_even_if_it_was_read_before_it_came(many: Path) -> None:
    """Samples read by ranges are not checked; when their shard has come and is another, the next read says so."""
    one, store = far(many, held=True)
    assert one.manifest is not None
    spoilt = [replace_struct(shard, sha256="0" * 64) for shard in one.manifest.shards]
    one = replace(one, manifest=replace_struct(one.manifest, shards=tuple(spoilt)))
    with Loader(one, global_batch=6, transform=None, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        store.release()
        with pytest.raises(DataFaultError, match=r"its sha256 is .* \(its sample at byte [0-9,]+ is wanted\)"):
            list(itertools.chain(batches, epochs(loader)))


def test_a_server_without_ranges_is_not_asked_for_single_samples(shards: Path) -> None:
    asked: list[str] = []

    def whole(request: Asked, number: int) -> Reply:
        path = shards / request.path.lstrip("/")
        if path.suffix == ".tar":
            asked.append(path.name)
        return Reply(200, path.read_bytes()) if path.is_file() else Reply(404)

    with scripted(whole) as server, Loader(server.url, global_batch=6, transform=None, prefetch=1) as loader:
        loader.set.store.range(loader.set.shards[0].name, 0, 1)  # now it is known
        assert sum(batch.count for batch in loader) == 60
    assert len(asked) <= 1 + 2
