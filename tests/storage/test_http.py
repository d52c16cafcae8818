"""HTTP store: the read contract behind three servers, index pages, ranges and validators."""

from __future__ import annotations

import itertools
import os
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stoker.errors import (
    AccessDeniedError,
    InputError,
    NotFoundError,
    ObjectChangedError,
    UnavailableError,
    VerificationError,
)
from stoker.storage import Entry, Store, open_store
from stoker.storage.http import HttpStore
from tests.storage.contract import TEN, Fill, ReadContract
from tests.support.servers import RecordedRequest, Reply, json_reply, nginx, scripted_server

TIMES = itertools.count(1_700_000_000)


def fill_folder(folder: Path, url: str, objects: Mapping[str, bytes]) -> Store:
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, (now := next(TIMES), now))  # web servers derive validators from whole seconds
    return open_store(url)


class TestNginxJson(ReadContract):
    @pytest.fixture
    def fill(self, folder: Path) -> Iterator[Fill]:
        with nginx(folder.parent, index="json") as url:
            yield partial(fill_folder, folder, f"{url}/folder")


class TestNginxHtml(ReadContract):
    @pytest.fixture
    def fill(self, folder: Path) -> Iterator[Fill]:
        with nginx(folder, index="html") as url:
            yield partial(fill_folder, folder, url)


class TestPython(ReadContract):
    """http.server ignores Range, and its index pages list no sizes."""

    @pytest.fixture
    def fill(self, folder: Path) -> Iterator[Fill]:
        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield partial(fill_folder, folder, f"http://127.0.0.1:{server.server_address[1]}/")
            server.shutdown()
            thread.join()


APACHE = b"""<html><head><title>Index of /data</title></head><body><table>
<tr><th><a href="?C=N;O=D">Name</a></th><th><a href="?C=S;O=A">Size</a></th></tr>
<tr><td><a href="/">Parent Directory</a></td><td>-</td></tr>
<tr><td><a href="a&amp;b%20c.tar">a&amp;b c.tar</a></td><td>1.2K</td></tr>
<tr><td><a href="sub/">sub/</a></td><td>-</td></tr>
<tr><td><a href="/data/absolute.tar">absolute.tar</a></td><td>3</td></tr>
<tr><td><a href="/other/x.tar">x</a><a href="http://example.invalid/data/y.tar">y</a></td></tr>
<tr><td><a href="../z.tar">z</a><a href="%2e%2e%2fz.tar">z</a><a href="sub/deep.tar">deep</a></td></tr>
<tr><td><a name="anchor">no link</a><a href="#top">top</a><a href="mailto:a@b">mail</a></td></tr>
</table></body></html>"""


def test_apache_index_page_links_outside_the_folder_are_ignored() -> None:
    def reply(request: RecordedRequest, _: int) -> Reply:
        if request.path == "/data/":
            return Reply(body=APACHE, headers={"Content-Type": "text/html;charset=UTF-8"})
        return Reply(body=b'<a href="b">b</a>' if request.path == "/data/sub/" else TEN)

    with scripted_server(reply) as server:
        entries = list(open_store(f"{server.url}/data").list())
    assert entries == [Entry("a&b c.tar", 10), Entry("absolute.tar", 10), Entry("sub/b", 10)]
    assert {request.path.split("/")[1] for request in server.requests} == {"data"}


def test_folder_depth_is_bounded() -> None:
    index = json_reply([{"name": "again", "type": "directory"}])
    with scripted_server(lambda *_: index) as server, pytest.raises(UnavailableError, match=r"\b16\b"):
        list(open_store(server.url).list())


@pytest.mark.parametrize("page", [b"nothing", b'[{"size": 1}]', b"[1]", b"1"])
def test_invalid_json_index_page_is_reported(page: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    with scripted_server(lambda *_: Reply(body=page, headers=headers)) as server:
        with pytest.raises(UnavailableError, match="nginx") as caught:
            list(open_store(server.url).list())
        assert caught.value.where == f"{server.url}/"


@pytest.mark.parametrize("suffix", [".tar", "/"])
def test_error_for_a_listed_file_is_short_however_long_its_name(suffix: str) -> None:
    page = f'<a href="{"[" * 5000}{suffix}">x</a>'.encode()
    with scripted_server(lambda request, _: Reply(body=page) if request.path == "/bucket/" else Reply(418)) as server:
        with pytest.raises(UnavailableError, match="418") as caught:
            list(open_store(f"{server.url}/bucket/").list())
        assert caught.value.where.startswith(f"{server.url}/bucket/%5B")
        assert len(str(caught.value)) < 500


def test_missing_index_page_hints_at_autoindex(folder: Path) -> None:
    with nginx(folder, directives="location / { autoindex off; }") as url:
        with pytest.raises(AccessDeniedError, match="autoindex on"):
            list(open_store(url).list())
        with pytest.raises(NotFoundError, match=r"no such directory, or .*does not list") as caught:
            list(open_store(f"{url}/absent").list())
        assert caught.value.where == f"{url}/absent/"


def test_http_store_is_read_only(tmp_path: Path) -> None:
    store = open_store("http://user:secret@127.0.0.1:1/data?token=secret")
    for change in (lambda: store.put("a", b""), lambda: store.put("a", tmp_path), lambda: store.delete("a")):
        with pytest.raises(InputError, match=r"^http://127\.0\.0\.1:1/data: .*read-only; "):
            change()


def test_credentials_and_query_are_sent_with_every_request() -> None:
    def reply(request: RecordedRequest, _: int) -> Reply:
        return json_reply([{"name": "a b", "type": "file", "size": 1}]) if request.path[:7] == "/data/?" else Reply()

    with scripted_server(reply) as server:
        store = open_store(f"{server.url.replace('//', '//me%40x:pa%20ss@')}/data?token=1")
        assert [entry.name for entry in store.list()] == ["a b"]
        store.get("a b")
    assert [request.path for request in server.requests] == ["/data/?token=1", "/data/a%20b?token=1"]
    expected = "Basic " + b64encode(b"me@x:pa ss").decode()
    assert {request.headers["authorization"] for request in server.requests} == {expected}


def test_rejected_user_is_named_without_the_password() -> None:
    with scripted_server(lambda *_: Reply(401)) as server:
        store = open_store(server.url.replace("//", "//me:secret@"))
        with pytest.raises(AccessDeniedError, match="'me'") as caught:
            store.get("a")
    assert "secret" not in str(caught.value)
    assert len(server.requests) == 1


def test_range_from_a_server_without_range_support() -> None:
    data = bytes(range(256)) * 16384
    with scripted_server(lambda *_: Reply(body=data)) as server:
        store = open_store(server.url)
        assert store.range("a", (3 << 20) + 7, 1000) == data[(3 << 20) + 7 :][:1000]
        assert store.range("a", 0, 5) == data[:5]


@pytest.mark.parametrize(
    ("content_range", "message"),
    [
        ("bytes 0-3/10", r"from 0, .*from 2\b"),
        ("bytes 2-3/10", r"to 3 of 10, .*to 5\b"),
        ("", r"Content-Range, .*from 2\b"),
    ],
)
def test_wrong_content_range_is_retried_then_reported(
    content_range: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.storage.http_client.time.sleep", lambda _: None)
    wrong = Reply(206, TEN[:4], {"Content-Range": content_range} if content_range else {})
    right = Reply(206, TEN[2:6], {"Content-Range": "bytes 2-5/10"})
    with scripted_server(lambda _, number: right if number else wrong) as server:
        assert open_store(server.url).range("a", 2, 4) == TEN[2:6]
    with scripted_server(lambda *_: wrong) as server, pytest.raises(UnavailableError, match=message):
        open_store(server.url).range("a", 2, 4)


def test_range_past_the_end_raises_data_fault() -> None:
    short = Reply(206, TEN[8:], {"Content-Range": "bytes 8-9/10"})
    with scripted_server(lambda *_: short) as server, pytest.raises(VerificationError, match=r"\b4 .*\b8\b.*\b2$"):
        open_store(server.url).range("a", 8, 4)


def test_weak_etag_is_compared_but_not_sent_in_if_match() -> None:
    version = ['W/"1"', '"1"', 'W/"2"']
    headers = {"Content-Range": "bytes 2-5/10"}
    with scripted_server(lambda _, number: Reply(206, TEN[2:6], headers | {"ETag": version[number]})) as server:
        store = open_store(server.url)
        etag = store.head("a").etag
        assert store.range("a", 2, 4, etag=etag) == TEN[2:6]
        with pytest.raises(ObjectChangedError):
            store.range("a", 2, 4, etag=etag)
    assert not any("if-match" in request.headers for request in server.requests)


def test_precondition_failed_raises_changed_error() -> None:
    with scripted_server(lambda *_: Reply(412)) as server, pytest.raises(ObjectChangedError):
        open_store(server.url).range("a", 2, 4, etag='"1"')
    assert [request.headers["if-match"] for request in server.requests] == ['"1"']


def test_bypassing_caches_sends_the_bypass_header() -> None:
    with scripted_server(lambda *_: Reply(body=TEN)) as server:
        store = open_store(server.url.replace("//", "//me:secret@"))
        assert isinstance(store, HttpStore)
        store.get("a")
        store.bypassing_caches().get("a")
        store.get("a")
    assert [request.headers.get("x-stoker-bypass") for request in server.requests] == [None, "1", None]
    assert all("authorization" in request.headers for request in server.requests)


def test_content_encoding_is_not_decoded() -> None:
    headers = {"Content-Encoding": "gzip"}
    with scripted_server(lambda *_: Reply(body=b"\x1f\x8b raw", headers=headers)) as server:
        assert open_store(server.url).get("a.tar.gz") == b"\x1f\x8b raw"


def test_redirects_are_followed(folder: Path) -> None:
    (folder / "a").write_bytes(TEN)
    with nginx(folder, directives="location /old/ { rewrite ^/old/(.*)$ /$1 redirect; }") as url:
        store = open_store(f"{url}/old")
        assert (store.get("a"), store.size("a"), store.range("a", 2, 2)) == (TEN, 10, b"23")


def test_missing_content_length_is_reported(folder: Path) -> None:
    (folder / "page.html").write_bytes(TEN)
    directives = "location / { ssi on; ssi_types *; }"  # makes nginx send a chunked response
    with nginx(folder, directives=directives) as url, pytest.raises(UnavailableError, match="Content-Length"):
        open_store(url).size("page.html")


def test_proxy_from_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(lambda *_: Reply(body=TEN)) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:secret@"))
        assert open_store("http://example.invalid/data").get("a") == TEN
    assert server.requests[0].path == "http://example.invalid/data/a"
    assert server.requests[0].headers["proxy-authorization"].startswith("Basic ")
