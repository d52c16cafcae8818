"""nginx engine as a cache: slices, revalidation, errors, eviction, and which hosts it requests."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from stoker.errors import ConflictError
from stoker.serve.nginx.config import NginxCacheConfig
from stoker.serve.nginx.engine import NginxEngine
from tests.support.engines import HAS_NGINX
from tests.support.http_requests import send_raw, send_request
from tests.support.nginx_engines import (
    MIB,
    SECRET,
    TOKEN,
    read_stats,
    run_cache,
    traversal_paths,
)
from tests.support.servers import RecordedRequest, Reply, free_port, nginx, scripted_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed")

BYTES = bytes(range(256)) * 4096 * 3 + b"tail"


def serve_ranges(body: bytes, etag: str = '"1"') -> Callable[[RecordedRequest, int], Reply]:
    """Return the script of an origin that serves ranges of one body at every path."""

    def reply(request: RecordedRequest, _: int) -> Reply:
        if request.headers.get("if-none-match") == etag:
            return Reply(304, headers={"ETag": etag})
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if match is None:
            return Reply(body=body, headers={"ETag": etag})
        start, end = int(match[1]), min(int(match[2]), len(body) - 1)
        if start > end:
            return Reply(416, headers={"Content-Range": f"bytes */{len(body)}"})
        return Reply(
            206, body[start : end + 1], headers={"ETag": etag, "Content-Range": f"bytes {start}-{end}/{len(body)}"}
        )

    return reply


def test_concurrent_misses_request_each_slice_once(tmp_path: Path) -> None:
    plain = serve_ranges(BYTES)

    def slow(request: RecordedRequest, number: int) -> Reply:
        time.sleep(0.1)
        return plain(request, number)

    with scripted_server(slow) as origin, run_cache(tmp_path, origin.url) as url:
        with ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(lambda _: send_request(url, "/x"), range(8)))
        assert all(response.body == BYTES for response in responses)
        assert sorted(request.headers["range"] for request in origin.requests) == sorted(
            f"bytes={start}-{start + MIB - 1}" for start in range(0, len(BYTES), MIB)
        )
        assert send_request(url, "/x").headers["x-cache"] == "HIT"
        wait_until(lambda: read_stats(url)["requests"] == 9)
        stats = read_stats(url)
        slices = len(origin.requests)
        assert stats["hits"] + stats["misses"] == 9 * slices
        assert stats["misses"] >= slices
        assert len(BYTES) < stats["origin_bytes"] < len(BYTES) + 4096 * slices
        assert len(BYTES) < stats["held_bytes"] <= stats["budget"] == 64 * MIB
        assert stats["evictions"] is None


@pytest.mark.parametrize(
    ("range_header", "start", "end"),
    [
        ("bytes=0-9", 0, 10),
        (f"bytes={MIB - 5}-{MIB + 4}", MIB - 5, MIB + 5),
        ("bytes=-7", -7, None),
        ("bytes=9-", 9, None),
    ],
)
def test_ranges_of_a_cached_object(tmp_path: Path, range_header: str, start: int, end: int | None) -> None:
    with scripted_server(serve_ranges(BYTES)) as origin, run_cache(tmp_path, origin.url) as url:
        for _ in range(2):
            response = send_request(url, "/x", Range=range_header)
            assert (response.status, response.body) == (206, BYTES[start:end])
        assert send_request(url, "/x", Range=f"bytes={len(BYTES)}-").status == 416
        assert send_request(url, "/x", "HEAD").headers["content-length"] == str(len(BYTES))
        whole = send_request(url, "/x", Range="bytes=0-1,5-6")
        assert (whole.status, whole.body) == (200, BYTES)


def test_range_fetches_only_the_slices_it_overlaps(tmp_path: Path) -> None:
    with scripted_server(serve_ranges(BYTES)) as origin, run_cache(tmp_path, origin.url) as url:
        send_request(url, "/x", Range=f"bytes={MIB}-{MIB + 9}")
        assert [request.headers["range"] for request in origin.requests] == [f"bytes={MIB}-{2 * MIB - 1}"]


@pytest.mark.parametrize("body", [b"", b"x", BYTES], ids=["empty", "one", "large"])
@pytest.mark.parametrize("path", ["/x", "/a%20b%23%25%3F%C3%A9"])
@pytest.mark.parametrize("resolver", [None, "127.0.0.1"])
@pytest.mark.parametrize("ranges", [True, False])
def test_origins_with_and_without_range_support(
    tmp_path: Path, body: bytes, path: str, resolver: str | None, ranges: bool
) -> None:
    reply = serve_ranges(body) if ranges else lambda *_: Reply(body=body)
    with scripted_server(reply) as origin, run_cache(tmp_path, f"{origin.url}/base%20x", resolver=resolver) as url:
        for _ in range(2):
            response = send_request(url, path)
            assert (response.status, response.body) == (200, body)
        assert {request.path for request in origin.requests} == {f"/base%20x{path}"}


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 502, 503])
def test_error_responses_are_not_cached(tmp_path: Path, status: int) -> None:
    serve = serve_ranges(BYTES)
    bad = Reply(status, b"no", {"Cache-Control": "max-age=9999", "X-Accel-Expires": "9999"})
    with (
        scripted_server(lambda request, n: bad if n == 0 else serve(request, n)) as origin,
        run_cache(tmp_path, origin.url) as url,
    ):
        assert send_request(url, "/x").status == status
        assert send_request(url, "/x").body == BYTES


def test_error_in_a_later_slice_truncates_and_is_not_cached(tmp_path: Path) -> None:
    serve = serve_ranges(BYTES)
    with (
        scripted_server(lambda request, n: Reply(500) if n == 1 else serve(request, n)) as origin,
        run_cache(tmp_path, origin.url) as url,
    ):
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            send_request(url, "/x")
        assert send_request(url, "/x").body == BYTES


def test_truncated_body_is_not_cached(tmp_path: Path) -> None:
    serve = serve_ranges(BYTES)

    def reply(request: RecordedRequest, number: int) -> Reply:
        reply = serve(request, number)
        return reply if number else Reply(206, reply.body[:-9], reply.headers, length=len(reply.body))

    with scripted_server(reply) as origin, run_cache(tmp_path, origin.url) as url:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            send_request(url, "/x")
        assert send_request(url, "/x").body == BYTES


def test_body_without_content_length_is_not_cached(tmp_path: Path) -> None:
    """Its end is indistinguishable from a broken connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def respond() -> None:
            for body in (b"hal", b"half"):
                with server.accept()[0] as sock:
                    sock.recv(65536)
                    sock.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body)

        responded = pool.submit(respond)
        with run_cache(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}") as url:
            assert [send_request(url, "/x").body for _ in range(2)] == [b"hal", b"half"]
        responded.result(60)


def test_expired_object_is_revalidated_and_served_stale_if_that_fails(tmp_path: Path) -> None:
    serve, is_down = serve_ranges(b"kept"), [False]
    with (
        scripted_server(lambda request, n: Reply(503) if is_down[0] else serve(request, n)) as origin,
        run_cache(tmp_path, origin.url, revalidate_after_s=1) as url,
    ):
        assert send_request(url, "/x").headers["x-cache"] == "MISS"
        wait_until(lambda: send_request(url, "/x").headers["x-cache"] == "REVALIDATED")
        is_down[0] = True
        wait_until(lambda: send_request(url, "/x").headers["x-cache"] == "STALE")
        response = send_request(url, "/x")
        assert (response.status, response.body) == (200, b"kept")
        assert send_request(url, "/unknown").status == 503


def test_bypass_header_refetches_and_updates_the_cache(tmp_path: Path) -> None:
    with (
        scripted_server(lambda request, n: serve_ranges(b"bad!" if n == 0 else b"good")(request, n)) as origin,
        run_cache(tmp_path, origin.url) as url,
    ):
        assert [send_request(url, "/x").body for _ in range(2)] == [b"bad!", b"bad!"]
        response = send_request(url, "/x", X_Stoker_Bypass="1")
        assert (response.body, response.headers["x-cache"]) == (b"good", "BYPASS")
        assert (send_request(url, "/x").body, len(origin.requests)) == (b"good", 2)


def test_caching_headers_of_the_origin_are_ignored(tmp_path: Path) -> None:
    headers = {"Set-Cookie": "a=b", "Vary": "*", "Cache-Control": "no-store", "Expires": "0", "X-Cache": "theirs"}
    with (
        scripted_server(lambda *_: Reply(body=b"x", headers=headers)) as origin,
        run_cache(tmp_path, origin.url) as url,
    ):
        send_request(url, "/x")
        response = send_request(url, "/x")
        assert (response.headers["x-cache"], len(origin.requests)) == ("HIT", 1)
        assert "set-cookie" not in response.headers


def test_folder_listings_are_not_cached(tmp_path: Path) -> None:
    with scripted_server(lambda *_: Reply(body=b"[]")) as origin, run_cache(tmp_path, origin.url) as url:
        send_request(url, "/sub/")
        send_request(url, "/sub/")
        assert len(origin.requests) == 2


def test_cache_keys_are_unambiguous_and_ignore_queries(tmp_path: Path) -> None:
    with (
        scripted_server(lambda request, _: Reply(body=request.path.encode())) as origin,
        run_cache(tmp_path, f"{origin.url}/1", f"{origin.url}/2") as url,
    ):
        paths = ["/a/x", "/b/x", "/a/x?y", "/a/x%3Fy", "/a/x%20y", "/a/x?%20y", "/a/a/x"]
        for _ in range(2):
            bodies = [send_request(url, path).body.decode() for path in paths]
            assert bodies == ["/1/x", "/2/x", "/1/x", "/1/x%3Fy", "/1/x%20y", "/1/x", "/1/a/x"]
        assert send_request(url, "/c/x").status == 404
        assert send_request(url, "/a").headers["location"] == "/a/"


def test_client_headers_are_not_forwarded(tmp_path: Path) -> None:
    with scripted_server(serve_ranges(b"x")) as origin, run_cache(tmp_path, origin.url, token=TOKEN) as url:
        send_request(
            url, "/x", Authorization=f"Bearer {TOKEN}", Cookie="a=b", X_Forwarded_For="1.2.3.4", If_None_Match='"z"'
        )
        (request,) = origin.requests
        assert request.headers.keys() == {"host", "range", "accept-encoding", "user-agent"}
        assert request.headers["host"] == urlsplit(origin.url).netloc


def test_only_configured_origins_are_requested(tmp_path: Path) -> None:
    def redirect_elsewhere(request: RecordedRequest, _: int) -> Reply:
        if request.path.startswith("/redirect"):
            return Reply(int(request.path.rpartition("/")[2]), headers={"Location": f"{victim.url}/r"})
        if request.path.startswith("/accel"):
            return Reply(body=b"x", headers={"X-Accel-Redirect": "/-/stats"})
        return Reply(404)

    with scripted_server(serve_ranges(SECRET)) as victim, scripted_server(redirect_elsewhere) as origin:
        host = urlsplit(victim.url).netloc
        with run_cache(tmp_path, f"{origin.url}/base", origin.url) as url:
            for path in ("/x", f"{victim.url}/x", f"//{host}/x", f"/@{host}/x", f"/a/@{host}/x", f"/a//{host}/x"):
                for host_header in (host, "x", f"x@{host}", urlsplit(origin.url).netloc):
                    head = f"GET {path} HTTP/1.1\r\nHost: {host_header}\r\nX-Forwarded-Host: {host}\r\n"
                    response = send_raw(url, f"{head}Connection: close\r\n\r\n".encode())
                    assert re.match(rb"HTTP/1.1 (400|404) ", response), (path, response)
            assert b" 400 " in send_raw(url, f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            for status in (300, 301, 302, 303, 307, 308):
                response = send_request(url, f"/b/redirect/{status}")
                assert (response.status, response.headers.get("location")) == (502, None)
            assert send_request(url, "/b/accel").body == b"x"
            for path in traversal_paths()[::2]:
                send_raw(url, b"GET /a" + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert victim.requests == []
        assert all(".." not in unquote(request.path).split("/") for request in origin.requests)


@pytest.mark.parametrize("trusted", [True, False])
def test_https_origins_are_verified(tmp_path: Path, trusted: bool) -> None:
    key, cert = tmp_path / "key", tmp_path / "cert"
    openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        [*openssl, "-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True,
    )
    (tmp_path / "root").mkdir()
    (tmp_path / "root/x").write_bytes(b"safe")
    port = free_port()
    tls = f"listen 127.0.0.1:{port} ssl; ssl_certificate {cert}; ssl_certificate_key {key};"
    with nginx(tmp_path / "root", directives=tls):
        more = {"ca_file": cert} if trusted else {}
        with run_cache(tmp_path / "c", f"https://localhost:{port}", **more) as url:
            response = send_request(url, "/x")
            assert (response.status, response.body == b"safe") == ((200, True) if trusted else (502, False))


def test_eviction_keeps_the_cache_near_its_size(tmp_path: Path) -> None:
    size = 16 * MIB
    with scripted_server(serve_ranges(BYTES)) as origin, run_cache(tmp_path, origin.url, size=size) as url:
        for number in range(16):  # of 3 MiB each
            assert send_request(url, f"/{number}").body == BYTES
        wait_until(lambda: folder_bytes(tmp_path) <= size)
        wait_until(lambda: read_stats(url)["held_bytes"] <= size)
        assert folder_bytes(tmp_path) > size // 4
        assert send_request(url, "/15").body == BYTES


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_restart_keeps_the_cache_and_deletes_temporary_files(tmp_path: Path) -> None:
    with scripted_server(serve_ranges(BYTES)) as origin:
        with run_cache(tmp_path, origin.url) as url:
            send_request(url, "/x")
        temporary = next((tmp_path / "nginx").glob("*/*")) / ("0" * 32 + ".0000000042")
        temporary.write_bytes(b"half")
        requests = len(origin.requests)
        with run_cache(tmp_path, origin.url) as url:
            response = send_request(url, "/x")
            assert (response.headers["x-cache"], response.body, len(origin.requests)) == ("HIT", BYTES, requests)
            assert not temporary.exists()


def test_two_caches_cannot_share_a_folder(tmp_path: Path) -> None:
    with run_cache(tmp_path, "http://127.0.0.1:1"), pytest.raises(ConflictError, match=f"{tmp_path}: .*--dir"):
        NginxEngine(
            NginxCacheConfig(
                origins=(("", "http://127.0.0.1:1"),), dir=tmp_path, size=1 << 30, host="127.0.0.1", port=0
            )
        ).start()
