"""The engine of ours against the contract, and what only it promises."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http import client
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from stoker.errors import ConflictError
from stoker.serve import http
from stoker.serve.cache import slices
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.files import FileSite
from stoker.serve.settings import CacheSettings, ServeSettings
from tests.serve import contract
from tests.serve.contract import DATA, CacheSuite, ServeSuite, ask, at_once, eventually, manifest, origin, raw
from tests.support.disks import disk


def running(settings: ServeSettings | CacheSettings) -> AbstractContextManager[str]:
    return contract.running(EmbeddedEngine(settings))


class TestServe(ServeSuite):
    ENGINE = "embedded"


class TestCache(CacheSuite):
    ENGINE = "embedded"


# What only this engine promises of a cache.


@contextmanager
def caching(folder: Path, *origins: tuple[str, str], size: int = 1 << 30, fresh_s: float = 60.0) -> Iterator[str]:
    with running(CacheSettings(origins=origins, dir=folder, size=size, port=0, fresh_s=fresh_s)) as url:
        yield url


LARGE = DATA * (2 * slices.SLICE // len(DATA) + 1)


def test_what_has_another_digest_than_the_manifest_says_is_never_complete_and_never_kept(tmp_path: Path) -> None:
    with (
        origin({"/train/a.tar": LARGE, "/train/manifest.json": manifest({"a.tar": LARGE})}) as far,
        caching(tmp_path / "cache", ("", far.url)) as url,
    ):
        far.spoil = lambda path, body: body if path.endswith("json") else bytes([body[0] ^ 1]) + body[1:]
        for _ in range(2):
            with suppress(client.IncompleteRead):  # or it is known before the answer begins
                assert ask(url, "/train/a.tar").status == 502
        assert json.loads(ask(url, "/-/stats").body)["spoilt"] == 2
        far.spoil = None
        assert ask(url, "/train/a.tar").body == LARGE
        again = ask(url, "/train/a.tar")
        assert (again.body, again.headers["x-cache"]) == (LARGE, "HIT")


def test_a_shard_of_another_length_than_the_manifest_says_is_told(tmp_path: Path) -> None:
    with (
        origin({"/train/a.tar": DATA[:-1], "/train/manifest.json": manifest({"a.tar": DATA})}) as far,
        caching(tmp_path / "cache", ("", far.url)) as url,
    ):
        answer = ask(url, "/train/a.tar")
        assert answer.status == 502
        assert b"299,999 bytes at the origin, and its manifest says 300,000" in answer.body


def test_only_what_is_whole_is_a_hit(tmp_path: Path) -> None:
    with origin({"/a.tar": LARGE}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        for _ in range(2):
            part = ask(url, "/a.tar", Range="bytes=5-9")
            assert (part.body, part.headers["x-cache"]) == (LARGE[5:10], "MISS")
        assert far.count("/a.tar") == 1
        ask(url, "/a.tar")
        assert ask(url, "/a.tar", Range="bytes=5-9").headers["x-cache"] == "HIT"


def test_an_object_that_changes_while_it_is_read_is_cut_off_not_mixed(tmp_path: Path) -> None:
    with origin({"/a.tar": LARGE}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        ask(url, "/a.tar", Range="bytes=0-9")
        far.files["/a.tar"], far.version = LARGE[::-1], 2
        with suppress(client.IncompleteRead):
            assert ask(url, "/a.tar").status == 502
        assert ask(url, "/a.tar").body == LARGE[::-1]


def test_the_budget_holds_at_every_moment_and_what_is_read_stays(tmp_path: Path) -> None:
    piece = bytes(slices.SLICE)
    files = {f"/{number}.tar": bytes([number]) + piece for number in range(12)}
    budget = 5 * slices.SLICE
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            now = os.statvfs(tmp_path / "disk")
            most[0] = max(most[0], (now.f_blocks - now.f_bfree) * now.f_frsize)

    with (
        disk(tmp_path / "disk", 4 * budget) as folder,
        origin(files) as far,
        caching(folder / "cache", ("", far.url), size=budget) as url,
    ):
        watcher = threading.Thread(target=watch)
        watcher.start()
        wrong: list[int] = []

        def read(number: int) -> None:
            for path in random.Random(number).sample(sorted(files), len(files)):
                if ask(url, path).body != files[path]:
                    wrong.append(number)

        at_once([lambda number=number: read(number) for number in range(4)])  # type: ignore[misc]
        done.set()
        watcher.join()
        told = json.loads(ask(url, "/-/stats").body)
    assert wrong == []
    assert told["evictions"] > 0
    assert told["held_bytes"] <= budget
    assert budget / 2 < most[0] <= budget


def test_when_everything_is_in_use_the_rest_passes_by(tmp_path: Path) -> None:
    """Two readers who stop in the middle hold all there is; a third gets its object all the same, uncached."""
    size = 2 * slices.SLICE
    files = {f"/{name}.tar": bytes([number]) * size for number, name in enumerate("abc")}
    budget = 2 * size + 4 * slices.OBJECT
    with origin(files) as far, caching(tmp_path / "cache", ("", far.url), size=budget) as url:
        parts = urlsplit(url)
        readers = []
        for name in "ab":
            reader = socket.create_connection((parts.hostname, parts.port))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(f"GET /{name}.tar HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            readers.append(reader)
        eventually(lambda: bool(json.loads(ask(url, "/-/stats").body)["held_bytes"] >= 2 * size))
        for _ in range(2):
            answer = ask(url, "/c.tar")
            assert (answer.body, answer.headers["x-cache"]) == (files["/c.tar"], "MISS")
        assert json.loads(ask(url, "/-/stats").body)["held_bytes"] <= budget
        for reader in readers:
            reader.close()
        eventually(lambda: bool(ask(url, "/c.tar").body and ask(url, "/c.tar").headers["x-cache"] == "HIT"))


def test_an_object_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    huge = bytes(5 * slices.SLICE)
    with (
        origin({"/a.tar": DATA, "/huge.tar": huge}) as far,
        caching(tmp_path / "cache", ("", far.url), size=4 * slices.SLICE) as url,
    ):
        ask(url, "/a.tar")
        assert ask(url, "/huge.tar").body == huge
        assert ask(url, "/a.tar").headers["x-cache"] == "HIT"
        assert len(DATA) < json.loads(ask(url, "/-/stats").body)["held_bytes"] < slices.SLICE


def test_a_full_disk_is_no_reason_not_to_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with origin({"/a.tar": DATA}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        monkeypatch.setattr(slices.os, "fdatasync", full)
        for _ in range(2):
            answer = ask(url, "/a.tar")
            assert (answer.body, answer.headers["x-cache"]) == (DATA, "MISS")
        assert json.loads(ask(url, "/-/stats").body)["held_bytes"] == 0
        monkeypatch.undo()
        ask(url, "/a.tar")
        assert ask(url, "/a.tar").headers["x-cache"] == "HIT"
    assert not list((tmp_path / "cache" / "trash").iterdir())


def test_damaged_entries_are_not_taken_over(tmp_path: Path) -> None:
    with origin({"/a.tar": LARGE, "/b.tar": DATA}) as far:
        with caching(tmp_path / "cache", ("", far.url)) as url:
            assert ask(url, "/a.tar").body == LARGE
            assert ask(url, "/b.tar").body == DATA
        for about in (tmp_path / "cache" / "objects").glob("*/*/about.json"):
            if b"b.tar" in about.read_bytes():
                about.write_bytes(b"{}")
            else:
                (about.parent / "000001").write_bytes(b"short")
        with caching(tmp_path / "cache", ("", far.url)) as url:
            for path, data in (("/a.tar", LARGE), ("/b.tar", DATA)):
                answer = ask(url, path)
                assert (answer.body, answer.headers["x-cache"]) == (data, "MISS"), path


def test_one_folder_has_one_cache(tmp_path: Path) -> None:
    with (
        origin({}) as far,
        caching(tmp_path / "cache", ("", far.url)),
        pytest.raises(ConflictError, match="another cache uses this folder"),
    ):
        EmbeddedEngine(CacheSettings(origins=(("", far.url),), dir=tmp_path / "cache", size=1 << 30, port=0))


def test_buckets_are_origins(tmp_path: Path, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with caching(tmp_path / "cache", ("imagenet", "s3://serve-origin/set")) as url:
        assert ask(url, "/imagenet/train/a.tar").body == LARGE
        again = ask(url, "/imagenet/train/a.tar", Range="bytes=7-11")
        assert (again.body, again.headers["x-cache"]) == (LARGE[7:12], "HIT")
        assert json.loads(ask(url, "/imagenet/train/").body) == [{"name": "a.tar", "type": "file", "size": len(LARGE)}]
        assert ask(url, "/imagenet/none.tar").status == 404


def only_object(folder: Path) -> Path:
    (about,) = (folder / "objects").glob("*/*/about.json")
    return about.parent


def test_what_comes_anew_for_a_whole_object_is_checked_even_after_a_kill(tmp_path: Path) -> None:
    """A slice is lost, its successor is wrong, and the process is killed before it could be checked."""
    with origin({"/train/a.tar": LARGE, "/train/manifest.json": manifest({"a.tar": LARGE})}) as far:
        with caching(tmp_path / "cache", ("", far.url)) as url:
            ask(url, "/train/a.tar")
        (only_object(tmp_path / "cache") / "000001").unlink()
        cache = slices.SliceCache(tmp_path / "cache", 1 << 30)
        assert cache.held == 0
        cache.close()
        with caching(tmp_path / "cache", ("", far.url)) as url:
            assert ask(url, "/train/a.tar").headers["x-cache"] == "MISS"


def test_a_slice_that_vanishes_is_no_hit_any_more(tmp_path: Path) -> None:
    with (
        origin({"/train/a.tar": LARGE, "/train/manifest.json": manifest({"a.tar": LARGE})}) as far,
        caching(tmp_path / "cache", ("", far.url)) as url,
    ):
        ask(url, "/train/a.tar")
        (only_object(tmp_path / "cache") / "000001").unlink()
        far.spoil = lambda path, body: body if path.endswith("json") else bytes(len(body))
        for _ in range(2):
            assert not complete(url, "/train/a.tar")
        far.spoil = None
        assert ask(url, "/train/a.tar").body == LARGE


def complete(url: str, path: str) -> bool:
    """Whether a client that trusts the server would take the answer for a whole object."""
    try:
        return ask(url, path).status == 200
    except client.IncompleteRead:
        return False


def test_without_its_manifest_nothing_is_taken_for_checked(tmp_path: Path) -> None:
    with (
        origin({"/train/a.tar": DATA, "/train/manifest.json": manifest({"a.tar": DATA})}) as far,
        caching(tmp_path / "cache", ("", far.url)) as url,
    ):
        far.broken = "/train/manifest.json"
        assert ask(url, "/train/a.tar").status == 502
        far.broken = None
        assert ask(url, "/train/a.tar").body == DATA


def test_an_object_that_changes_together_with_its_manifest_is_served(tmp_path: Path) -> None:
    with (
        origin({"/train/a.tar": DATA, "/train/manifest.json": manifest({"a.tar": DATA})}) as far,
        caching(tmp_path / "cache", ("", far.url), fresh_s=0) as url,
    ):
        ask(url, "/train/a.tar")
        far.files |= {"/train/a.tar": DATA[:1000], "/train/manifest.json": manifest({"a.tar": DATA[:1000]})}
        assert ask(url, "/train/a.tar").body == DATA[:1000]


def test_an_origin_that_marks_no_versions_is_passed_through(tmp_path: Path) -> None:
    with origin({"/a.tar": LARGE}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        far.validators = False
        for data in (LARGE, LARGE[::-1]):
            far.files["/a.tar"] = data
            answer = ask(url, "/a.tar")
            assert (answer.body, answer.headers["x-cache"]) == (data, "MISS")
        assert json.loads(ask(url, "/-/stats").body)["held_bytes"] == 0


def test_what_passes_by_is_checked_too(tmp_path: Path) -> None:
    huge = LARGE * 3
    with (
        origin({"/train/a.tar": huge, "/train/manifest.json": manifest({"a.tar": huge})}) as far,
        caching(tmp_path / "cache", ("", far.url), size=4 * slices.SLICE) as url,
    ):
        assert ask(url, "/train/a.tar").body == huge
        far.spoil = lambda path, body: body if path.endswith("json") else bytes([body[0] ^ 1]) + body[1:]
        assert not complete(url, "/train/a.tar")


def test_a_really_full_disk_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    with (
        disk(tmp_path / "disk", 64 << 10) as folder,
        origin({"/a.tar": DATA}) as far,
        caching(folder / "cache", ("", far.url)) as url,
    ):
        for _ in range(2):
            assert ask(url, "/a.tar").body == DATA


def test_asking_about_objects_keeps_nothing(tmp_path: Path) -> None:
    files = {f"/{number}.tar": DATA for number in range(50)}
    with origin(files) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        for path in files:
            ask(url, path, "HEAD")
            ask(url, path, If_None_Match="*")
            ask(url, path, Range="bytes=999999-")
        assert not list((tmp_path / "cache" / "objects").iterdir())
        assert json.loads(ask(url, "/-/stats").body)["held_bytes"] == 0


def test_those_who_wait_for_a_fetch_that_fails_do_not_all_try_again(tmp_path: Path) -> None:
    with origin({"/a.tar": DATA}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        ask(url, "/a.tar", "HEAD")
        far.delay_s, far.spoil = 0.3, lambda _, body: body[:-1]
        at_once([lambda: complete(url, "/a.tar")] * 6)  # type: ignore[list-item]
        assert far.count("/a.tar") <= 10  # one fetch with its retries, maybe two, and not six


def test_while_the_origin_fails_it_is_not_asked_each_time(tmp_path: Path) -> None:
    with origin({"/a.tar": DATA}) as far, caching(tmp_path / "cache", ("", far.url), fresh_s=0) as url:
        ask(url, "/a.tar")
        far.status = 503
        asked = [ask(url, "/a.tar").headers["x-cache"] for _ in range(2)]
        heads = len(far.heads)
        asked += [ask(url, "/a.tar").headers["x-cache"] for _ in range(20)]
        assert set(asked) == {"STALE"}
        assert len(far.heads) == heads


def test_a_silent_origin_is_asked_once_for_all(tmp_path: Path) -> None:
    files = {f"/{number}.tar": DATA for number in range(10)}
    with origin(files) as far, caching(tmp_path / "cache", ("", far.url), fresh_s=0) as url:
        for path in files:
            ask(url, path)
        far.status = 503
        ask(url, "/0.tar")
        heads = len(far.heads)
        assert {ask(url, path).headers["x-cache"] for path in files} == {"STALE"}
        assert len(far.heads) == heads


def test_a_denial_does_not_empty_the_cache(tmp_path: Path) -> None:
    with origin({"/a.tar": DATA}) as far, caching(tmp_path / "cache", ("", far.url), fresh_s=0) as url:
        ask(url, "/a.tar")
        far.status = 403
        assert ask(url, "/a.tar").headers["x-cache"] == "STALE"
        assert json.loads(ask(url, "/-/stats").body)["held_bytes"] > 0


def test_reading_past_the_cache_piece_by_piece_fills_it(tmp_path: Path) -> None:
    with origin({"/a.tar": LARGE}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        ask(url, "/a.tar")
        before = far.count("/a.tar")
        for start in range(0, len(LARGE), slices.SLICE):
            ask(url, "/a.tar", Range=f"bytes={start}-{start + slices.SLICE - 1}", X_Stoker_Bypass="1")
        ask(url, "/a.tar", "HEAD", X_Stoker_Bypass="1")
        assert far.count("/a.tar") == before + -(-len(LARGE) // slices.SLICE)
        assert ask(url, "/a.tar").headers["x-cache"] == "HIT"


def test_one_folder_is_listed_by_one_request(tmp_path: Path) -> None:
    page = json.dumps([{"name": f"{number}", "type": "directory"} for number in range(20)]).encode()
    with origin({"/": page}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        far.kind = "application/json"
        assert len(json.loads(ask(url, "/").body)) == 20
        assert len(far.gets) == 1
        assert far.heads == []


def test_what_goes_wrong_here_is_not_told_to_clients(tmp_path: Path) -> None:
    with origin({"/a.tar": DATA}) as far:
        login = far.url.replace("http://", "http://alice:word@")
        with caching(tmp_path / "cache", ("", login)) as url:
            far.status = 403
            answer = ask(url, "/a.tar")
            assert answer.status == 403
            assert b"alice" not in answer.body
            far.status = None
            (tmp_path / "cache" / "trash").rmdir()
            assert ask(url, "/a.tar").body == DATA


# What only this engine promises of any server.


def test_a_drip_is_let_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_S", 1.0)
    monkeypatch.setattr(http, "PIECE", 64 << 10)
    (tmp_path / "a.tar").write_bytes(bytes(64 << 20))
    engine = EmbeddedEngine(ServeSettings(root=tmp_path, port=0))
    engine.start()
    parts = urlsplit(engine.url)
    try:
        drip = socket.create_connection((parts.hostname, parts.port))
        drip.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        drip.sendall(b"GET /a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        ended = time.monotonic() + 30
        while engine._server.clients and time.monotonic() < ended:
            drip.recv(2048)
            time.sleep(0.1)
        assert engine._server.clients == 0
        drip.close()
    finally:
        engine.stop()


def test_a_slow_origin_is_not_held_against_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_S", 0.3)
    monkeypatch.setattr(http, "MIN_RATE", 1 << 40)
    with origin({"/a.tar": LARGE}) as far, caching(tmp_path / "cache", ("", far.url)) as url:
        far.delay_s = 0.5
        assert ask(url, "/a.tar").body == LARGE


def test_no_thread_for_a_client_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ServeSettings(root=tmp_path, port=0)) as url:
        start, failing = threading.Thread.start, [True]

        def fails(thread: threading.Thread) -> None:
            if thread.name == "stoker-client" and failing:
                failing.clear()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fails)
        with pytest.raises((OSError, client.HTTPException)):
            ask(url, "/-/healthy")
        assert ask(url, "/-/healthy").status == 200


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    with running(ServeSettings(root=tmp_path, port=0)) as url:

        def use() -> None:
            etag = ask(url, "/a.tar").headers["etag"]
            for headers in ({}, {"If_None_Match": etag}, {"Range": "bytes=999999-"}, {"If_Match": '"x"'}):
                for method in ("GET", "HEAD"):
                    ask(url, "/a.tar", method, **headers)  # type: ignore[arg-type]
            for path in ("/", "/none", "/a.tar/", "/none/"):
                ask(url, path)

        use()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            use()
        eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


def test_a_listing_tells_nothing_of_what_lies_outside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "in.tar").write_bytes(b"x")
    (root / "stays").symlink_to("in.tar")
    (root / "leaves").symlink_to("/etc/passwd")
    with running(ServeSettings(root=root, port=0)) as url:
        assert {row["name"] for row in json.loads(ask(url, "/").body)} == {"in.tar", "stays"}


def test_conditions_of_writing(tmp_path: Path) -> None:
    with running(ServeSettings(root=tmp_path, port=0, writable=True)) as url:
        assert ask(url, "/a", "PUT", b"one", If_None_Match="*").status == 201
        assert ask(url, "/a", "PUT", b"two", If_None_Match="*").status == 412
        assert ask(url, "/a", "PUT", b"two", Content_Range="bytes 0-2/9").status == 400
        assert (tmp_path / "a").read_bytes() == b"one"
        assert ask(url, "/-/healthy", "PUT", b"x").status == 405


def test_a_range_means_nothing_to_a_head(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with running(ServeSettings(root=tmp_path, port=0)) as url:
        answer = ask(url, "/a", "HEAD", Range="bytes=0-3")
        assert (answer.status, answer.headers["content-length"]) == (200, "10")
        assert "date" in answer.headers


def test_slow_clients_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.5)
    monkeypatch.setattr(http, "IDLE_S", 0.5)
    monkeypatch.setattr(http, "STALL_S", 0.5)
    (tmp_path / "a.tar").write_bytes(bytes(64 << 20))
    engine = EmbeddedEngine(ServeSettings(root=tmp_path, port=0))
    engine.start()
    parts = urlsplit(engine.url)
    try:
        drip = socket.create_connection((parts.hostname, parts.port))
        drip.sendall(b"GET /a.tar HT")
        assert b" 408 " in drip.recv(100)
        idle = socket.create_connection((parts.hostname, parts.port))
        assert idle.recv(100) == b""
        lazy = socket.create_connection((parts.hostname, parts.port))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(b"GET /a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: engine._server.clients == 0)
        for one in (drip, idle, lazy):
            one.close()
    finally:
        engine.stop()


def test_too_many_clients_are_told_so(tmp_path: Path) -> None:
    server = http.Server(FileSite(tmp_path), "127.0.0.1", 0, max_clients=2)
    server.start()
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    try:
        eventually(lambda: server.clients == 2)
        with socket.create_connection(("127.0.0.1", server.port)) as third:
            assert b" 503 " in third.recv(100)
    finally:
        for one in held:
            one.close()
        server.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"400"),
        (b"G@T / HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"501"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(100)) + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
    ],
)
def test_requests_that_could_be_read_in_two_ways_are_refused(tmp_path: Path, request_: bytes, status: bytes) -> None:
    with running(ServeSettings(root=tmp_path, port=0)) as url:
        answer = raw(url, request_)
        assert answer.split(b" ")[1] == status
        assert answer.count(b"Content-Length:") == 1


def test_a_body_that_nobody_wants_is_not_taken_for_a_request(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    smuggled = b"GET /secret HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(ServeSettings(root=tmp_path, port=0)) as url:
        head = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
        assert raw(url, head + smuggled).count(b"Content-Length:") == 1


@settings_of(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_target_is_a_clean_path_or_refused(target: bytes) -> None:
    try:
        path = http.decoded(b"/" + target)
    except http.RefusedError:
        return
    parts = path.split("/")
    assert parts[0] == ""
    assert not {".", ".."} & set(parts)
    assert "" not in parts[1:-1]
    assert not set(path) & set("\0\\\n\r")


def test_the_token_is_read_again_on_a_signal(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first-token-of-many-letters\n")
    command = [sys.executable, "-m", "stoker", "data", "serve", str(tmp_path), "--port", "0", "--engine", "embedded"]
    with subprocess.Popen([*command, "--token-file", str(token)], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().split(" at ")[1].split()[0]
            assert ask(url, "/", Authorization="Bearer first-token-of-many-letters").status == 200
            token.write_text("second-token-of-many-letters")
            process.send_signal(signal.SIGHUP)
            eventually(lambda: ask(url, "/", Authorization="Bearer second-token-of-many-letters").status == 200)
            assert ask(url, "/", Authorization="Bearer first-token-of-many-letters").status == 401
            process.terminate()
            assert process.wait(10) == 0
        finally:
            process.kill()
