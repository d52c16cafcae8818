"""Disk cache of one process: verification, damage, resuming, and plain fetches."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

import pytest

from stoker.errors import InterruptError, NotFoundError, ObjectChangedError, UnavailableError, VerificationError
from stoker.storage import open_store
from stoker.storage.cache import CacheStats, DiskCache, fetch
from stoker.storage.local import LocalStore
from tests.support.cached_objects import (
    CHUNK,
    DAMAGED,
    DATA,
    SHA256,
    CountingStore,
    ScriptedObject,
    list_cached_files,
    read_cached,
)
from tests.support.servers import RecordedRequest, Reply, scripted_server

pytestmark = pytest.mark.usefixtures("small_chunks")


class TestOpen:
    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_object_is_fetched_once(self, origin_folder: Path, cache: DiskCache, sha256: str) -> None:
        store = CountingStore(origin_folder)
        assert cache.find(store, "train/a.tar", size=len(DATA), sha256=sha256) is None
        for _ in range(3):
            assert read_cached(cache, store, size=len(DATA), sha256=sha256) == DATA
        assert store.whole == 1
        assert len(list_cached_files(cache)) == 1
        assert cache.stats() == CacheStats(hits=2, misses=1, fetched_bytes=len(DATA))
        cached = cache.find(store, "train/a.tar", size=len(DATA), sha256=sha256)
        assert cached is not None
        cached.close()
        cached.close()

    def test_copies_are_keyed_by_digest_or_by_url_and_version(
        self, tmp_path: Path, origin_folder: Path, cache: DiskCache
    ) -> None:
        other = tmp_path / "other"
        (other / "train").mkdir(parents=True)
        (other / "train/a.tar").write_bytes(DAMAGED)
        assert read_cached(cache, CountingStore(origin_folder), sha256=SHA256) == DATA
        assert read_cached(cache, CountingStore(other), sha256=SHA256) == DATA  # by its digest
        assert read_cached(cache, CountingStore(origin_folder)) == DATA
        assert read_cached(cache, CountingStore(other)) == DAMAGED
        (origin_folder / "train/a.tar").write_bytes(DATA[::-1])
        assert read_cached(cache, CountingStore(origin_folder)) == DATA[::-1]

    def test_truncated_copy_is_replaced_not_overwritten(self, origin_folder: Path, cache: DiskCache) -> None:
        with cache.open(CountingStore(origin_folder), "train/a.tar", sha256=SHA256) or pytest.fail("no room") as cached:
            os.truncate(cached.path, 100)
            with cached.path.open("rb") as before:
                assert read_cached(cache, CountingStore(origin_folder), size=len(DATA), sha256=SHA256) == DATA
                assert len(before.read()) == 100

    def test_empty_object(self, folder: Path, cache: DiskCache) -> None:
        (folder / "empty").write_bytes(b"")
        assert read_cached(cache, LocalStore(str(folder)), "empty") == b""

    def test_missing_object_or_server_leaves_no_file(self, origin_folder: Path, cache: DiskCache) -> None:
        with pytest.raises(NotFoundError):
            cache.open(LocalStore(str(origin_folder)), "none", sha256=SHA256)
        with pytest.raises(UnavailableError):
            cache.open(CountingStore(origin_folder, UnavailableError("away")), "train/a.tar", sha256=SHA256)
        assert list_cached_files(cache) == []

    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_size_mismatch_raises_data_fault(self, origin_folder: Path, cache: DiskCache, sha256: str) -> None:
        (origin_folder / "train/a.tar").write_bytes(DATA[:-100])
        with pytest.raises(VerificationError, match=r"train/a\.tar: .*10,140\b.*10,240\b.*; .*stoker data verify$"):
            cache.open(LocalStore(str(origin_folder)), "train/a.tar", size=len(DATA), sha256=sha256)
        assert list_cached_files(cache) == []

    def test_server_without_head_works_if_the_digest_is_known(self, cache: DiskCache) -> None:
        origin = ScriptedObject()
        refuse = Reply(405)
        with scripted_server(
            lambda request, number: refuse if request.method == "HEAD" else origin(request, number)
        ) as server:
            assert read_cached(cache, open_store(server.url), "a", size=len(DATA), sha256=SHA256) == DATA
            with pytest.raises(UnavailableError, match="405"):
                cache.open(open_store(server.url), "a", size=len(DATA))

    def test_cancelled_fetch_stops_and_can_be_resumed(self, origin_folder: Path, cache: DiskCache) -> None:
        store = CountingStore(origin_folder)
        results = iter([True, True, True, False])
        with pytest.raises(InterruptError):
            cache.open(store, "train/a.tar", sha256=SHA256, is_needed=lambda: next(results))
        assert cache.stats().fetched_bytes == 3 * CHUNK
        (part,) = list_cached_files(cache)
        assert part.endswith(".10240.part")
        assert read_cached(cache, store, sha256=SHA256) == DATA
        assert cache.stats().fetched_bytes == len(DATA)
        assert list_cached_files(cache) == [SHA256]


class TestDamage:
    def test_transient_damage_is_repaired_and_logged(
        self, origin_folder: Path, cache: DiskCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = CountingStore(origin_folder, DAMAGED)
        assert read_cached(cache, store, sha256=SHA256) == DATA
        assert store.whole == 2
        assert re.search(r"folder/train/a\.tar: .*sha256.*in transit", caplog.text)

    def test_permanent_damage_is_reported_and_not_cached(self, origin_folder: Path, cache: DiskCache) -> None:
        damaged = hashlib.sha256(DAMAGED).hexdigest()
        with pytest.raises(
            VerificationError, match=rf"folder/train/a\.tar: .*{damaged[:12]}….*{SHA256[:12]}….*; .*restore the shard"
        ):
            cache.open(CountingStore(origin_folder, DAMAGED, DAMAGED), "train/a.tar", sha256=SHA256)
        assert list_cached_files(cache) == []
        assert read_cached(cache, CountingStore(origin_folder), sha256=SHA256) == DATA

    def test_damaged_intermediate_cache_is_bypassed_and_logged(
        self, cache: DiskCache, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        origin, proxy_copy = ScriptedObject(), ScriptedObject(DAMAGED)
        proxy_copy.etag = '"of the cache"'

        def proxy(request: RecordedRequest, number: int) -> Reply:
            return (origin if "x-stoker-bypass" in request.headers else proxy_copy)(request, number)

        with scripted_server(proxy) as server:
            assert read_cached(cache, open_store(server.url), "a", sha256=SHA256) == DATA
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert re.match(rf"{server.url}/a: .*sha256.*: a cache on the way ", record.message)
            fetch(open_store(server.url), "a", tmp_path / "plain", size=len(DATA), sha256=SHA256)
            assert (tmp_path / "plain").read_bytes() == DATA
            origin.data = DAMAGED
            with pytest.raises(VerificationError, match=rf"{server.url}/a: .*sha256"):
                fetch(open_store(server.url), "a", tmp_path / "other", size=len(DATA), sha256=SHA256)
        assert not (tmp_path / "other").exists()
        assert len(origin.range_starts) == len(proxy_copy.range_starts) == 30

    def test_damaged_part_is_refetched_without_a_warning(
        self, cache: DiskCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        origin = ScriptedObject()
        origin.breaks_at = 2 * CHUNK
        with scripted_server(origin) as server:
            store = open_store(server.url)
            with pytest.raises(UnavailableError):
                cache.open(store, "a", sha256=SHA256)
            (part,) = list_cached_files(cache)
            (cache.folder / "objects" / part).write_bytes(b"?" * CHUNK)
            origin.breaks_at = len(DATA)
            assert read_cached(cache, store, "a", sha256=SHA256) == DATA
        assert caplog.text == ""


class TestResume:
    @pytest.mark.parametrize("sha256", [SHA256, ""])
    def test_fetch_resumes_where_it_broke_off(self, cache: DiskCache, sha256: str) -> None:
        origin = ScriptedObject()
        origin.breaks_at = 6 * CHUNK
        with scripted_server(origin) as server:
            store = open_store(server.url)
            with pytest.raises(UnavailableError, match="/a: "):
                cache.open(store, "a", sha256=sha256)
            assert len(list_cached_files(cache)) == 1
            origin.breaks_at = len(DATA)
            origin.range_starts.clear()
            assert read_cached(cache, store, "a", sha256=sha256) == DATA
        assert origin.range_starts == [start * CHUNK for start in range(6, 10)]
        assert len(list_cached_files(cache)) == 1

    def test_fetch_restarts_without_digest_and_etag(self, cache: DiskCache) -> None:
        origin = ScriptedObject()
        origin.breaks_at, origin.etag = 6 * CHUNK, ""
        with scripted_server(origin) as server:
            with pytest.raises(UnavailableError):
                cache.open(open_store(server.url), "a")
            origin.breaks_at, origin.data = len(DATA), DATA[::-1]
            assert read_cached(cache, open_store(server.url), "a") == DATA[::-1]

    @pytest.mark.parametrize("sha256", [hashlib.sha256(DATA[::-1]).hexdigest(), ""])
    def test_versions_never_mix(self, cache: DiskCache, sha256: str, caplog: pytest.LogCaptureFixture) -> None:
        origin = ScriptedObject()

        def replace(start: int) -> None:
            if start == 4 * CHUNK:
                origin.data, origin.etag = DATA[::-1], '"2"'

        origin.before_reply = replace
        with scripted_server(origin) as server:
            assert read_cached(cache, open_store(server.url), "a", sha256=sha256) == DATA[::-1]
        assert len(list_cached_files(cache)) == 1
        assert caplog.text == ""

    def test_fetch_restarts_if_the_object_was_replaced(self, cache: DiskCache) -> None:
        origin = ScriptedObject()
        origin.breaks_at = 6 * CHUNK
        with scripted_server(origin) as server:
            with pytest.raises(UnavailableError):
                cache.open(open_store(server.url), "a", sha256=SHA256)
            origin.breaks_at, origin.etag = len(DATA), '"2"'
            origin.range_starts.clear()
            assert read_cached(cache, open_store(server.url), "a", sha256=SHA256) == DATA
        assert origin.range_starts[0] == 0
        assert list_cached_files(cache) == [SHA256]

    def test_digest_decides_between_mirrors_with_different_etags(self, cache: DiskCache) -> None:
        origin = ScriptedObject()

        def other(start: int) -> None:
            origin.etag = f'"{len(origin.range_starts)}"'

        origin.before_reply = other
        with scripted_server(origin) as server:
            assert read_cached(cache, open_store(server.url), "a", sha256=SHA256) == DATA
            with pytest.raises(ObjectChangedError, match=f"{server.url}/a"):
                cache.open(open_store(server.url), "a")
        assert list_cached_files(cache) == [SHA256]


class TestFetch:
    """`fetch` into a plain file, without a cache."""

    def test_fetched_file_is_verified(self, origin_folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "new/file"
        for results in ([], [DAMAGED]):
            store = CountingStore(origin_folder, *results)
            fetch(store, "train/a.tar", path, size=len(DATA), sha256=SHA256)
            assert path.read_bytes() == DATA
            assert store.whole == 1 + len(results)

    def test_failed_fetch_leaves_no_file(self, origin_folder: Path, tmp_path: Path) -> None:
        path = tmp_path / "file"
        for results, error in (([DAMAGED] * 2, VerificationError), ([UnavailableError("away")], UnavailableError)):
            with pytest.raises(error):
                fetch(CountingStore(origin_folder, *results), "train/a.tar", path, size=len(DATA), sha256=SHA256)
            assert not path.exists()
        with pytest.raises(InterruptError):
            fetch(CountingStore(origin_folder), "train/a.tar", path, size=len(DATA), is_needed=lambda: False)
        assert not path.exists()

    def test_fetch_reads_in_chunks(self, origin_folder: Path, tmp_path: Path) -> None:
        class Pieces(LocalStore):
            longest = 0

            def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
                self.longest = max(self.longest, length)
                return super().range(name, start, length, etag=etag)

        store = Pieces(str(origin_folder))
        fetch(store, "train/a.tar", tmp_path / "file", size=len(DATA), sha256=SHA256)
        assert store.longest == CHUNK
