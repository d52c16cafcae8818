from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from stoker.errors import ConflictError, InputError, MissingProgramError, StokerError, UnavailableError
from stoker.serve.nginx import engine
from stoker.serve.nginx.config import CacheSettings, ServeSettings, Settings
from stoker.serve.nginx.engine import NginxEngine, find_nginx
from tests.support.servers import Asked, Reply, free_port, nginx, scripted

SECRET = b"nobody may read this"
MIB = 1 << 20
BYTES = bytes(range(256)) * 4096 * 3 + b"tail"
TOKEN = "open-sesame-0123"

try:
    find_nginx()
except MissingProgramError:
    pytest.skip("nginx is not installed", allow_module_level=True)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(url: str, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
    try:
        connection.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {key.lower(): value for key, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def raw(url: str, data: bytes, timeout: float = 20) -> bytes:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=timeout) as sock:
        sock.sendall(data)
        got = b""
        try:
            while piece := sock.recv(65536):
                got += piece
        except ConnectionResetError:
            pass
        return got


def stats(url: str, **headers: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(ask(url, "/-/stats", **headers).body)
    return told


@contextmanager
def running(settings: Settings, prefix: Path | None = None) -> Iterator[str]:
    engine = NginxEngine(settings, prefix)
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


@contextmanager
def serving(root: Path, **more: Any) -> Iterator[str]:
    with running(ServeSettings(**{"root": root, "host": "127.0.0.1", "port": 0} | more)) as url:
        yield url


@contextmanager
def caching(folder: Path, *urls: str, **more: Any) -> Iterator[str]:
    names = [""] if len(urls) == 1 else "abc"
    settings = {"origins": tuple(zip(names, urls, strict=False)), "dir": folder, "size": 64 * MIB, "host": "127.0.0.1"}
    with running(CacheSettings(**settings | {"port": 0, "slice_bytes": MIB} | more)) as url:
        yield url


# --- serve


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("files")
    (base / "secret").write_bytes(SECRET)
    root = base / "root"
    (root / "sub/deep").mkdir(parents=True)
    (root / "ten").write_bytes(b"0123456789")
    (root / "empty").write_bytes(b"")
    (root / "sub/a b#%é?.tar").write_bytes(b"odd")
    (root / "sub/index.html").write_bytes(b"a file like others")
    (root / "out").symlink_to(base / "secret")
    (root / "outside").symlink_to(base)
    (root / "sub/up").symlink_to("../../secret")
    (root / "sub/folder").symlink_to("../..")
    (root / "loop").symlink_to("loop")
    (root / "inside").symlink_to("ten")
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield url


@pytest.mark.parametrize(
    ("asked", "status", "body", "content_range"),
    [
        ("bytes=0-0", 206, b"0", "bytes 0-0/10"),
        ("bytes=3-5", 206, b"345", "bytes 3-5/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=5-4", 416, None, "bytes */10"),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
def test_ranges(url: str, asked: str, status: int, body: bytes | None, content_range: str | None) -> None:
    answer = ask(url, "/ten", Range=asked)
    assert (answer.status, answer.headers.get("content-range")) == (status, content_range)
    assert body is None or answer.body == body


def test_several_ranges_come_in_parts(url: str) -> None:
    answer = ask(url, "/ten", Range="bytes=0-1,8-9")
    assert answer.status == 206
    assert answer.headers["content-type"].startswith("multipart/byteranges")
    assert b"\r\n\r\n01\r\n" in answer.body
    assert b"\r\n\r\n89\r\n" in answer.body


def test_head_tells_the_length_alone(url: str) -> None:
    answer = ask(url, "/ten", "HEAD")
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "10", b"")
    assert answer.headers["accept-ranges"] == "bytes"


def test_conditional_requests(url: str) -> None:
    whole = ask(url, "/ten")
    etag = whole.headers["etag"]
    assert ask(url, "/ten", If_None_Match=etag).status == 304
    assert ask(url, "/ten", If_None_Match='"other"').body == b"0123456789"
    assert ask(url, "/ten", If_Modified_Since=whole.headers["last-modified"]).status == 304
    assert ask(url, "/ten", If_Match='"other"').status == 412
    assert ask(url, "/ten", Range="bytes=0-0", If_Range='"other"').status == 200
    assert ask(url, "/ten", Range="bytes=0-0", If_Range=etag).status == 206


def test_nothing_is_compressed(url: str) -> None:
    assert "content-encoding" not in ask(url, "/ten", Accept_Encoding="gzip").headers


def test_lists_folders_as_json_although_there_is_an_index_page(url: str) -> None:
    rows = json.loads(ask(url, "/sub/").body)
    assert {row["name"] for row in rows} >= {"deep", "a b#%é?.tar", "index.html"}
    answer = ask(url, "/sub", Host="evil.example")
    assert (answer.status, answer.headers["location"]) == (301, "/sub/")


def test_odd_names(url: str) -> None:
    assert ask(url, "/sub/a%20b%23%25%C3%A9%3F.tar").body == b"odd"


def traversals() -> list[bytes]:
    dots = ["..", "%2e%2e", ".%2e", "%2E.", "%252e%252e", "%c0%ae%c0%ae", "..;", "..%00", "\u2025", "%uff0e%uff0e"]
    separators = ["/", "%2f", "\\", "%5c", "//", "%252f", "/./", "%c0%af"]
    made = [
        f"{start}{(dot + separator) * depth}secret"
        for dot, separator, depth, start in product(dots, separators, (1, 2, 3), ("/", "/sub/"))
    ]
    made += [f"/{name}" for name in ("out", "outside/secret", "sub/up", "sub/folder/secret", "outside/root/../secret")]
    made += [
        "//secret",
        "/../secret",
        "/%00../secret",
        "/ten/../../secret",
        "../secret",
        "%2e%2e/secret",
        "\\..\\secret",
    ]
    made += ["http://127.0.0.1/../secret", "http:///../secret", "file:///etc/passwd", "/..", "/sub/../.."]
    return [path.encode() for path in made]


def test_no_spelling_leads_out_of_the_root(url: str, root: Path) -> None:
    paths = [*traversals(), str(root.parent / "secret").encode(), f"/{root.parent}/secret".encode()]
    assert len(paths) > 200
    for path in paths:
        got = raw(url, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert SECRET not in got, path
        assert re.match(rb"HTTP/1.1 (400|403|404) ", got) or got == b"" or b"<center>nginx" in got, (path, got)


@pytest.mark.parametrize(
    "path", ["/out", "/outside/", "/outside/secret", "/sub/up", "/sub/folder/", "/loop", "/inside"]
)
def test_links_are_refused(url: str, path: str) -> None:
    assert ask(url, path).status in (403, 404)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "PATCH", "MKCOL", "MOVE", "OPTIONS", "CONNECT", "TRACE"])
def test_only_reading_is_allowed(url: str, root: Path, method: str) -> None:
    answer = ask(url, "/ten", method)
    assert answer.status == 405
    assert (root / "ten").read_bytes() == b"0123456789"


def test_says_which_methods_there_are(url: str) -> None:
    assert ask(url, "/ten", "POST").headers["allow"] == "GET, HEAD"


def test_heads_and_bodies_are_bounded(url: str) -> None:
    assert ask(url, "/ten", X_Long="x" * 40_000).status == 400
    assert ask(url, "/" + "x" * 40_000).status == 414
    assert ask(url, "/ten", body=b"x" * 100_000).status == 413


def test_slow_clients_are_cut_off(root: Path) -> None:
    with serving(root, client_timeout_s=1) as url:
        for head in (b"GET /ten HT", b"GET /ten HTTP/1.1\r\nHost: x\r\n"):
            began = time.monotonic()
            raw(url, head)
            assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Basic c3Rva2VyOm9wZW4tc2VzYW1lLTAxMjM="}, 200),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "1/"}, 401),
    ],
)
def test_a_token_is_asked_for(guarded: str, given: dict[str, str], status: int) -> None:
    assert ask(guarded, "/ten", **given).status == status
    assert ask(guarded, "/-/stats", **given).status == status
    assert ask(guarded, "/-/healthy", **given).status == 200


@pytest.mark.parametrize(
    "path", ["/-/healthy/../../ten", "/-/healthy%2f..%2f..%2ften", "//ten", "/1/../ten", "/-/%68ealthy/../stats"]
)
def test_no_spelling_goes_past_the_token(guarded: str, path: str) -> None:
    assert ask(guarded, path).status in (400, 401)


@pytest.fixture(scope="module")
def guarded(root: Path) -> Iterator[str]:
    with serving(root, token=TOKEN) as url:
        yield url


def test_a_refusal_says_what_is_wanted(guarded: str) -> None:
    assert ask(guarded, "/ten").headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("name", ['a "b"', "semi; root {", "back\\slash", "it's #1 (é)", "trail\\"])
def test_serves_from_folders_with_odd_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "x").write_bytes(b"here")
    with running(ServeSettings(root=tmp_path / name, host="127.0.0.1", port=0), tmp_path / "prefix" / name) as url:
        assert ask(url, "/x").body == b"here"


class TestWritable:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[tuple[str, Path]]:
        (tmp_path / "root/sub").mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/kept").write_bytes(SECRET)
        (tmp_path / "root/link").symlink_to("../elsewhere")
        with serving(tmp_path / "root", writable=True, max_upload=MIB) as url:
            yield url, tmp_path

    def test_writes_replaces_and_removes_files(self, place: tuple[str, Path]) -> None:
        url, folder = place
        assert ask(url, "/new/er/a%20b", "PUT", b"one").status == 201
        assert ask(url, "/new/er/a%20b", "PUT", b"two").status == 204
        assert (folder / "root/new/er/a b").read_bytes() == b"two"
        assert ask(url, "/new/er/a%20b").body == b"two"
        assert ask(url, "/new/er/a%20b", "DELETE").status == 204
        assert ask(url, "/new/er/a%20b").status == 404

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("PUT", "/link/new"),
            ("PUT", "/link/deep/new"),
            ("DELETE", "/link/kept"),
            ("DELETE", "/sub/"),
            ("DELETE", "/"),
            ("DELETE", "/link/"),
            ("PUT", "/-/stats"),
            ("PUT", "/%2e%2e/elsewhere/new"),
            ("PUT", "/a%0d%0aX-Stoker-Path:%20x"),
            ("MKCOL", "/more/"),
            ("MOVE", "/sub"),
        ],
    )
    def test_nothing_outside_and_no_folder_is_touched(self, place: tuple[str, Path], method: str, path: str) -> None:
        url, folder = place
        before = sorted(folder.rglob("*"))
        assert ask(url, path, method, b"x" if method == "PUT" else None).status in (400, 403, 405)
        assert sorted(folder.rglob("*")) == before

    def test_uploads_are_bounded(self, place: tuple[str, Path]) -> None:
        url, folder = place
        assert ask(url, "/big", "PUT", b"x" * (MIB + 1)).status == 413
        assert not (folder / "root/big").exists()

    def test_nobody_else_can_write_without_a_token(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="needs a token"):
            NginxEngine(ServeSettings(root=tmp_path, host="0.0.0.0", port=0, writable=True)).start()


def test_counts_what_it_served(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOG_LIMIT", 500)  # so that logs change many times meanwhile
    with serving(root) as url:
        for _ in range(200):
            ask(url, "/ten")
        ask(url, "/none")
        until(lambda: stats(url)["requests"] >= 201)
        told = stats(url)
        assert told == told | {"engine": "nginx", "requests": 201, "errors": 0, "hits": 0, "misses": 0}
        assert told["bytes"] == 2000 + len(ask(url, "/none").body)
        assert b"\nstoker_requests_total 20" in ask(url, "/-/metrics").body
        assert ask(url, "/-/stats", "HEAD").body == b""
        assert ask(url, "/-/other").status == 404
        assert ask(url, "/-/guard").status in (403, 404)


def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- cache


def ranged(body: bytes, etag: str = '"1"') -> Callable[[Asked, int], Reply]:
    """Make an origin that answers ranges of one body for every path."""

    def reply(asked: Asked, _: int) -> Reply:
        if asked.headers.get("if-none-match") == etag:
            return Reply(304, headers={"ETag": etag})
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        if match is None:
            return Reply(body=body, headers={"ETag": etag})
        start, end = int(match[1]), min(int(match[2]), len(body) - 1)
        if start > end:
            return Reply(416, headers={"Content-Range": f"bytes */{len(body)}"})
        return Reply(
            206, body[start : end + 1], headers={"ETag": etag, "Content-Range": f"bytes {start}-{end}/{len(body)}"}
        )

    return reply


def test_eight_cold_readers_make_one_request_for_each_slice(tmp_path: Path) -> None:
    plain = ranged(BYTES)

    def slow(asked: Asked, number: int) -> Reply:
        time.sleep(0.1)
        return plain(asked, number)

    with scripted(slow) as origin, caching(tmp_path, origin.url) as url:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(url, "/x"), range(8)))
        assert all(answer.body == BYTES for answer in answers)
        assert sorted(asked.headers["range"] for asked in origin.asked) == sorted(
            f"bytes={start}-{start + MIB - 1}" for start in range(0, len(BYTES), MIB)
        )
        assert ask(url, "/x").headers["x-cache"] == "HIT"
        until(lambda: stats(url)["requests"] == 9)
        told = stats(url)
        slices = len(origin.asked)
        assert told["hits"] + told["misses"] == 9 * slices
        assert told["misses"] >= slices
        assert len(BYTES) < told["origin_bytes"] < len(BYTES) + 4096 * slices
        assert len(BYTES) < told["held_bytes"] <= told["budget"] == 64 * MIB
        assert told["evictions"] is None


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-9", 0, 10),
        (f"bytes={MIB - 5}-{MIB + 4}", MIB - 5, MIB + 5),
        ("bytes=-7", -7, None),
        ("bytes=9-", 9, None),
    ],
)
def test_ranges_of_what_is_cached(tmp_path: Path, asked: str, start: int, end: int | None) -> None:
    with scripted(ranged(BYTES)) as origin, caching(tmp_path, origin.url) as url:
        for _ in range(2):
            answer = ask(url, "/x", Range=asked)
            assert (answer.status, answer.body) == (206, BYTES[start:end])
        assert ask(url, "/x", Range=f"bytes={len(BYTES)}-").status == 416
        assert ask(url, "/x", "HEAD").headers["content-length"] == str(len(BYTES))
        whole = ask(url, "/x", Range="bytes=0-1,5-6")
        assert (whole.status, whole.body) == (200, BYTES)


def test_a_range_pulls_only_the_slices_that_it_touches(tmp_path: Path) -> None:
    with scripted(ranged(BYTES)) as origin, caching(tmp_path, origin.url) as url:
        ask(url, "/x", Range=f"bytes={MIB}-{MIB + 9}")
        assert [asked.headers["range"] for asked in origin.asked] == [f"bytes={MIB}-{2 * MIB - 1}"]


@pytest.mark.parametrize("body", [b"", b"x", BYTES], ids=["empty", "one", "large"])
@pytest.mark.parametrize("path", ["/x", "/a%20b%23%25%3F%C3%A9"])
@pytest.mark.parametrize("resolver", [None, "127.0.0.1"])
@pytest.mark.parametrize("ranges", [True, False])
def test_any_origin_gives_the_right_bytes(
    tmp_path: Path, body: bytes, path: str, resolver: str | None, ranges: bool
) -> None:
    reply = ranged(body) if ranges else lambda *_: Reply(body=body)
    with scripted(reply) as origin, caching(tmp_path, f"{origin.url}/base%20x", resolver=resolver) as url:
        for _ in range(2):
            answer = ask(url, path)
            assert (answer.status, answer.body) == (200, body)
        assert {asked.path for asked in origin.asked} == {f"/base%20x{path}"}


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 502, 503])
def test_errors_are_not_cached(tmp_path: Path, status: int) -> None:
    fine = ranged(BYTES)
    bad = Reply(status, b"no", {"Cache-Control": "max-age=9999", "X-Accel-Expires": "9999"})
    with scripted(lambda asked, n: bad if n == 0 else fine(asked, n)) as origin, caching(tmp_path, origin.url) as url:
        assert ask(url, "/x").status == status
        assert ask(url, "/x").body == BYTES


def test_an_error_in_a_later_slice_breaks_off_and_is_not_cached(tmp_path: Path) -> None:
    fine = ranged(BYTES)
    with (
        scripted(lambda asked, n: Reply(500) if n == 1 else fine(asked, n)) as origin,
        caching(tmp_path, origin.url) as url,
    ):
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(url, "/x")
        assert ask(url, "/x").body == BYTES


def test_a_body_that_breaks_off_is_not_cached(tmp_path: Path) -> None:
    fine = ranged(BYTES)

    def reply(asked: Asked, number: int) -> Reply:
        made = fine(asked, number)
        return made if number else Reply(206, made.body[:-9], made.headers, length=len(made.body))

    with scripted(reply) as origin, caching(tmp_path, origin.url) as url:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(url, "/x")
        assert ask(url, "/x").body == BYTES


def test_a_body_of_unknown_length_is_not_cached(tmp_path: Path) -> None:
    """Its end cannot be told from a connection that broke."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            for body in (b"hal", b"half"):
                with server.accept()[0] as sock:
                    sock.recv(65536)
                    sock.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)

        answered = pool.submit(answer)
        with caching(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}") as url:
            assert [ask(url, "/x").body for _ in range(2)] == [b"hal", b"half"]
        answered.result(5)


def test_what_is_old_is_checked_with_the_origin_and_served_while_that_fails(tmp_path: Path) -> None:
    fine, fails = ranged(b"kept"), [False]
    with (
        scripted(lambda asked, n: Reply(503) if fails[0] else fine(asked, n)) as origin,
        caching(tmp_path, origin.url, valid_s=1) as url,
    ):
        assert ask(url, "/x").headers["x-cache"] == "MISS"
        time.sleep(2.1)
        assert ask(url, "/x").headers["x-cache"] == "REVALIDATED"
        time.sleep(2.1)
        fails[0] = True
        answer = ask(url, "/x")
        assert (answer.status, answer.headers["x-cache"], answer.body) == (200, "STALE", b"kept")
        assert ask(url, "/unknown").status == 503


def test_the_bypass_header_fetches_anew_and_mends_the_cache(tmp_path: Path) -> None:
    with (
        scripted(lambda asked, n: ranged(b"bad!" if n == 0 else b"good")(asked, n)) as origin,
        caching(tmp_path, origin.url) as url,
    ):
        assert [ask(url, "/x").body for _ in range(2)] == [b"bad!", b"bad!"]
        answer = ask(url, "/x", X_Stoker_Bypass="1")
        assert (answer.body, answer.headers["x-cache"]) == (b"good", "BYPASS")
        assert (ask(url, "/x").body, len(origin.asked)) == (b"good", 2)


def test_an_origins_wishes_do_not_count(tmp_path: Path) -> None:
    headers = {"Set-Cookie": "a=b", "Vary": "*", "Cache-Control": "no-store", "Expires": "0", "X-Cache": "theirs"}
    with scripted(lambda *_: Reply(body=b"x", headers=headers)) as origin, caching(tmp_path, origin.url) as url:
        ask(url, "/x")
        answer = ask(url, "/x")
        assert (answer.headers["x-cache"], len(origin.asked)) == ("HIT", 1)
        assert "set-cookie" not in answer.headers


def test_listings_are_asked_for_each_time(tmp_path: Path) -> None:
    with scripted(lambda *_: Reply(body=b"[]")) as origin, caching(tmp_path, origin.url) as url:
        ask(url, "/sub/")
        ask(url, "/sub/")
        assert len(origin.asked) == 2


def test_names_are_not_mixed_up_and_queries_mean_nothing(tmp_path: Path) -> None:
    with (
        scripted(lambda asked, _: Reply(body=asked.path.encode())) as origin,
        caching(tmp_path, f"{origin.url}/1", f"{origin.url}/2") as url,
    ):
        paths = ["/a/x", "/b/x", "/a/x?y", "/a/x%3Fy", "/a/x%20y", "/a/x?%20y", "/a/a/x"]
        for _ in range(2):
            bodies = [ask(url, path).body.decode() for path in paths]
            assert bodies == ["/1/x", "/2/x", "/1/x", "/1/x%3Fy", "/1/x%20y", "/1/x", "/1/a/x"]
        assert ask(url, "/c/x").status == 404
        assert ask(url, "/a").headers["location"] == "/a/"


def test_nothing_personal_reaches_the_origin(tmp_path: Path) -> None:
    with scripted(ranged(b"x")) as origin, caching(tmp_path, origin.url, token=TOKEN) as url:
        ask(url, "/x", Authorization=f"Bearer {TOKEN}", Cookie="a=b", X_Forwarded_For="1.2.3.4", If_None_Match='"z"')
        (asked,) = origin.asked
        assert asked.headers.keys() == {"host", "range", "accept-encoding", "user-agent"}
        assert asked.headers["host"] == urlsplit(origin.url).netloc


def test_only_the_named_origin_is_ever_asked(tmp_path: Path) -> None:
    def lead_away(asked: Asked, _: int) -> Reply:
        if asked.path.startswith("/redirect"):
            return Reply(int(asked.path.rpartition("/")[2]), headers={"Location": f"{victim.url}/r"})
        if asked.path.startswith("/accel"):
            return Reply(body=b"x", headers={"X-Accel-Redirect": "/-/stats"})
        return Reply(404)

    with scripted(ranged(SECRET)) as victim, scripted(lead_away) as origin:
        host = urlsplit(victim.url).netloc
        with caching(tmp_path, f"{origin.url}/base", origin.url) as url:
            for path in ("/x", f"{victim.url}/x", f"//{host}/x", f"/@{host}/x", f"/a/@{host}/x", f"/a//{host}/x"):
                for named in (host, "x", f"x@{host}", urlsplit(origin.url).netloc):
                    head = f"GET {path} HTTP/1.1\r\nHost: {named}\r\nX-Forwarded-Host: {host}\r\n"
                    got = raw(url, f"{head}Connection: close\r\n\r\n".encode())
                    assert re.match(rb"HTTP/1.1 (400|404) ", got), (path, got)
            assert b" 400 " in raw(url, f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            for status in (300, 301, 302, 303, 307, 308):
                answer = ask(url, f"/b/redirect/{status}")
                assert (answer.status, answer.headers.get("location")) == (502, None)
            assert ask(url, "/b/accel").body == b"x"
            for path in traversals()[::2]:
                raw(url, b"GET /a" + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert victim.asked == []
        assert all(".." not in unquote(asked.path).split("/") for asked in origin.asked)


@pytest.mark.parametrize("trusted", [True, False])
def test_https_origins_are_verified(tmp_path: Path, trusted: bool) -> None:
    key, cert = tmp_path / "key", tmp_path / "cert"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        [*made, "-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert], check=True
    )
    (tmp_path / "root").mkdir()
    (tmp_path / "root/x").write_bytes(b"safe")
    port = free_port()
    secure = f"listen 127.0.0.1:{port} ssl; ssl_certificate {cert}; ssl_certificate_key {key};"
    with nginx(tmp_path / "root", directives=secure):
        more = {"ca_file": cert} if trusted else {}
        with caching(tmp_path / "c", f"https://localhost:{port}", **more) as url:
            answer = ask(url, "/x")
            assert (answer.status, answer.body == b"safe") == ((200, True) if trusted else (502, False))


def test_eviction_keeps_near_the_budget(tmp_path: Path) -> None:
    size = 16 * MIB
    with scripted(ranged(BYTES)) as origin, caching(tmp_path, origin.url, size=size) as url:
        for number in range(16):  # of 3 MiB each
            assert ask(url, f"/{number}").body == BYTES
        until(lambda: held(tmp_path) <= size, 30)
        until(lambda: stats(url)["held_bytes"] <= size, 5)
        assert held(tmp_path) > size // 4
        assert ask(url, "/15").body == BYTES


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_restarted_cache_is_warm_and_without_what_was_unfinished(tmp_path: Path) -> None:
    with scripted(ranged(BYTES)) as origin:
        with caching(tmp_path, origin.url) as url:
            ask(url, "/x")
        left = next((tmp_path / "nginx").glob("*/*")) / ("0" * 32 + ".0000000042")
        left.write_bytes(b"half")
        asked = len(origin.asked)
        with caching(tmp_path, origin.url) as url:
            answer = ask(url, "/x")
            assert (answer.headers["x-cache"], answer.body, len(origin.asked)) == ("HIT", BYTES, asked)
            assert not left.exists()


def test_two_caches_do_not_share_a_folder(tmp_path: Path) -> None:
    with caching(tmp_path, "http://127.0.0.1:1"), pytest.raises(ConflictError, match="another cache or server"):
        NginxEngine(
            CacheSettings(origins=(("", "http://127.0.0.1:1"),), dir=tmp_path, size=1 << 30, host="127.0.0.1", port=0)
        ).start()


# --- life and death

SCRIPT = """
import logging, sys
from pathlib import Path
from stoker.serve.nginx.config import ServeSettings
from stoker.serve.nginx.engine import NginxEngine
logging.basicConfig()
root, prefix = Path(sys.argv[1]), Path(sys.argv[2])
def settings():
    token = prefix.with_name("token")
    return ServeSettings(root=root, host="127.0.0.1", port=0, token=token.read_text() if token.exists() else None)
engine = NginxEngine(settings(), prefix, reread=settings)
engine.start()
print(engine.url, flush=True)
engine.wait()
"""


class Supervisor(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    nginx: list[int]


@pytest.fixture
def supervisor(root: Path, tmp_path: Path) -> Iterator[Supervisor]:
    argv = [sys.executable, "-c", SCRIPT, str(root), str(tmp_path / "prefix")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            master = children(process.pid)
            until(lambda: catches(process.pid, signal.SIGHUP))
            yield Supervisor(process, url, master + children(master[0]))
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_hangup_reloads_and_bad_settings_change_nothing(supervisor: Supervisor, tmp_path: Path) -> None:
    process, url, nginx = supervisor
    token = tmp_path / "token"
    assert ask(url, "/ten").status == 200
    token.write_text(TOKEN)
    process.send_signal(signal.SIGHUP)
    until(lambda: ask(url, "/ten").status == 401)
    assert ask(url, "/ten", Authorization=f"Bearer {TOKEN}").status == 200
    token.write_text("two words")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert ask(url, "/ten", Authorization=f"Bearer {TOKEN}").status == 200
    assert lives(nginx[0])
    process.terminate()
    assert "the former settings stay" in process.communicate(timeout=20)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_nginx_outlives_its_supervisor(supervisor: Supervisor, number: signal.Signals) -> None:
    process, url, nginx = supervisor
    assert len(nginx) > 1
    assert ask(url, "/ten").status == 200
    process.send_signal(number)
    assert process.wait(20) == (-number if number == signal.SIGKILL else 0)
    until(lambda: not any(map(lives, nginx)), 5)
    with pytest.raises(ConnectionError):
        ask(url, "/ten")


def test_a_transfer_is_finished_before_the_end(root: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * (32 * MIB))
    engine = NginxEngine(ServeSettings(root=tmp_path, host="127.0.0.1", port=0))
    engine.start()
    where = urlsplit(engine.url)
    with socket.create_connection((where.hostname, where.port)) as sock, ThreadPoolExecutor(1) as pool:
        sock.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        got = len(sock.recv(65536))
        ended = pool.submit(engine.stop)
        while piece := sock.recv(MIB):
            got += len(piece)
        ended.result(20)
    assert got > 32 * MIB


def test_the_death_of_nginx_is_an_error(root: Path) -> None:
    engine = NginxEngine(ServeSettings(root=root, host="127.0.0.1", port=0))
    others = children(os.getpid())
    engine.start()
    (master,) = set(children(os.getpid())) - set(others)
    workers = children(master)
    os.kill(master, signal.SIGKILL)
    with pytest.raises(StokerError, match="nginx ended by itself"):
        engine.wait()
    assert not any(map(lives, [master, *workers]))
    engine.stop()


def test_leaves_no_file_and_no_child_behind(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = children(os.getpid())
    with serving(root) as url:
        assert ask(url, "/ten").status == 200
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []
    assert children(os.getpid()) == others


def test_no_worker_waits_for_a_connection_that_another_took(url: str) -> None:
    """A worker that does would leave its other clients waiting too."""
    with ThreadPoolExecutor(8) as pool:
        assert all(answer.status == 200 for answer in pool.map(lambda _: ask(url, "/ten"), range(400)))


def test_a_taken_port_is_said_at_once(url: str, root: Path) -> None:
    with pytest.raises(UnavailableError, match="is taken"):
        NginxEngine(ServeSettings(root=root, host="127.0.0.1", port=urlsplit(url).port or 0)).start()


def test_what_nginx_refuses_is_one_sentence(tmp_path: Path) -> None:
    settings = CacheSettings(
        origins=(("", "http://no-such-host.invalid"),), dir=tmp_path, size=1 << 30, host="127.0.0.1", port=0
    )
    with pytest.raises(InputError, match=r"nginx refuses these settings: host not found in upstream [^\n]*$") as raised:
        NginxEngine(settings).start()
    assert "nginx.conf" not in str(raised.value)


def test_says_what_is_missing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nginx"
    program.write_text("#!/bin/sh\necho 'configure arguments: --with-http_slice_module' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(InputError, match="without its module dav and auth_request"):
        NginxEngine(ServeSettings(root=root, host="127.0.0.1", port=0, writable=True)).start()
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(MissingProgramError, match="apt-get install nginx"):
        NginxEngine(ServeSettings(root=root, host="127.0.0.1", port=0)).start()
