"""Objects as verified local files: fetched once for all processes, never half there, within a budget, whoever dies."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stoker.errors import ChangedError, DataFaultError, NotFoundError, StoppedError, UnavailableError
from stoker.storage import Store, open_store
from stoker.storage.cache import Cache, Stats, fetch
from stoker.storage.local import LocalStore
from tests.support.disks import disk
from tests.support.servers import Asked, Reply, nginx, scripted

CHUNK = 1 << 10
DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()
DAMAGED = DATA[:-1] + b"\x00"
PATIENCE_S = 30.0
PRELUDE = """
import hashlib, json, os, random, sys, threading, time
from pathlib import Path
from stoker.storage import cached, open_store
from stoker.storage.cache import Cache
cached.CHUNK = 1 << 10
def told(text):
    print(text, flush=True)
"""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.storage.cache.CHUNK", CHUNK)
    monkeypatch.setattr("stoker.storage.http_client.RETRIES", 1)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def there(folder: Path) -> Path:
    (folder / "train").mkdir()
    (folder / "train/a.tar").write_bytes(DATA)
    return folder


class Origin:
    """A web server's one file, `a`; it can wait at a byte, die at a byte, spoil, and be replaced."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data, self.etag = data, '"1"'
        self.asked: list[int] = []
        """From which bytes on it was asked."""
        self.dies_at = self.waits_at = len(data)
        self.gate = threading.Event()
        self.pause_s = 0.0
        self.before: Callable[[int], None] = lambda _: None

    def __call__(self, asked: Asked, number: int) -> Reply:
        headers = {"ETag": self.etag} if self.etag else {"ETag": "", "Last-Modified": ""}
        if asked.method == "HEAD":
            return Reply(200, self.data, headers)
        span = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", asked.headers["range"])
        assert span
        start, stop = int(span[1]), int(span[2]) + 1
        self.before(start)
        self.asked.append(start)
        if start >= self.waits_at:
            self.gate.wait(PATIENCE_S)
        time.sleep(self.pause_s)
        data = self.data
        headers = {"ETag": self.etag} if self.etag else {"ETag": "", "Last-Modified": ""}
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if start >= self.dies_at:
            return Reply(206, data[start : stop - 100], headers, length=stop - start)
        return Reply(206, data[start:stop], headers)


class Counting(LocalStore):
    """A folder that counts what is asked of it, and gives what it is told to give instead."""

    def __init__(self, folder: Path, *answers: bytes | Exception) -> None:
        super().__init__(str(folder))
        self.answers = list(answers)
        self.whole = 0

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        if start == 0:
            self.whole += 1
            self.answer = self.answers.pop(0) if self.answers else self.get(name)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer[start : start + length]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def taken(cache: Cache, store: Store, name: str = "train/a.tar", **options: object) -> bytes:
    """Read an object through a cache that must have room for it."""
    held = cache.open(store, name, **options)  # type: ignore[arg-type]
    assert held is not None
    with held:
        return held.path.read_bytes()


def names(cache: Cache) -> list[str]:
    """The copies and parts in a cache."""
    place = cache.folder / "objects"
    return sorted(path.name for path in place.iterdir() if path.name != "lock") if place.exists() else []


def running(program: str, *args: object) -> subprocess.Popen[str]:
    """Start a program beside this one, which says something before it begins."""
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + program, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """End what still runs of these."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


OPEN_ONE = """
url, folder, sha256 = sys.argv[1:]
store = open_store(url)
cache = Cache(Path(folder))
told("ready")
sys.stdin.readline()
with cache.open(store, "a", sha256=sha256) as held:
    told(hashlib.sha256(held.path.read_bytes()).hexdigest())
"""


class TestOneObject:
    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_is_fetched_once(self, there: Path, cache: Cache, sha256: str) -> None:
        store = Counting(there)
        assert cache.find(store, "train/a.tar", size=len(DATA), sha256=sha256) is None
        for _ in range(3):
            assert taken(cache, store, size=len(DATA), sha256=sha256) == DATA
        assert store.whole == 1
        assert len(names(cache)) == 1
        assert cache.stats() == Stats(hits=2, misses=1, fetched_bytes=len(DATA))
        found = cache.find(store, "train/a.tar", size=len(DATA), sha256=sha256)
        assert found is not None
        found.close()
        found.close()

    def test_is_known_by_what_it_holds_or_by_where_it_lies_and_its_version(
        self, tmp_path: Path, there: Path, cache: Cache
    ) -> None:
        other = tmp_path / "other"
        (other / "train").mkdir(parents=True)
        (other / "train/a.tar").write_bytes(DAMAGED)
        assert taken(cache, Counting(there), sha256=SHA256) == DATA
        assert taken(cache, Counting(other), sha256=SHA256) == DATA  # by its digest
        assert taken(cache, Counting(there)) == DATA
        assert taken(cache, Counting(other)) == DAMAGED
        (there / "train/a.tar").write_bytes(DATA[::-1])
        assert taken(cache, Counting(there)) == DATA[::-1]

    def test_is_fetched_again_if_its_copy_was_cut_and_never_written_in_place(self, there: Path, cache: Cache) -> None:
        with cache.open(Counting(there), "train/a.tar", sha256=SHA256) or pytest.fail("no room") as held:
            os.truncate(held.path, 100)
            with held.path.open("rb") as before:
                assert taken(cache, Counting(there), size=len(DATA), sha256=SHA256) == DATA
                assert len(before.read()) == 100

    def test_may_be_empty(self, folder: Path, cache: Cache) -> None:
        (folder / "empty").write_bytes(b"")
        assert taken(cache, LocalStore(str(folder)), "empty") == b""

    def test_that_is_not_there_or_away_leaves_nothing(self, there: Path, cache: Cache) -> None:
        with pytest.raises(NotFoundError):
            cache.open(LocalStore(str(there)), "none", sha256=SHA256)
        with pytest.raises(UnavailableError):
            cache.open(Counting(there, UnavailableError("away")), "train/a.tar", sha256=SHA256)
        assert names(cache) == []

    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_of_another_size_is_refused(self, there: Path, cache: Cache, sha256: str) -> None:
        (there / "train/a.tar").write_bytes(DATA[:-100])
        with pytest.raises(DataFaultError, match=r"train/a\.tar: is 10,140 bytes, and should be 10,240; it was cut"):
            cache.open(LocalStore(str(there)), "train/a.tar", size=len(DATA), sha256=sha256)
        assert names(cache) == []

    def test_whose_server_tells_no_version_is_taken_by_its_digest(self, cache: Cache) -> None:
        origin = Origin()
        refuse = Reply(405)
        with scripted(lambda asked, number: refuse if asked.method == "HEAD" else origin(asked, number)) as server:
            assert taken(cache, open_store(server.url), "a", size=len(DATA), sha256=SHA256) == DATA
            with pytest.raises(UnavailableError, match="405"):
                cache.open(open_store(server.url), "a", size=len(DATA))

    def test_that_is_no_longer_wanted_is_not_fetched_to_its_end(self, there: Path, cache: Cache) -> None:
        store = Counting(there)
        answers = iter([True, True, True, False])
        with pytest.raises(StoppedError):
            cache.open(store, "train/a.tar", sha256=SHA256, wanted=lambda: next(answers))
        assert cache.stats().fetched_bytes == 3 * CHUNK
        (part,) = names(cache)
        assert part.endswith(".10240.part")
        assert taken(cache, store, sha256=SHA256) == DATA
        assert cache.stats().fetched_bytes == len(DATA)
        assert names(cache) == [SHA256]


class TestDamage:
    def test_on_the_way_is_healed_and_told(self, there: Path, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
        store = Counting(there, DAMAGED)
        assert taken(cache, store, sha256=SHA256) == DATA
        assert store.whole == 2
        assert "folder/train/a.tar: its sha256 is" in caplog.text

    def test_that_stays_is_told_and_not_kept(self, there: Path, cache: Cache) -> None:
        told = r"folder/train/a\.tar: its sha256 is [0-9a-f]{12}….*put the right shard"
        with pytest.raises(DataFaultError, match=told):
            cache.open(Counting(there, DAMAGED, DAMAGED), "train/a.tar", sha256=SHA256)
        assert names(cache) == []
        assert taken(cache, Counting(there), sha256=SHA256) == DATA

    def test_in_a_cache_on_the_way_is_passed_by_and_told(
        self, cache: Cache, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        origin, spoilt = Origin(), Origin(DAMAGED)
        spoilt.etag = '"of the cache"'

        def proxy(asked: Asked, number: int) -> Reply:
            return (origin if "x-stoker-bypass" in asked.headers else spoilt)(asked, number)

        with scripted(proxy) as server:
            assert taken(cache, open_store(server.url), "a", sha256=SHA256) == DATA
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert re.match(rf"{server.url}/a: its sha256 is .*a cache on the way holds a spoilt copy", record.message)
            fetch(open_store(server.url), "a", tmp_path / "plain", size=len(DATA), sha256=SHA256)
            assert (tmp_path / "plain").read_bytes() == DATA
            origin.data = DAMAGED
            with pytest.raises(DataFaultError, match=f"{server.url}/a: its sha256 is"):
                fetch(open_store(server.url), "a", tmp_path / "other", size=len(DATA), sha256=SHA256)
        assert not (tmp_path / "other").exists()
        assert len(origin.asked) == len(spoilt.asked) == 30

    def test_of_a_part_is_not_blamed_on_others(self, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
        origin = Origin()
        origin.dies_at = 2 * CHUNK
        with scripted(origin) as server:
            store = open_store(server.url)
            with pytest.raises(UnavailableError):
                cache.open(store, "a", sha256=SHA256)
            (part,) = names(cache)
            (cache.folder / "objects" / part).write_bytes(b"?" * CHUNK)
            origin.dies_at = len(DATA)
            assert taken(cache, store, "a", sha256=SHA256) == DATA
        assert caplog.text == ""


class TestBrokenOff:
    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_goes_on_where_it_was(self, cache: Cache, sha256: str) -> None:
        origin = Origin()
        origin.dies_at = 6 * CHUNK
        with scripted(origin) as server:
            store = open_store(server.url)
            with pytest.raises(UnavailableError, match="does not answer"):
                cache.open(store, "a", sha256=sha256)
            assert len(names(cache)) == 1
            origin.dies_at = len(DATA)
            origin.asked.clear()
            assert taken(cache, store, "a", sha256=sha256) == DATA
        assert origin.asked == [start * CHUNK for start in range(6, 10)]
        assert len(names(cache)) == 1

    def test_without_a_digest_or_a_version_begins_anew(self, cache: Cache) -> None:
        origin = Origin()
        origin.dies_at, origin.etag = 6 * CHUNK, ""
        with scripted(origin) as server:
            with pytest.raises(UnavailableError):
                cache.open(open_store(server.url), "a")
            origin.dies_at, origin.data = len(DATA), DATA[::-1]
            assert taken(cache, open_store(server.url), "a") == DATA[::-1]

    @pytest.mark.parametrize("sha256", [hashlib.sha256(DATA[::-1]).hexdigest(), ""])
    def test_versions_never_mix(self, cache: Cache, sha256: str, caplog: pytest.LogCaptureFixture) -> None:
        origin = Origin()

        def replace(start: int) -> None:
            if start == 4 * CHUNK:
                origin.data, origin.etag = DATA[::-1], '"2"'

        origin.before = replace
        with scripted(origin) as server:
            assert taken(cache, open_store(server.url), "a", sha256=sha256) == DATA[::-1]
        assert len(names(cache)) == 1
        assert caplog.text == ""

    def test_what_is_replaced_between_two_tries_begins_anew(self, cache: Cache) -> None:
        origin = Origin()
        origin.dies_at = 6 * CHUNK
        with scripted(origin) as server:
            with pytest.raises(UnavailableError):
                cache.open(open_store(server.url), "a", sha256=SHA256)
            origin.dies_at, origin.etag = len(DATA), '"2"'
            origin.asked.clear()
            assert taken(cache, open_store(server.url), "a", sha256=SHA256) == DATA
        assert origin.asked[0] == 0
        assert names(cache) == [SHA256]

    def test_mirrors_that_never_agree_are_decided_by_the_digest(self, cache: Cache) -> None:
        origin = Origin()

        def other(start: int) -> None:
            origin.etag = f'"{len(origin.asked)}"'

        origin.before = other
        with scripted(origin) as server:
            assert taken(cache, open_store(server.url), "a", sha256=SHA256) == DATA
            with pytest.raises(ChangedError, match=f"{server.url}/a"):
                cache.open(open_store(server.url), "a")
        assert names(cache) == [SHA256]


class TestTogether:
    def test_eight_processes_fetch_once(self, cache: Cache) -> None:
        origin = Origin()
        origin.pause_s = 0.02
        with scripted(origin) as server:
            several = [running(OPEN_ONE, server.url, cache.folder, SHA256) for _ in range(8)]
            with ended(*several):
                assert {heard(process) for process in several} == {"ready"}
                for process in several:
                    assert process.stdin is not None
                    process.stdin.write("\n")
                    process.stdin.flush()
                assert {heard(process) for process in several} == {SHA256}
        assert origin.asked == [start * CHUNK for start in range(10)]

    def test_threads_fetch_once(self, there: Path, cache: Cache) -> None:
        store = Counting(there)
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda _: taken(cache, store, sha256=SHA256), range(8)))
        assert set(got) == {DATA}
        assert store.whole == 1
        assert (cache.stats().hits, cache.stats().misses) == (7, 1)

    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_who_waits_goes_on_with_what_a_killed_one_left(self, cache: Cache, sha256: str) -> None:
        origin = Origin()
        origin.waits_at = 5 * CHUNK
        with scripted(origin) as server, ThreadPoolExecutor(1) as pool:
            first = running(OPEN_ONE.replace("sys.stdin.readline()", ""), server.url, cache.folder, sha256)
            with ended(first):
                until(lambda: len(origin.asked) == 6)
                waits = pool.submit(taken, cache, open_store(server.url), "a", sha256=sha256)
                time.sleep(0.1)
                assert len(origin.asked) == 6
                first.kill()
                first.wait()
                origin.gate.set()
                assert waits.result(PATIENCE_S) == DATA
        assert Counter(origin.asked) == Counter(range(0, 10 * CHUNK, CHUNK)) + Counter([5 * CHUNK])
        assert len(names(cache)) == 1

    def test_who_waits_may_want_it_no_longer(self, cache: Cache) -> None:
        origin = Origin()
        origin.waits_at = 0
        with scripted(origin) as server, ThreadPoolExecutor(2) as pool:
            wanted = threading.Event()
            wanted.set()
            first = pool.submit(taken, cache, open_store(server.url), "a", sha256=SHA256)
            until(lambda: len(origin.asked) == 1)
            waits = pool.submit(cache.open, open_store(server.url), "a", sha256=SHA256, wanted=wanted.is_set)
            time.sleep(0.1)
            assert not waits.done()
            wanted.clear()
            with pytest.raises(StoppedError, match="no longer wanted"):
                waits.result(PATIENCE_S)
            origin.gate.set()
            assert first.result(PATIENCE_S) == DATA

    def test_a_forked_process_keeps_no_lock_of_a_killed_one(self, cache: Cache) -> None:
        program = """
store = open_store(sys.argv[1])
threading.Thread(target=Cache(Path(sys.argv[2])).open, args=(store, "a"), daemon=True).start()
sys.stdin.readline()
if (child := os.fork()) == 0:
    time.sleep(60)
told(child)
time.sleep(60)
"""
        origin = Origin()
        origin.waits_at = 5 * CHUNK
        with scripted(origin) as server:
            parent = running(program, server.url, cache.folder)
            with ended(parent):
                until(lambda: len(origin.asked) == 6)
                assert parent.stdin is not None
                parent.stdin.write("\n")
                parent.stdin.flush()
                child = int(heard(parent))
                try:
                    parent.kill()
                    parent.wait()
                    origin.gate.set()
                    assert taken(cache, open_store(server.url), "a") == DATA
                    os.kill(child, 0)  # it was there all the time
                finally:
                    os.kill(child, signal.SIGKILL)


@pytest.fixture
def ten(folder: Path) -> Store:
    """Ten objects of a thousand bytes, named by their number."""
    for number in range(10):
        (folder / str(number)).write_bytes(bytes([number]) * 1000)
    return open_store(str(folder))


class TestBudget:
    def test_the_one_used_longest_ago_goes(self, ten: Store, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache", 3000)
        for number in "0120304":
            assert taken(cache, ten, number) == bytes([int(number)]) * 1000
            time.sleep(0.01)
        kept = [number for number in "0123456789" if cache.find(ten, number)]
        assert kept == ["0", "3", "4"]
        assert cache.stats().evictions == 2

    def test_what_is_open_stays(self, ten: Store, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache", 3000)
        with cache.open(ten, "0") or pytest.fail("no room") as held:
            for number in "123456":
                taken(cache, ten, number)
            assert held.path.read_bytes() == bytes(1000)
        assert len(names(cache)) == 3
        taken(cache, ten, "7")
        assert not held.path.exists()

    def test_what_was_there_and_is_open_stays(self, ten: Store, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache", 2000)
        taken(cache, ten, "0")
        with cache.open(ten, "0") or pytest.fail("no room") as held, cache.find(ten, "0") or pytest.fail("not there"):
            for number in "1234":
                taken(cache, ten, number)
                assert held.path.read_bytes() == bytes(1000)

    def test_one_that_goes_while_it_is_opened_is_not_there(self, ten: Store, cache: Cache) -> None:
        with cache.open(ten, "0") or pytest.fail("no room") as held:
            path = held.path
        with path.open("rb") as evicting, ThreadPoolExecutor(1) as pool:
            fcntl.flock(evicting, fcntl.LOCK_EX)
            found = pool.submit(cache.find, ten, "0")
            time.sleep(0.1)
            assert not found.done()
            path.unlink()
            fcntl.flock(evicting, fcntl.LOCK_UN)
            assert found.result(PATIENCE_S) is None

    def test_what_another_process_has_open_stays(self, ten: Store, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache", 1000)
        program = "held = Cache(Path(sys.argv[2])).open(open_store(sys.argv[1]), '0')\ntold(held.path)\ntime.sleep(60)"
        with ended(reader := running(program, ten.url, cache.folder)):
            path = Path(heard(reader))
            assert cache.open(ten, "1") is None
            assert path.read_bytes() == bytes(1000)
            reader.kill()
            reader.wait()
            assert taken(cache, ten, "1") == b"\1" * 1000
            assert not path.exists()

    def test_all_in_use_or_too_large_is_not_kept_and_told_once(
        self, ten: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (folder / "large").write_bytes(bytes(3001))
        cache = Cache(tmp_path / "cache", 3000)
        with ExitStack() as stack:
            for number in "012":
                stack.enter_context(cache.open(ten, number) or pytest.fail("no room"))
            assert cache.open(ten, "3") is None
            assert cache.open(ten, "large") is None
        assert cache.open(ten, "large") is None
        (record,) = caplog.records
        assert re.search("/3 is not kept in the cache: .*/cache has no room for it beside what is", record.message)
        assert len(names(cache)) == 3
        assert taken(cache, ten, "3") == b"\3" * 1000

    def test_what_is_on_its_way_has_its_room_and_what_was_left_makes_room(self, ten: Store, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache", len(DATA) + 1000)
        origin = Origin()
        origin.waits_at, origin.dies_at = CHUNK, 2 * CHUNK
        with scripted(origin) as server, ThreadPoolExecutor(1) as pool:
            coming = pool.submit(cache.open, open_store(server.url), "a")
            until(lambda: len(origin.asked) == 2)
            with cache.open(ten, "0") or pytest.fail("no room"):
                assert cache.open(ten, "1") is None
            origin.gate.set()
            with pytest.raises(UnavailableError):
                coming.result(PATIENCE_S)
        assert [name.endswith(".part") for name in names(cache)].count(True) == 1
        taken(cache, ten, "1")
        assert [name.endswith(".part") for name in names(cache)] == [False, False]  # the part went first

    def test_parts_left_long_ago_go(self, ten: Store, cache: Cache) -> None:
        place = cache.folder / "objects"
        place.mkdir(parents=True)
        old, new = (place / f"{digit * 40}.{'0' * 16}.500.part" for digit in "ab")
        for path in (old, new):
            path.write_bytes(b"begun")
        os.utime(old, (time.time() - 2 * 86400,) * 2)
        taken(cache, ten, "0")
        assert (old.exists(), new.exists()) == (False, True)

    def test_who_clears_the_folder_stops_nobody(self, cache: Cache) -> None:
        origin = Origin()
        origin.before = lambda start: shutil.rmtree(cache.folder) if start == 4 * CHUNK else None
        with scripted(origin) as server:
            assert cache.open(open_store(server.url), "a", sha256=SHA256) is None
            origin.before = lambda _: None
            assert taken(cache, open_store(server.url), "a", sha256=SHA256) == DATA

    def test_what_is_not_ours_is_left_alone(self, ten: Store, tmp_path: Path) -> None:
        cache = Cache(tmp_path / "cache", 2000)
        (cache.folder / "objects/folder").mkdir(parents=True)
        strange = [cache.folder / SHA256, cache.folder / "scans", cache.folder / "objects/notes.txt"]
        strange += [cache.folder / "objects" / f"{SHA256}.part", cache.folder / "objects/folder" / SHA256]
        for path in strange:
            path.write_bytes(bytes(5000))
        for number in "0123":
            taken(cache, ten, number)
        assert [path.stat().st_size for path in strange] == [5000] * 5
        assert cache.stats().evictions == 2


def test_a_full_disk_keeps_nothing(tmp_path: Path, ten: Store, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path / "small", 64 << 10) as small:
        cache = Cache(small / "cache")
        (folder / "large").write_bytes(bytes(100_000))
        assert cache.open(ten, "large") is None
        assert "large is not kept in the cache" in caplog.text
        assert "no space left" in caplog.text
        assert names(cache) == []
        assert taken(cache, ten, "1") == b"\1" * 1000


READ_ALL = """
url, folder, budget, listed, seed = sys.argv[1:]
digests = json.loads(Path(listed).read_text())
cache, store, chance = Cache(Path(folder), int(budget)), open_store(url), random.Random(seed)
several = list(digests)
chance.shuffle(several)
told("ready")
for name in several:
    held = cache.open(store, name, sha256=digests[name] if chance.random() < 0.5 else "")
    data = store.get(name) if held is None else held.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == digests[name], name
    if held is not None and chance.random() < 0.9:
        held.close()
    else:
        time.sleep(0.001)
told("done")
"""


def drill(tmp_path: Path, folder: Path, *, shards: int, repetitions: int) -> None:
    """Kill two of three readers of one cache at any moment, again and again; the third never notices."""
    chance = random.Random(shards)
    digests = {}
    for number in range(shards):
        data = chance.randbytes(chance.randint(1, 12 * CHUNK))
        (folder / f"{number:03}.tar").write_bytes(data)
        digests[f"{number:03}.tar"] = hashlib.sha256(data).hexdigest()
    listed = tmp_path / "digests.json"
    listed.write_text(json.dumps(digests))
    cache = Cache(tmp_path / "cache", 100 * CHUNK)
    place = cache.folder / "objects"
    sampled: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.is_set():
            with cache._alone():
                sampled.append(sum(path.stat().st_size for path in place.iterdir()))
            time.sleep(0.002)

    with nginx(folder) as url, ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            for repetition in range(repetitions):
                args = (url, cache.folder, cache.budget, listed)
                several = [running(READ_ALL, *args, f"{repetition}-{reader}") for reader in range(3)]
                with ended(*several):
                    assert {heard(reader) for reader in several} == {"ready"}
                    for reader in several[:2]:
                        time.sleep(chance.uniform(0, 0.1))
                        reader.kill()
                        reader.wait()
                    assert heard(several[2]) == "done"
                store = open_store(url)
                for path in place.iterdir():
                    if path.suffix != ".part" and path.name != "lock":
                        digest = hashlib.sha256(path.read_bytes()).hexdigest()
                        assert digest in digests.values()
                        assert path.name in (digest, path.name[:40])
                for name in chance.sample(sorted(digests), 20):
                    data = taken(cache, store, name, sha256=digests[name])
                    assert hashlib.sha256(data).hexdigest() == digests[name]
        finally:
            over.set()
        sampler.result(PATIENCE_S)
    assert len(sampled) > 10 * repetitions
    assert 50 * CHUNK < max(sampled) <= 100 * CHUNK


def test_whoever_is_killed_spoils_nothing(tmp_path: Path, folder: Path) -> None:
    drill(tmp_path, folder, shards=60, repetitions=5)


@pytest.mark.slow
def test_whoever_is_killed_spoils_nothing_for_long(tmp_path: Path, folder: Path) -> None:
    drill(tmp_path, folder, shards=200, repetitions=20)


class TestFetch:
    """Into a plain file, without a cache."""

    def test_is_verified(self, there: Path, tmp_path: Path) -> None:
        path = tmp_path / "new/file"
        for answers in ([], [DAMAGED]):
            store = Counting(there, *answers)
            fetch(store, "train/a.tar", path, size=len(DATA), sha256=SHA256)
            assert path.read_bytes() == DATA
            assert store.whole == 1 + len(answers)

    def test_leaves_nothing_of_what_fails(self, there: Path, tmp_path: Path) -> None:
        path = tmp_path / "file"
        for answers, error in (([DAMAGED] * 2, DataFaultError), ([UnavailableError("away")], UnavailableError)):
            with pytest.raises(error):
                fetch(Counting(there, *answers), "train/a.tar", path, size=len(DATA), sha256=SHA256)
            assert not path.exists()
        with pytest.raises(StoppedError):
            fetch(Counting(there), "train/a.tar", path, size=len(DATA), wanted=lambda: False)
        assert not path.exists()

    def test_comes_in_pieces(self, there: Path, tmp_path: Path) -> None:
        class Pieces(LocalStore):
            longest = 0

            def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
                self.longest = max(self.longest, length)
                return super().range(name, start, length, etag=etag)

        store = Pieces(str(there))
        fetch(store, "train/a.tar", tmp_path / "file", size=len(DATA), sha256=SHA256)
        assert store.longest == CHUNK
