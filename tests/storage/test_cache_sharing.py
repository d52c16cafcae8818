"""Many processes share one disk cache: an object is fetched once, the budget holds, and a kill corrupts nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from stoker.errors import InterruptError, UnavailableError
from stoker.storage import Store, open_store
from stoker.storage.cache import DiskCache
from tests.support.cached_objects import (
    CHUNK,
    DATA,
    OPEN_PROGRAM,
    SHA256,
    TIMEOUT_S,
    CountingStore,
    ScriptedObject,
    kill_at_exit,
    list_cached_files,
    read_cached,
    read_line,
    start_process,
)
from tests.support.disks import small_disk
from tests.support.servers import nginx, scripted_server
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("small_chunks")


class TestConcurrentFetch:
    def test_eight_processes_fetch_once(self, cache: DiskCache) -> None:
        origin = ScriptedObject()
        origin.pause_s = 0.02
        with scripted_server(origin) as server:
            processes = [start_process(OPEN_PROGRAM, server.url, cache.folder, SHA256) for _ in range(8)]
            with kill_at_exit(*processes):
                assert {read_line(process) for process in processes} == {"ready"}
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("\n")
                    process.stdin.flush()
                assert {read_line(process) for process in processes} == {SHA256}
        assert origin.range_starts == [start * CHUNK for start in range(10)]

    def test_threads_fetch_once(self, origin_folder: Path, cache: DiskCache) -> None:
        store = CountingStore(origin_folder)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda _: read_cached(cache, store, sha256=SHA256), range(8)))
        assert set(got) == {DATA}
        assert store.whole == 1
        assert (cache.stats().hits, cache.stats().misses) == (7, 1)

    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_waiting_process_resumes_the_part_of_a_killed_one(self, cache: DiskCache, sha256: str) -> None:
        origin = ScriptedObject()
        origin.stalls_at = 5 * CHUNK
        with scripted_server(origin) as server, ThreadPoolExecutor(1) as pool:
            first = start_process(OPEN_PROGRAM.replace("sys.stdin.readline()", ""), server.url, cache.folder, sha256)
            with kill_at_exit(first):
                assert eventually(lambda: len(origin.range_starts) == 6, TIMEOUT_S)
                waiting = pool.submit(read_cached, cache, open_store(server.url), "a", sha256=sha256)
                time.sleep(0.1)
                assert len(origin.range_starts) == 6
                first.kill()
                first.wait()
                origin.gate.set()
                assert waiting.result(TIMEOUT_S) == DATA
        assert Counter(origin.range_starts) == Counter(range(0, 10 * CHUNK, CHUNK)) + Counter([5 * CHUNK])
        assert len(list_cached_files(cache)) == 1

    def test_waiting_for_another_fetch_can_be_cancelled(self, cache: DiskCache) -> None:
        origin = ScriptedObject()
        origin.stalls_at = 0
        with scripted_server(origin) as server, ThreadPoolExecutor(2) as pool:
            needed = threading.Event()
            needed.set()
            first = pool.submit(read_cached, cache, open_store(server.url), "a", sha256=SHA256)
            assert eventually(lambda: len(origin.range_starts) == 1, TIMEOUT_S)
            waiting = pool.submit(cache.open, open_store(server.url), "a", sha256=SHA256, is_needed=needed.is_set)
            time.sleep(0.1)
            assert not waiting.done()
            needed.clear()
            with pytest.raises(InterruptError, match="/a: "):
                waiting.result(TIMEOUT_S)
            origin.gate.set()
            assert first.result(TIMEOUT_S) == DATA

    def test_forked_child_does_not_keep_the_lock_of_a_killed_parent(self, cache: DiskCache) -> None:
        program = """
store = open_store(sys.argv[1])
threading.Thread(target=DiskCache(Path(sys.argv[2])).open, args=(store, "a"), daemon=True).start()
sys.stdin.readline()
if (child := os.fork()) == 0:
    time.sleep(60)
report(child)
time.sleep(60)
"""
        origin = ScriptedObject()
        origin.stalls_at = 5 * CHUNK
        with scripted_server(origin) as server:
            parent = start_process(program, server.url, cache.folder)
            with kill_at_exit(parent):
                assert eventually(lambda: len(origin.range_starts) == 6, TIMEOUT_S)
                assert parent.stdin is not None
                parent.stdin.write("\n")
                parent.stdin.flush()
                child = int(read_line(parent))
                try:
                    parent.kill()
                    parent.wait()
                    origin.gate.set()
                    assert read_cached(cache, open_store(server.url), "a") == DATA
                    os.kill(child, 0)  # it was alive all the time
                finally:
                    os.kill(child, signal.SIGKILL)


@pytest.fixture
def ten_objects(folder: Path) -> Store:
    """Ten objects of 1000 bytes, named by their number."""
    for number in range(10):
        (folder / str(number)).write_bytes(bytes([number]) * 1000)
    return open_store(str(folder))


class TestBudget:
    def test_least_recently_used_copy_is_evicted(self, ten_objects: Store, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", 3000)
        for number in "0120304":
            assert read_cached(cache, ten_objects, number) == bytes([int(number)]) * 1000
            time.sleep(0.01)
        cached = [number for number in "0123456789" if cache.find(ten_objects, number)]
        assert cached == ["0", "3", "4"]
        assert cache.stats().evictions == 2

    def test_open_copy_is_not_evicted(self, ten_objects: Store, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", 3000)
        with cache.open(ten_objects, "0") or pytest.fail("no space") as cached:
            for number in "123456":
                read_cached(cache, ten_objects, number)
            assert cached.path.read_bytes() == bytes(1000)
        assert len(list_cached_files(cache)) == 3
        read_cached(cache, ten_objects, "7")
        assert not cached.path.exists()

    def test_reopened_copy_is_not_evicted(self, ten_objects: Store, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", 2000)
        read_cached(cache, ten_objects, "0")
        with (
            cache.open(ten_objects, "0") or pytest.fail("no space") as cached,
            cache.find(ten_objects, "0") or pytest.fail("not cached"),
        ):
            for number in "1234":
                read_cached(cache, ten_objects, number)
                assert cached.path.read_bytes() == bytes(1000)

    def test_copy_evicted_while_it_is_opened_is_a_miss(self, ten_objects: Store, cache: DiskCache) -> None:
        with cache.open(ten_objects, "0") or pytest.fail("no space") as cached:
            path = cached.path
        with path.open("rb") as evicting, ThreadPoolExecutor(1) as pool:
            fcntl.flock(evicting, fcntl.LOCK_EX)
            lookup = pool.submit(cache.find, ten_objects, "0")
            time.sleep(0.1)
            assert not lookup.done()
            path.unlink()
            fcntl.flock(evicting, fcntl.LOCK_UN)
            assert lookup.result(TIMEOUT_S) is None

    def test_copy_open_in_another_process_is_not_evicted(self, ten_objects: Store, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", 1000)
        program = """
cached = DiskCache(Path(sys.argv[2])).open(open_store(sys.argv[1]), "0")
report(cached.path)
time.sleep(60)
"""
        with kill_at_exit(reader := start_process(program, ten_objects.url, cache.folder)):
            path = Path(read_line(reader))
            assert cache.open(ten_objects, "1") is None
            assert path.read_bytes() == bytes(1000)
            reader.kill()
            reader.wait()
            assert read_cached(cache, ten_objects, "1") == b"\1" * 1000
            assert not path.exists()

    def test_object_without_space_is_not_cached_and_logged_once(
        self, ten_objects: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (folder / "large").write_bytes(bytes(3001))
        cache = DiskCache(tmp_path / "cache", 3000)
        with ExitStack() as stack:
            for number in "012":
                stack.enter_context(cache.open(ten_objects, number) or pytest.fail("no space"))
            assert cache.open(ten_objects, "3") is None
            assert cache.open(ten_objects, "large") is None
        assert cache.open(ten_objects, "large") is None
        (record,) = caplog.records
        assert re.search(f"/3 is not cached: {cache.folder} is full .*in use$", record.message)
        assert len(list_cached_files(cache)) == 3
        assert read_cached(cache, ten_objects, "3") == b"\3" * 1000

    def test_running_fetch_reserves_space_and_abandoned_part_is_evicted(
        self, ten_objects: Store, tmp_path: Path
    ) -> None:
        cache = DiskCache(tmp_path / "cache", len(DATA) + 1000)
        origin = ScriptedObject()
        origin.stalls_at, origin.breaks_at = CHUNK, 2 * CHUNK
        with scripted_server(origin) as server, ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(cache.open, open_store(server.url), "a")
            assert eventually(lambda: len(origin.range_starts) == 2, TIMEOUT_S)
            with cache.open(ten_objects, "0") or pytest.fail("no space"):
                assert cache.open(ten_objects, "1") is None
            origin.gate.set()
            with pytest.raises(UnavailableError):
                fetching.result(TIMEOUT_S)
        assert [name.endswith(".part") for name in list_cached_files(cache)].count(True) == 1
        read_cached(cache, ten_objects, "1")
        assert [name.endswith(".part") for name in list_cached_files(cache)] == [
            False,
            False,
        ]  # the part was evicted first

    def test_stale_parts_are_deleted(self, ten_objects: Store, cache: DiskCache) -> None:
        objects = cache.folder / "objects"
        objects.mkdir(parents=True)
        old, new = (objects / f"{digit * 40}.{'0' * 16}.500.part" for digit in "ab")
        for path in (old, new):
            path.write_bytes(b"begun")
        os.utime(old, (time.time() - 2 * 86400,) * 2)
        read_cached(cache, ten_objects, "0")
        assert (old.exists(), new.exists()) == (False, True)

    def test_fetch_survives_deletion_of_the_cache_folder(self, cache: DiskCache) -> None:
        origin = ScriptedObject()
        origin.before_reply = lambda start: shutil.rmtree(cache.folder) if start == 4 * CHUNK else None
        with scripted_server(origin) as server:
            assert cache.open(open_store(server.url), "a", sha256=SHA256) is None
            origin.before_reply = lambda _: None
            assert read_cached(cache, open_store(server.url), "a", sha256=SHA256) == DATA

    def test_foreign_files_are_not_deleted(self, ten_objects: Store, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", 2000)
        (cache.folder / "objects/folder").mkdir(parents=True)
        foreign = [cache.folder / SHA256, cache.folder / "scans", cache.folder / "objects/notes.txt"]
        foreign += [cache.folder / "objects" / f"{SHA256}.part", cache.folder / "objects/folder" / SHA256]
        for path in foreign:
            path.write_bytes(bytes(5000))
        for number in "0123":
            read_cached(cache, ten_objects, number)
        assert [path.stat().st_size for path in foreign] == [5000] * 5
        assert cache.stats().evictions == 2


def test_full_disk_caches_nothing(
    tmp_path: Path, ten_objects: Store, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "small", 64 << 10) as small:
        cache = DiskCache(small / "cache")
        (folder / "large").write_bytes(bytes(100_000))
        assert cache.open(ten_objects, "large") is None
        assert re.search("large is not cached: .*no space left", caplog.text)
        assert list_cached_files(cache) == []
        assert read_cached(cache, ten_objects, "1") == b"\1" * 1000


READ_ALL_PROGRAM = """
url, folder, budget, digests_file, seed = sys.argv[1:]
digests = json.loads(Path(digests_file).read_text())
cache, store, rng = DiskCache(Path(folder), int(budget)), open_store(url), random.Random(seed)
processes = list(digests)
rng.shuffle(processes)
report("ready")
for name in processes:
    cached = cache.open(store, name, sha256=digests[name] if rng.random() < 0.5 else "")
    data = store.get(name) if cached is None else cached.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == digests[name], name
    if cached is not None and rng.random() < 0.9:
        cached.close()
    else:
        time.sleep(0.001)
report("done")
"""


def run_kill_drill(tmp_path: Path, folder: Path, *, shards: int, repetitions: int) -> None:
    """Kill two of three readers of one cache at random moments, repeatedly; the third must not notice."""
    rng = random.Random(shards)
    digests = {}
    for number in range(shards):
        data = rng.randbytes(rng.randint(1, 12 * CHUNK))
        (folder / f"{number:03}.tar").write_bytes(data)
        digests[f"{number:03}.tar"] = hashlib.sha256(data).hexdigest()
    digests_file = tmp_path / "digests.json"
    digests_file.write_text(json.dumps(digests))
    cache = DiskCache(tmp_path / "cache", 100 * CHUNK)
    objects = cache.folder / "objects"
    sizes: list[int] = []
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.is_set():
            with cache._exclusive_access():
                sizes.append(sum(path.stat().st_size for path in objects.iterdir()))
            time.sleep(0.002)

    with nginx(folder) as url, ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            for repetition in range(repetitions):
                args = (url, cache.folder, cache.budget, digests_file)
                processes = [start_process(READ_ALL_PROGRAM, *args, f"{repetition}-{reader}") for reader in range(3)]
                with kill_at_exit(*processes):
                    assert {read_line(reader) for reader in processes} == {"ready"}
                    for reader in processes[:2]:
                        time.sleep(rng.uniform(0, 0.1))
                        reader.kill()
                        reader.wait()
                    assert read_line(processes[2]) == "done"
                store = open_store(url)
                for path in objects.iterdir():
                    if path.suffix != ".part" and path.name != "lock":
                        digest = hashlib.sha256(path.read_bytes()).hexdigest()
                        assert digest in digests.values()
                        assert path.name in (digest, path.name[:40])
                for name in rng.sample(sorted(digests), 20):
                    data = read_cached(cache, store, name, sha256=digests[name])
                    assert hashlib.sha256(data).hexdigest() == digests[name]
        finally:
            stopped.set()
        sampler.result(TIMEOUT_S)
    assert len(sizes) > 10 * repetitions
    assert 50 * CHUNK < max(sizes) <= 100 * CHUNK


def test_killed_readers_corrupt_nothing(tmp_path: Path, folder: Path) -> None:
    run_kill_drill(tmp_path, folder, shards=60, repetitions=5)


@pytest.mark.slow
def test_killed_readers_corrupt_nothing_long(tmp_path: Path, folder: Path) -> None:
    run_kill_drill(tmp_path, folder, shards=200, repetitions=20)
