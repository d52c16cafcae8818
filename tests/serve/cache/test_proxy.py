"""Caching proxy of the embedded engine: verification, budget, eviction, stale objects, and broken origins."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import threading
from contextlib import suppress
from http import client
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker.errors import ConflictError, InputError
from stoker.serve import http
from stoker.serve.cache import slices
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.settings import CacheSettings
from tests.support.disks import small_disk
from tests.support.engines import run_cache
from tests.support.http_origin import DATA, build_manifest, run_origin
from tests.support.http_requests import send_request
from tests.support.threads import run_parallel
from tests.support.waiting import wait_until

LARGE = DATA * (2 * slices.SLICE_BYTES // len(DATA) + 1)


def test_object_with_a_wrong_digest_is_never_completed_or_cached(tmp_path: Path) -> None:
    with (
        run_origin({"/train/a.tar": LARGE, "/train/manifest.json": build_manifest({"a.tar": LARGE})}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url)) as url,
    ):
        origin.corrupt = lambda path, body: body if path.endswith("json") else bytes([body[0] ^ 1]) + body[1:]
        for _ in range(2):
            with suppress(client.IncompleteRead):  # or it is detected before the response starts
                assert send_request(url, "/train/a.tar").status == 502
        assert json.loads(send_request(url, "/-/stats").body)["spoilt"] == 2
        origin.corrupt = None
        assert send_request(url, "/train/a.tar").body == LARGE
        again = send_request(url, "/train/a.tar")
        assert (again.body, again.headers["x-cache"]) == (LARGE, "HIT")


def test_folder_where_nothing_can_be_stored_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        slices.check_budget(Path("/proc/cache"), 1 << 30)
    assert "--dir" in str(caught.value)


def test_size_mismatch_with_the_manifest_is_reported(tmp_path: Path) -> None:
    with (
        run_origin({"/train/a.tar": DATA[:-1], "/train/manifest.json": build_manifest({"a.tar": DATA})}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url)) as url,
    ):
        response = send_request(url, "/train/a.tar")
        assert response.status == 502
        assert b"299,999" in response.body
        assert b"300,000" in response.body


def test_only_a_complete_object_is_a_hit(tmp_path: Path) -> None:
    with run_origin({"/a.tar": LARGE}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        for _ in range(2):
            part = send_request(url, "/a.tar", Range="bytes=5-9")
            assert (part.body, part.headers["x-cache"]) == (LARGE[5:10], "MISS")
        assert origin.count_gets("/a.tar") == 1
        send_request(url, "/a.tar")
        assert send_request(url, "/a.tar", Range="bytes=5-9").headers["x-cache"] == "HIT"


def test_versions_are_never_mixed_in_one_response(tmp_path: Path) -> None:
    with run_origin({"/a.tar": LARGE}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        send_request(url, "/a.tar", Range="bytes=0-9")
        origin.files["/a.tar"], origin.version = LARGE[::-1], 2
        with suppress(client.IncompleteRead):
            assert send_request(url, "/a.tar").status == 502
        assert send_request(url, "/a.tar").body == LARGE[::-1]


def test_budget_holds_at_every_moment_under_concurrent_reads(tmp_path: Path) -> None:
    chunk = bytes(slices.SLICE_BYTES)
    files = {f"/{number}.tar": bytes([number]) + chunk for number in range(12)}
    budget = 5 * slices.SLICE_BYTES
    max_used, stopped = [0], threading.Event()

    def watch() -> None:
        while not stopped.is_set():
            disk = os.statvfs(tmp_path / "disk")
            max_used[0] = max(max_used[0], (disk.f_blocks - disk.f_bfree) * disk.f_frsize)

    with (
        small_disk(tmp_path / "disk", 4 * budget) as folder,
        run_origin(files) as origin,
        run_cache(folder / "cache", ("", origin.url), size=budget) as url,
    ):
        watcher = threading.Thread(target=watch)
        watcher.start()
        wrong: list[int] = []

        def read(number: int) -> None:
            for path in random.Random(number).sample(sorted(files), len(files)):
                if send_request(url, path).body != files[path]:
                    wrong.append(number)

        run_parallel([lambda number=number: read(number) for number in range(4)])  # type: ignore[misc]
        stopped.set()
        watcher.join()
        stats = json.loads(send_request(url, "/-/stats").body)
    assert wrong == []
    assert stats["evictions"] > 0
    assert stats["held_bytes"] <= budget
    assert budget / 2 < max_used[0] <= budget


def test_object_is_served_uncached_when_all_others_are_pinned(tmp_path: Path) -> None:
    """Two stalled readers pin the whole cache; a third one still gets its object, uncached."""
    size = 2 * slices.SLICE_BYTES
    files = {f"/{name}.tar": bytes([number]) * size for number, name in enumerate("abc")}
    budget = 2 * size + 4 * slices.OBJECT_OVERHEAD_BYTES
    with run_origin(files) as origin, run_cache(tmp_path / "cache", ("", origin.url), size=budget) as url:
        parts = urlsplit(url)
        readers = []
        for name in "ab":
            reader = socket.create_connection((parts.hostname, parts.port))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(f"GET /{name}.tar HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            readers.append(reader)
        wait_until(lambda: bool(json.loads(send_request(url, "/-/stats").body)["held_bytes"] >= 2 * size))
        for _ in range(2):
            response = send_request(url, "/c.tar")
            assert (response.body, response.headers["x-cache"]) == (files["/c.tar"], "MISS")
        assert json.loads(send_request(url, "/-/stats").body)["held_bytes"] <= budget
        for reader in readers:
            reader.close()
        wait_until(
            lambda: bool(send_request(url, "/c.tar").body and send_request(url, "/c.tar").headers["x-cache"] == "HIT")
        )


def test_object_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    huge = bytes(5 * slices.SLICE_BYTES)
    with (
        run_origin({"/a.tar": DATA, "/huge.tar": huge}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url), size=4 * slices.SLICE_BYTES) as url,
    ):
        send_request(url, "/a.tar")
        assert send_request(url, "/huge.tar").body == huge
        assert send_request(url, "/a.tar").headers["x-cache"] == "HIT"
        assert len(DATA) < json.loads(send_request(url, "/-/stats").body)["held_bytes"] < slices.SLICE_BYTES


def test_failed_write_does_not_fail_the_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with_enospc(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with run_origin({"/a.tar": DATA}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        monkeypatch.setattr(slices.os, "fdatasync", fail_with_enospc)
        for _ in range(2):
            response = send_request(url, "/a.tar")
            assert (response.body, response.headers["x-cache"]) == (DATA, "MISS")
        assert json.loads(send_request(url, "/-/stats").body)["held_bytes"] == 0
        monkeypatch.undo()
        send_request(url, "/a.tar")
        assert send_request(url, "/a.tar").headers["x-cache"] == "HIT"
    assert not list((tmp_path / "cache" / "trash").iterdir())


def test_damaged_objects_are_discarded_on_load(tmp_path: Path) -> None:
    with run_origin({"/a.tar": LARGE, "/b.tar": DATA}) as origin:
        with run_cache(tmp_path / "cache", ("", origin.url)) as url:
            assert send_request(url, "/a.tar").body == LARGE
            assert send_request(url, "/b.tar").body == DATA
        for info in (tmp_path / "cache" / "objects").glob("*/*/about.json"):
            if b"b.tar" in info.read_bytes():
                info.write_bytes(b"{}")
            else:
                (info.parent / "000001").write_bytes(b"short")
        with run_cache(tmp_path / "cache", ("", origin.url)) as url:
            for path, data in (("/a.tar", LARGE), ("/b.tar", DATA)):
                response = send_request(url, path)
                assert (response.body, response.headers["x-cache"]) == (data, "MISS"), path


def test_folder_is_locked_by_one_cache(tmp_path: Path) -> None:
    with (
        run_origin({}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url)),
        pytest.raises(ConflictError, match=f"{tmp_path}/cache: .*--dir"),
    ):
        EmbeddedEngine(CacheSettings(origins=(("", origin.url),), dir=tmp_path / "cache", size=1 << 30, port=0))


def test_bucket_as_origin(tmp_path: Path, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": moto_url,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", endpoint_url=moto_url, region_name="us-east-1")
    s3.create_bucket(Bucket="serve-origin")
    s3.put_object(Bucket="serve-origin", Key="set/train/a.tar", Body=LARGE)
    with run_cache(tmp_path / "cache", ("imagenet", "s3://serve-origin/set")) as url:
        assert send_request(url, "/imagenet/train/a.tar").body == LARGE
        again = send_request(url, "/imagenet/train/a.tar", Range="bytes=7-11")
        assert (again.body, again.headers["x-cache"]) == (LARGE[7:12], "HIT")
        assert json.loads(send_request(url, "/imagenet/train/").body) == [
            {"name": "a.tar", "type": "file", "size": len(LARGE)}
        ]
        assert send_request(url, "/imagenet/none.tar").status == 404


def find_only_object(folder: Path) -> Path:
    (info,) = (folder / "objects").glob("*/*/about.json")
    return info.parent


def test_refetched_slice_is_verified_even_after_a_kill(tmp_path: Path) -> None:
    """A slice is lost, the refetched one is wrong, and the process is killed before verification."""
    with run_origin({"/train/a.tar": LARGE, "/train/manifest.json": build_manifest({"a.tar": LARGE})}) as origin:
        with run_cache(tmp_path / "cache", ("", origin.url)) as url:
            send_request(url, "/train/a.tar")
        (find_only_object(tmp_path / "cache") / "000001").unlink()
        cache = slices.SliceCache(tmp_path / "cache", 1 << 30)
        assert cache.used_bytes == 0
        cache.close()
        with run_cache(tmp_path / "cache", ("", origin.url)) as url:
            assert send_request(url, "/train/a.tar").headers["x-cache"] == "MISS"


def test_missing_slice_is_not_a_hit(tmp_path: Path) -> None:
    with (
        run_origin({"/train/a.tar": LARGE, "/train/manifest.json": build_manifest({"a.tar": LARGE})}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url)) as url,
    ):
        send_request(url, "/train/a.tar")
        (find_only_object(tmp_path / "cache") / "000001").unlink()
        origin.corrupt = lambda path, body: body if path.endswith("json") else bytes(len(body))
        for _ in range(2):
            assert not is_complete(url, "/train/a.tar")
        origin.corrupt = None
        assert send_request(url, "/train/a.tar").body == LARGE


def is_complete(url: str, path: str) -> bool:
    """Return whether a client that trusts the server would consider the response complete."""
    try:
        return send_request(url, path).status == 200
    except client.IncompleteRead:
        return False


def test_object_is_not_served_while_its_manifest_is_unreadable(tmp_path: Path) -> None:
    with (
        run_origin({"/train/a.tar": DATA, "/train/manifest.json": build_manifest({"a.tar": DATA})}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url)) as url,
    ):
        origin.failing_path = "/train/manifest.json"
        assert send_request(url, "/train/a.tar").status == 502
        origin.failing_path = None
        assert send_request(url, "/train/a.tar").body == DATA


def test_object_replaced_with_its_manifest_is_served(tmp_path: Path) -> None:
    with (
        run_origin({"/train/a.tar": DATA, "/train/manifest.json": build_manifest({"a.tar": DATA})}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url), revalidate_after_s=0) as url,
    ):
        send_request(url, "/train/a.tar")
        origin.files |= {"/train/a.tar": DATA[:1000], "/train/manifest.json": build_manifest({"a.tar": DATA[:1000]})}
        assert send_request(url, "/train/a.tar").body == DATA[:1000]


def test_origin_without_validators_is_not_cached(tmp_path: Path) -> None:
    with run_origin({"/a.tar": LARGE}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        origin.validators = False
        for data in (LARGE, LARGE[::-1]):
            origin.files["/a.tar"] = data
            response = send_request(url, "/a.tar")
            assert (response.body, response.headers["x-cache"]) == (data, "MISS")
        assert json.loads(send_request(url, "/-/stats").body)["held_bytes"] == 0


def test_uncached_object_is_verified_too(tmp_path: Path) -> None:
    huge = LARGE * 3
    with (
        run_origin({"/train/a.tar": huge, "/train/manifest.json": build_manifest({"a.tar": huge})}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url), size=4 * slices.SLICE_BYTES) as url,
    ):
        assert send_request(url, "/train/a.tar").body == huge
        origin.corrupt = lambda path, body: body if path.endswith("json") else bytes([body[0] ^ 1]) + body[1:]
        assert not is_complete(url, "/train/a.tar")


def test_full_disk_does_not_fail_the_response(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 64 << 10) as folder,
        run_origin({"/a.tar": DATA}) as origin,
        run_cache(folder / "cache", ("", origin.url)) as url,
    ):
        for _ in range(2):
            assert send_request(url, "/a.tar").body == DATA


def test_head_and_conditional_requests_cache_nothing(tmp_path: Path) -> None:
    files = {f"/{number}.tar": DATA for number in range(50)}
    with run_origin(files) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        for path in files:
            send_request(url, path, "HEAD")
            send_request(url, path, If_None_Match="*")
            send_request(url, path, Range="bytes=999999-")
        assert not list((tmp_path / "cache" / "objects").iterdir())
        assert json.loads(send_request(url, "/-/stats").body)["held_bytes"] == 0


def test_failed_fetch_is_not_repeated_by_every_waiting_client(tmp_path: Path) -> None:
    with run_origin({"/a.tar": DATA}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        send_request(url, "/a.tar", "HEAD")
        origin.delay_s, origin.corrupt = 0.3, lambda _, body: body[:-1]
        run_parallel([lambda: is_complete(url, "/a.tar")] * 6)  # type: ignore[list-item]
        assert origin.count_gets("/a.tar") <= 10  # one fetch with its retries, maybe two, but not six


def test_failing_origin_is_not_revalidated_on_every_request(tmp_path: Path) -> None:
    with (
        run_origin({"/a.tar": DATA}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url), revalidate_after_s=0) as url,
    ):
        send_request(url, "/a.tar")
        origin.status = 503
        statuses = [send_request(url, "/a.tar").headers["x-cache"] for _ in range(2)]
        heads = len(origin.head_requests)
        statuses += [send_request(url, "/a.tar").headers["x-cache"] for _ in range(20)]
        assert set(statuses) == {"STALE"}
        assert len(origin.head_requests) == heads


def test_unavailable_origin_is_remembered_for_all_objects(tmp_path: Path) -> None:
    files = {f"/{number}.tar": DATA for number in range(10)}
    with run_origin(files) as origin, run_cache(tmp_path / "cache", ("", origin.url), revalidate_after_s=0) as url:
        for path in files:
            send_request(url, path)
        origin.status = 503
        send_request(url, "/0.tar")
        heads = len(origin.head_requests)
        assert {send_request(url, path).headers["x-cache"] for path in files} == {"STALE"}
        assert len(origin.head_requests) == heads


def test_access_denied_does_not_evict(tmp_path: Path) -> None:
    with (
        run_origin({"/a.tar": DATA}) as origin,
        run_cache(tmp_path / "cache", ("", origin.url), revalidate_after_s=0) as url,
    ):
        send_request(url, "/a.tar")
        origin.status = 403
        assert send_request(url, "/a.tar").headers["x-cache"] == "STALE"
        assert json.loads(send_request(url, "/-/stats").body)["held_bytes"] > 0


def test_bypassing_range_requests_refill_the_cache(tmp_path: Path) -> None:
    with run_origin({"/a.tar": LARGE}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        send_request(url, "/a.tar")
        before = origin.count_gets("/a.tar")
        for start in range(0, len(LARGE), slices.SLICE_BYTES):
            send_request(url, "/a.tar", Range=f"bytes={start}-{start + slices.SLICE_BYTES - 1}", X_Stoker_Bypass="1")
        send_request(url, "/a.tar", "HEAD", X_Stoker_Bypass="1")
        assert origin.count_gets("/a.tar") == before + -(-len(LARGE) // slices.SLICE_BYTES)
        assert send_request(url, "/a.tar").headers["x-cache"] == "HIT"


def test_folder_listing_takes_one_request(tmp_path: Path) -> None:
    page = json.dumps([{"name": f"{number}", "type": "directory"} for number in range(20)]).encode()
    with run_origin({"/": page}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        origin.content_type = "application/json"
        assert len(json.loads(send_request(url, "/").body)) == 20
        assert len(origin.get_requests) == 1
        assert origin.head_requests == []


def test_error_responses_contain_no_credentials(tmp_path: Path) -> None:
    with run_origin({"/a.tar": DATA}) as origin:
        url_with_user = origin.url.replace("http://", "http://alice:word@")
        with run_cache(tmp_path / "cache", ("", url_with_user)) as url:
            origin.status = 403
            response = send_request(url, "/a.tar")
            assert response.status == 403
            assert b"alice" not in response.body
            origin.status = None
            (tmp_path / "cache" / "trash").rmdir()
            assert send_request(url, "/a.tar").body == DATA


def test_slow_origin_does_not_count_as_a_slow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http, "MIN_BYTES_PER_S", 1 << 40)
    with run_origin({"/a.tar": LARGE}) as origin, run_cache(tmp_path / "cache", ("", origin.url)) as url:
        origin.delay_s = 0.5
        assert send_request(url, "/a.tar").body == LARGE
