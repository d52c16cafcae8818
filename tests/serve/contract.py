"""Contracts of every engine: subclass `ServerContract` for a data server, `CacheContract` for a cache."""

from __future__ import annotations

import base64
import hashlib
import http.client
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from stoker.serve.cache import slices
from stoker.serve.engines import create_cache, create_server
from stoker.serve.settings import CacheSettings, ServeSettings
from stoker.storage.cache import DiskCache
from stoker.storage.http import HttpStore
from tests.support.disks import small_disk
from tests.support.engines import TOKEN, run_engine
from tests.support.http_origin import DATA, OriginServer, run_origin
from tests.support.http_requests import send_raw, send_request
from tests.support.threads import run_parallel
from tests.support.waiting import wait_until


def traversal_paths() -> list[str]:
    """Return at least 200 encodings of paths outside the root."""
    dots = ["..", "%2e%2e", "%2E.", ".%2e", "%252e%252e", "..%00", "..;", "%c0%ae%c0%ae", "..\\", "%5c..", "..%5c"]
    slashes = ["/", "%2f", "%2F", "\\", "%5c", "//", "/./"]
    paths = []
    for dot, slash, depth in itertools.product(dots, slashes, (1, 2, 6)):
        paths.append("/" + (dot + slash) * depth + "secret.txt")
        if depth == 2:
            paths.append("/train/" + (dot + slash) * 3 + "secret.txt")
    paths += [
        "/%00",
        "/train/%00/../../secret.txt",
        "//etc/passwd",
        "/etc/passwd",
        "/proc/self/environ",
        "/./../secret.txt",
    ]
    paths += ["/leaves", "/leaves/secret.txt", "/leak.txt", "/train/up/secret.txt"]
    return paths


class ServerContract:
    """Contract of a data server; set ENGINE."""

    ENGINE: str

    def start(self, root: Path, *, token: str | None = None, writable: bool = False) -> AbstractContextManager[str]:
        """Serve a folder; the context yields the URL."""
        return run_engine(create_server(ServeSettings(root=root, port=0, token=token, writable=writable), self.ENGINE))

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "root"
        (root / "train" / "index").mkdir(parents=True)
        (root / "train" / "a.tar").write_bytes(DATA)
        (root / "train" / "empty.tar").touch()
        (root / "with space+and%.tar").write_bytes(b"odd")
        (tmp_path / "secret.txt").write_text("the secret")
        (root / "leaves").symlink_to(tmp_path)
        (root / "leak.txt").symlink_to(tmp_path / "secret.txt")
        (root / "train" / "up").symlink_to("../..")
        return root

    @pytest.fixture
    def url(self, root: Path) -> Iterator[str]:
        with self.start(root) as url:
            yield url

    def test_get_whole_file(self, url: str) -> None:
        response = send_request(url, "/train/a.tar")
        assert response.status == 200
        assert response.body == DATA
        assert response.headers["content-length"] == str(len(DATA))
        assert response.headers["accept-ranges"] == "bytes"
        assert "content-encoding" not in response.headers
        assert send_request(url, "/train/empty.tar").body == b""
        assert send_request(url, "/" + quote("with space+and%.tar")).body == b"odd"

    @pytest.mark.parametrize(
        ("text", "start", "end"),
        [
            ("0-9", 0, 10),
            ("100-100", 100, 101),
            ("299990-", 299990, 300000),
            ("-7", 299993, 300000),
            ("0-999999999", 0, 300000),
            ("-999999999", 0, 300000),
        ],
    )
    def test_single_range(self, url: str, text: str, start: int, end: int) -> None:
        response = send_request(url, "/train/a.tar", Range=f"bytes={text}")
        assert response.status == 206
        assert response.body == DATA[start:end]
        assert response.headers["content-range"] == f"bytes {start}-{end - 1}/{len(DATA)}"

    def test_unsatisfiable_and_invalid_ranges(self, url: str) -> None:
        response = send_request(url, "/train/a.tar", Range="bytes=300000-")
        assert response.status == 416
        assert response.headers["content-range"] == f"bytes */{len(DATA)}"
        for text in ("bytes=9-5", "lines=1-2", "bytes=a-b", "bytes=-"):
            assert send_request(url, "/train/a.tar", Range=text).status in (200, 416), text
        multiple = send_request(url, "/train/a.tar", Range="bytes=0-1,5-6")
        assert multiple.status == 200 or multiple.headers["content-type"].startswith("multipart/byteranges")

    def test_head_has_the_headers_of_get_without_a_body(self, url: str) -> None:
        whole, head = send_request(url, "/train/a.tar"), send_request(url, "/train/a.tar", "HEAD")
        assert head.status == 200
        assert head.body == b""
        for name in ("content-length", "etag", "last-modified", "accept-ranges"):
            assert head.headers[name] == whole.headers[name]

    def test_conditional_requests(self, url: str, root: Path) -> None:
        etag = send_request(url, "/train/a.tar").headers["etag"]
        assert send_request(url, "/train/a.tar", If_None_Match=etag).status == 304
        assert send_request(url, "/train/a.tar", If_None_Match=f'"x", {etag}').status == 304
        assert send_request(url, "/train/a.tar", If_None_Match='"x"').body == DATA
        assert send_request(url, "/train/a.tar", If_Match='"x"').status == 412
        assert send_request(url, "/train/a.tar", Range="bytes=0-3", If_Range=etag).status == 206
        assert send_request(url, "/train/a.tar", Range="bytes=0-3", If_Range='"x"').status == 200
        (root / "train" / "a.tar").write_bytes(DATA[:-1])
        os.utime(root / "train" / "a.tar", (1, 1))
        assert send_request(url, "/train/a.tar", If_None_Match=etag).status == 200

    def test_folder_listing_is_json(self, url: str) -> None:
        response = send_request(url, "/train/")
        assert response.status == 200
        assert response.headers["content-type"].startswith("application/json")
        rows = {row["name"]: row for row in json.loads(response.body)}
        assert rows["a.tar"]["size"] == len(DATA)
        assert rows["a.tar"]["type"] == "file"
        assert rows["index"]["type"] == "directory"
        assert send_request(url, "/train").status == 301
        assert send_request(url, "/train").headers["location"].endswith("/train/")

    def test_missing_paths_are_404(self, url: str) -> None:
        for path in ("/nothing", "/train/nothing.tar", "/train/a.tar/", "/train/a.tar/b", "/nothing/"):
            assert send_request(url, path).status == 404, path

    def test_path_traversal_is_rejected(self, url: str) -> None:
        paths = traversal_paths()
        assert len(paths) >= 200
        for path in paths:
            response = send_raw(url, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert b"the secret" not in response, path
            assert b"root:" not in response, path
            status = int(response.split(b" ")[1])
            assert 300 <= status < 500, (path, status)

    def test_unusual_request_targets_are_rejected(self, url: str) -> None:
        for line in (
            b"GET http://127.0.0.1:1/train/a.tar HTTP/1.1",
            b"GET file:///etc/passwd HTTP/1.1",
            b"GET train/a.tar HTTP/1.1",
            b"GET  /train/a.tar HTTP/1.1",
            b"GET /train/a.tar",
            b"CONNECT 127.0.0.1:1 HTTP/1.1",
        ):
            response = send_raw(url, line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"root:" not in response, line
            assert not response.startswith(b"HTTP/1.1 5"), line

    def test_server_is_read_only(self, url: str, root: Path) -> None:
        for method in ("PUT", "DELETE", "POST", "PATCH", "MKCOL"):
            assert send_request(url, "/train/a.tar", method, b"x").status in (403, 405), method
        assert (root / "train" / "a.tar").read_bytes() == DATA
        assert not (root / "new.tar").exists()

    def test_writable_server_accepts_put_and_delete(self, root: Path) -> None:
        with self.start(root, writable=True) as url:
            assert send_request(url, "/new/b.tar", "PUT", DATA).status == 201
            assert (root / "new" / "b.tar").read_bytes() == DATA
            assert send_request(url, "/new/b.tar", "PUT", b"short").status in (200, 201, 204)
            assert send_request(url, "/new/b.tar").body == b"short"
            assert send_request(url, "/leaves/planted.txt", "PUT", b"x").status in range(400, 500)
            assert send_request(url, "/../planted.txt", "PUT", b"x").status in range(400, 500)
            assert not (root.parent / "planted.txt").exists()
            assert send_request(url, "/new/b.tar", "DELETE").status in (200, 204)
            assert send_request(url, "/new/b.tar").status == 404

    @pytest.mark.parametrize(
        ("path", "status"),
        [
            ("/train/a.tar/below", 409),
            ("/train/a.tar/far/below", 409),
            ("/train", 409),
            (f"/{'n' * 300}", 400),
            (f"/train/{'n' * 300}/file", 400),
            (f"/{'n/' * 2500}file", 400),
        ],
    )
    def test_impossible_target_of_a_write_is_explained(self, root: Path, path: str, status: int) -> None:
        with self.start(root, writable=True) as url:
            for method in ("PUT", "DELETE"):
                response = send_request(url, path, method, b"x" if method == "PUT" else None)
                assert response.status == status, method
                assert response.headers["content-type"].startswith("text/plain")
                assert len(response.body.split()) >= 3
            assert send_request(url, "/train/a.tar").body == DATA

    def test_symlink_to_itself_does_not_break_the_listing(self, root: Path) -> None:
        (root / "loop").symlink_to("loop")
        with self.start(root, writable=True) as url:
            listing = send_request(url, "/")
            assert listing.status == 200
            assert "train" in {row["name"] for row in json.loads(listing.body)}
            for path in ("/loop", "/loop/", "/loop/a"):
                assert send_request(url, path).status in (403, 404), path
            assert send_request(url, "/loop/a", "PUT", b"x").status in (403, 404)

    def test_auth_scheme_is_case_insensitive(self, root: Path) -> None:
        basic = base64.b64encode(f"stoker:{TOKEN}".encode()).decode()
        with self.start(root, token=TOKEN) as url:
            for scheme in ("bearer", "BEARER", "Bearer "):
                assert send_request(url, "/train/a.tar", Authorization=f"{scheme} {TOKEN}").body == DATA, scheme
            assert send_request(url, "/train/a.tar", Authorization=f"basic {basic}").body == DATA
            for wrong in (
                f"bearer {TOKEN}x",
                f"basic {TOKEN}",
                f"bearer {TOKEN[:-1]}",
                f"bearer{TOKEN}",
                "bearer",
                TOKEN,
            ):
                assert send_request(url, "/train/a.tar", Authorization=wrong).status == 401, wrong

    def test_token_is_required(self, root: Path) -> None:
        with self.start(root, token=TOKEN) as url:
            assert send_request(url, "/train/a.tar").status == 401
            assert send_request(url, "/train/a.tar", Authorization="Bearer wrong-token-of-twenty-l").status == 401
            assert send_request(url, "/train/a.tar", Authorization=f"Bearer {TOKEN}x").status == 401
            assert send_request(url, "/train/a.tar", Authorization=f"Bearer {TOKEN}").body == DATA
            assert send_request(url, "/-/stats").status == 401
            assert send_request(url, "/-/healthy").status == 200

    def test_oversized_requests_are_rejected(self, url: str) -> None:
        response = send_raw(url, b"GET /train/a.tar HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n")
        assert response.split(b" ")[1] in (b"400", b"431", b"414")
        response = send_raw(url, b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response.split(b" ")[1] in (b"400", b"431", b"414")

    def test_persistent_connection_serves_many_requests(self, url: str) -> None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        for _ in range(5):
            for path, body in (("/train/a.tar", DATA), ("/train/empty.tar", b"")):
                connection.request("GET", path)
                assert connection.getresponse().read() == body
            connection.request("HEAD", "/train/a.tar")
            connection.getresponse().read()
        connection.close()

    def test_requests_and_bytes_are_counted(self, url: str) -> None:
        before = json.loads(send_request(url, "/-/stats").body)
        for _ in range(3):
            send_request(url, "/train/a.tar")
        send_request(url, "/nothing")

        def is_counted() -> bool:
            stats = json.loads(send_request(url, "/-/stats").body)
            return bool(
                stats["requests"] >= before["requests"] + 4 and stats["bytes"] >= before["bytes"] + 3 * len(DATA)
            )

        wait_until(is_counted)
        metrics = send_request(url, "/-/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert b"stoker_requests_total" in metrics.body

    def test_many_concurrent_clients(self, url: str) -> None:
        wrong: list[object] = []

        def read() -> None:
            for _ in range(5):
                response = send_request(url, "/train/a.tar")
                if response.body != DATA:
                    wrong.append(response.status)

        run_parallel([read] * 32)
        assert wrong == []


class CacheContract:
    """Contract of a cache whose origins may misbehave; set ENGINE, and SLICE_BYTES if the engine's differs."""

    ENGINE: str
    SLICE_BYTES = slices.SLICE_BYTES

    def start(
        self,
        origins: dict[str, str],
        folder: Path,
        *,
        size: int = 1 << 30,
        revalidate_after_s: float = 60.0,
        token: str | None = None,
    ) -> AbstractContextManager[str]:
        """Start a cache; the context yields its URL."""
        settings = CacheSettings(
            origins=tuple(origins.items()),
            dir=folder,
            size=size,
            port=0,
            revalidate_after_s=revalidate_after_s,
            token=token,
        )
        return run_engine(create_cache(settings, self.ENGINE))

    @pytest.fixture
    def origin(self) -> Iterator[OriginServer]:
        with run_origin({"/train/a.tar": DATA, "/train/b.tar": DATA[::-1]}) as origin:
            yield origin

    @pytest.fixture
    def url(self, origin: OriginServer, tmp_path: Path) -> Iterator[str]:
        with self.start({"": origin.url}, tmp_path / "cache") as url:
            yield url

    def test_second_read_is_a_hit(self, url: str, origin: OriginServer) -> None:
        first, second = send_request(url, "/train/a.tar"), send_request(url, "/train/a.tar")
        assert first.body == second.body == DATA
        assert (first.headers["x-cache"], second.headers["x-cache"]) == ("MISS", "HIT")
        assert origin.count_gets("/train/a.tar") == 1

    def test_concurrent_misses_share_one_fetch(self, url: str, origin: OriginServer) -> None:
        origin.delay_s = 0.2
        bodies: list[bytes] = []
        run_parallel([lambda: bodies.append(send_request(url, "/train/a.tar").body)] * 8)
        assert bodies == [DATA] * 8
        assert origin.count_gets("/train/a.tar") == 1

    def test_each_slice_of_a_large_object_is_fetched_once(self, origin: OriginServer, tmp_path: Path) -> None:
        large = DATA * (3 * self.SLICE_BYTES // len(DATA) + 1)
        origin.files["/large.tar"] = large
        with self.start({"": origin.url}, tmp_path / "cache") as url:
            bodies: list[bytes] = []
            run_parallel([lambda: bodies.append(send_request(url, "/large.tar").body)] * 8)
            assert all(body == large for body in bodies)
            assert len(bodies) == 8
            ranges = [text for path, text in origin.get_requests if path == "/large.tar"]
            assert len(ranges) == len(set(ranges)) == -(-len(large) // self.SLICE_BYTES)

    def test_range_of_an_uncached_object_fetches_only_its_slice(self, origin: OriginServer, tmp_path: Path) -> None:
        large = DATA * (3 * self.SLICE_BYTES // len(DATA) + 1)
        origin.files["/large.tar"] = large
        with self.start({"": origin.url}, tmp_path / "cache") as url:
            first = self.SLICE_BYTES + 17
            for start in (first, first + 5, first + 1000):
                response = send_request(url, "/large.tar", Range=f"bytes={start}-{start + 99}")
                assert response.status == 206
                assert response.body == large[start : start + 100]
                assert response.headers["content-range"] == f"bytes {start}-{start + 99}/{len(large)}"
            across = send_request(
                url, "/large.tar", Range=f"bytes={2 * self.SLICE_BYTES - 10}-{2 * self.SLICE_BYTES + 9}"
            )
            assert across.body == large[2 * self.SLICE_BYTES - 10 : 2 * self.SLICE_BYTES + 10]
            assert len({text for path, text in origin.get_requests if path == "/large.tar"}) <= 2 + 1
            assert origin.count_gets("/large.tar") <= 2 + 1
            assert send_request(url, "/large.tar", Range="bytes=-9").body == large[-9:]
            beyond = send_request(url, "/large.tar", Range=f"bytes={len(large)}-")
            assert beyond.status == 416 or beyond.body == b""  # nginx responds with an empty 206
            assert send_request(url, "/large.tar").body == large

    def test_conditional_requests_and_head(self, url: str) -> None:
        etag = send_request(url, "/train/a.tar").headers["etag"]
        assert send_request(url, "/train/a.tar", If_None_Match=etag).status == 304
        head = send_request(url, "/train/a.tar", "HEAD")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(DATA)))

    def test_error_responses_are_not_cached(self, url: str, origin: OriginServer) -> None:
        assert send_request(url, "/train/none.tar").status == 404
        origin.files["/train/none.tar"] = b"created later"
        assert send_request(url, "/train/none.tar").body == b"created later"
        for status in (500, 403, 503):
            origin.status = status
            assert send_request(url, "/train/b.tar").status in range(400, 600)
        origin.status = None
        assert send_request(url, "/train/b.tar").body == DATA[::-1]

    def test_truncated_origin_response_is_not_cached(self, url: str, origin: OriginServer) -> None:
        origin.truncate_at = 1000
        try:
            response = send_request(url, "/train/a.tar")
            assert response.status >= 500
        except http.client.IncompleteRead:
            pass
        origin.truncate_at = None
        for _ in range(2):
            assert send_request(url, "/train/a.tar").body == DATA

    def test_short_body_is_not_cached(self, url: str, origin: OriginServer) -> None:
        """The origin sends less than Content-Length, and then closes the connection."""
        origin.corrupt = lambda _, body: body[:-7]
        with suppress(http.client.IncompleteRead, TimeoutError, ConnectionError):
            assert send_request(url, "/train/a.tar").status >= 500
        origin.corrupt = None
        assert send_request(url, "/train/a.tar").body == DATA

    def test_stale_object_is_served_while_the_origin_fails(self, origin: OriginServer, tmp_path: Path) -> None:
        with self.start({"": origin.url}, tmp_path / "cache", revalidate_after_s=0) as url:
            assert send_request(url, "/train/a.tar").body == DATA
            origin.status = 503
            wait_until(lambda: send_request(url, "/train/a.tar").headers["x-cache"] == "STALE")
            assert send_request(url, "/train/a.tar").body == DATA

    def test_new_version_at_the_origin_is_fetched(self, origin: OriginServer, tmp_path: Path) -> None:
        with self.start({"": origin.url}, tmp_path / "cache", revalidate_after_s=0) as url:
            assert send_request(url, "/train/a.tar").body == DATA
            origin.files["/train/a.tar"], origin.version = DATA[:1000], 2
            wait_until(lambda: send_request(url, "/train/a.tar").body == DATA[:1000])

    def test_bypass_header_refetches_from_the_origin(self, url: str, origin: OriginServer) -> None:
        origin.corrupt = lambda _, body: bytes(len(body))
        assert send_request(url, "/train/a.tar").body == bytes(len(DATA))
        origin.corrupt = None
        assert send_request(url, "/train/a.tar", X_Stoker_Bypass="1").body == DATA
        assert send_request(url, "/train/a.tar").body == DATA

    def test_reader_detects_a_wrong_digest_and_bypasses_the_cache(
        self, url: str, origin: OriginServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The origin has no manifest: only the reader knows the digest."""
        origin.corrupt = lambda _, body: bytes(len(body))
        send_request(url, "/train/a.tar")
        origin.corrupt = None
        node = DiskCache(tmp_path / "node", 1 << 30)
        with caplog.at_level("WARNING"):
            cached = node.open(HttpStore(url), "train/a.tar", sha256=hashlib.sha256(DATA).hexdigest())
        assert cached is not None
        with cached:
            assert cached.path.read_bytes() == DATA
        assert re.search(rf"{url}/train/a\.tar: .*sha256.*: a cache on the way ", caplog.text)
        assert send_request(url, "/train/a.tar").body == DATA

    def test_full_disk_never_corrupts_a_response(self, origin: OriginServer, tmp_path: Path) -> None:
        large = DATA * (2 * self.SLICE_BYTES // len(DATA))
        origin.files["/large.tar"] = large
        with small_disk(tmp_path / "disk", 4 << 20) as folder, self.start({"": origin.url}, folder / "cache") as url:
            for path, data in (("/large.tar", large), ("/train/a.tar", DATA), ("/large.tar", large)):
                with suppress(http.client.IncompleteRead, ConnectionError):
                    response = send_request(url, path)
                    assert response.status >= 500 or response.body == data, path
            subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
            for _ in range(2):
                assert send_request(url, "/large.tar").body == large

    def test_cache_survives_a_restart(self, origin: OriginServer, tmp_path: Path) -> None:
        with self.start({"": origin.url}, tmp_path / "cache") as url:
            send_request(url, "/train/a.tar")
        with self.start({"": origin.url}, tmp_path / "cache") as url:
            response = send_request(url, "/train/a.tar")
            assert (response.body, response.headers["x-cache"]) == (DATA, "HIT")
        assert origin.count_gets("/train/a.tar") == 1

    def test_cache_stays_within_its_size(self, origin: OriginServer, tmp_path: Path) -> None:
        size = 8 * self.SLICE_BYTES
        chunk = DATA * (self.SLICE_BYTES // len(DATA))
        origin.files |= {f"/{number}.tar": bytes([number]) + chunk for number in range(16)}
        with self.start({"": origin.url}, tmp_path / "cache", size=size) as url:
            for number in range(16):
                assert send_request(url, f"/{number}.tar").body == bytes([number]) + chunk
            wait_until(lambda: folder_bytes(tmp_path / "cache") <= size + 100_000, 30)
            newest, evicted = send_request(url, "/15.tar"), send_request(url, "/0.tar")
            assert newest.headers["x-cache"] == "HIT"
            assert evicted.headers["x-cache"] == "MISS"

    def test_multiple_origins_by_name(self, origin: OriginServer, tmp_path: Path) -> None:
        with (
            run_origin({"/deep/x.tar": b"other"}) as other,
            self.start({"near": origin.url, "other": f"{other.url}/deep"}, tmp_path / "cache") as url,
        ):
            assert send_request(url, "/near/train/a.tar").body == DATA
            assert send_request(url, "/other/x.tar").body == b"other"
            assert send_request(url, "/other/../near/train/a.tar").status in (200, 400, 404)
            for path in ("/", "/x.tar", "/origin/x.tar", "/near"):
                assert send_request(url, path).status in range(300, 500), path
            origins = {row["name"]: row["url"] for row in json.loads(send_request(url, "/-/origins").body)}
            assert origins == {"near": origin.url, "other": f"{other.url}/deep"}

    def test_no_request_reaches_another_host(self, origin: OriginServer, tmp_path: Path) -> None:
        with run_origin({"/train/a.tar": b"the secret", "/secret": b"the secret"}) as inner:
            host = inner.url.removeprefix("http://")
            with self.start({"": origin.url}, tmp_path / "cache") as url:
                requests = [
                    f"GET {inner.url}/secret HTTP/1.1\r\nHost: {host}",
                    f"GET /secret HTTP/1.1\r\nHost: {host}",
                    f"GET //{host}/secret HTTP/1.1\r\nHost: x",
                    f"GET /@{host}/secret HTTP/1.1\r\nHost: x",
                    f"GET /%2f%2f{host}/secret HTTP/1.1\r\nHost: x",
                    f"GET /http://{host}/secret HTTP/1.1\r\nHost: x",
                    f"GET /..%2f..%2f{host}/secret HTTP/1.1\r\nHost: x",
                    f"GET /train/a.tar?x=http://{host}/ HTTP/1.1\r\nHost: {host}\r\nX-Forwarded-Host: {host}",
                    f"GET /%0d%0aHost:%20{host}/secret HTTP/1.1\r\nHost: x",
                    f"CONNECT {host} HTTP/1.1\r\nHost: {host}",
                ]
                requests += [f"GET {path} HTTP/1.1\r\nHost: {host}" for path in traversal_paths()]
                for request in requests:
                    assert b"the secret" not in send_raw(url, f"{request}\r\nConnection: close\r\n\r\n".encode())
                origin.redirect = f"{inner.url}/secret"
                response = send_request(url, "/train/redirected.tar")
                assert response.status in range(400, 600)
                assert b"the secret" not in response.body
                origin.redirect = None
            assert inner.get_requests == []
            assert inner.head_requests == []
            assert set(origin.host_headers) == {origin.url.removeprefix("http://")}

    def test_cache_is_read_only_and_requires_the_token(self, origin: OriginServer, tmp_path: Path) -> None:
        with self.start({"": origin.url}, tmp_path / "cache", token=TOKEN) as url:
            assert send_request(url, "/train/a.tar").status == 401
            assert send_request(url, "/train/a.tar", Authorization=f"Bearer {TOKEN}").body == DATA
            assert send_request(url, "/train/a.tar", "PUT", b"x", Authorization=f"Bearer {TOKEN}").status in (403, 405)

    def test_hits_and_misses_are_counted(self, url: str) -> None:
        for _ in range(3):
            send_request(url, "/train/a.tar")

        def is_counted() -> bool:
            stats = json.loads(send_request(url, "/-/stats").body)
            return bool(stats["hits"] == 2 and stats["misses"] == 1 and stats["bytes"] >= 3 * len(DATA))

        wait_until(is_counted)
        assert b"stoker_hits_total 2" in send_request(url, "/-/metrics").body


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; files deleted meanwhile do not count."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(f"{where}/{name}").st_size
    return total
