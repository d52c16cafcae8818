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

from stoker.errors import AccessError, ChangedError, DataFaultError, InputError, NotFoundError, UnavailableError
from stoker.storage import Entry, Store, open_store
from stoker.storage.http import HttpStore
from tests.storage.contract import TEN, Fill, ReadContract
from tests.support.servers import Asked, Reply, as_json, nginx, scripted

TIMES = itertools.count(1_700_000_000)


def fill_folder(folder: Path, url: str, objects: Mapping[str, bytes]) -> Store:
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, (now := next(TIMES), now))  # web servers tell versions apart by whole seconds
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
    """Python's own server ignores ranges, and its index tells no sizes."""

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


def test_reads_an_index_of_apache_and_follows_no_link_out_of_it() -> None:
    def reply(asked: Asked, _: int) -> Reply:
        if asked.path == "/data/":
            return Reply(body=APACHE, headers={"Content-Type": "text/html;charset=UTF-8"})
        return Reply(body=b'<a href="b">b</a>' if asked.path == "/data/sub/" else TEN)

    with scripted(reply) as server:
        entries = list(open_store(f"{server.url}/data").list())
    assert entries == [Entry("a&b c.tar", 10), Entry("absolute.tar", 10), Entry("sub/b", 10)]
    assert {asked.path.split("/")[1] for asked in server.asked} == {"data"}


def test_folders_without_end_are_not_followed_for_ever() -> None:
    index = as_json([{"name": "again", "type": "directory"}])
    with scripted(lambda *_: index) as server, pytest.raises(UnavailableError, match="deeper than 16"):
        list(open_store(server.url).list())


@pytest.mark.parametrize("page", [b"nothing", b'[{"size": 1}]', b"[1]", b"1"])
def test_an_index_that_is_not_nginx_json_is_reported(page: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    wanted = pytest.raises(UnavailableError, match="not one of nginx's")
    with scripted(lambda *_: Reply(body=page, headers=headers)) as server, wanted:
        list(open_store(server.url).list())


def test_a_server_that_lists_nothing_says_how_it_could(folder: Path) -> None:
    with nginx(folder, directives="location / { autoindex off; }") as url:
        with pytest.raises(AccessError, match="autoindex on"):
            list(open_store(url).list())
        with pytest.raises(NotFoundError, match="no index page"):
            list(open_store(f"{url}/absent").list())


def test_is_read_only(tmp_path: Path) -> None:
    store = open_store("http://user:secret@127.0.0.1:1/data?token=secret")
    for change in (lambda: store.put("a", b""), lambda: store.put("a", tmp_path), lambda: store.delete("a")):
        with pytest.raises(InputError, match=r"^http://127\.0\.0\.1:1/data: http stores are read-only; "):
            change()


def test_a_login_and_a_query_go_with_every_request() -> None:
    def reply(asked: Asked, _: int) -> Reply:
        return as_json([{"name": "a b", "type": "file", "size": 1}]) if asked.path[:7] == "/data/?" else Reply()

    with scripted(reply) as server:
        store = open_store(f"{server.url.replace('//', '//me%40x:pa%20ss@')}/data?token=1")
        assert [entry.name for entry in store.list()] == ["a b"]
        store.get("a b")
    assert [asked.path for asked in server.asked] == ["/data/?token=1", "/data/a%20b?token=1"]
    login = "Basic " + b64encode(b"me@x:pa ss").decode()
    assert {asked.headers["authorization"] for asked in server.asked} == {login}


def test_a_refused_login_is_named_without_its_password() -> None:
    with scripted(lambda *_: Reply(401)) as server:
        store = open_store(server.url.replace("//", "//me:secret@"))
        with pytest.raises(AccessError, match="tried the URL's login as 'me'") as caught:
            store.get("a")
    assert "secret" not in str(caught.value)
    assert len(server.asked) == 1


def test_a_range_of_a_server_that_ignores_ranges_is_cut_out() -> None:
    data = bytes(range(256)) * 16384
    with scripted(lambda *_: Reply(body=data)) as server:
        store = open_store(server.url)
        assert store.range("a", (3 << 20) + 7, 1000) == data[(3 << 20) + 7 :][:1000]
        assert store.range("a", 0, 5) == data[:5]


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ("bytes 0-3/10", "the server sent bytes from 0, asked from 2"),
        ("bytes 2-3/10", "the server sent bytes to 3 of 10, asked to 5"),
        ("", "the server does not say which bytes it sent"),
    ],
)
def test_other_bytes_than_were_asked_for_are_not_taken(told: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.storage.http_client.time.sleep", lambda _: None)
    wrong = Reply(206, TEN[:4], {"Content-Range": told} if told else {})
    right = Reply(206, TEN[2:6], {"Content-Range": "bytes 2-5/10"})
    with scripted(lambda _, number: right if number else wrong) as server:
        assert open_store(server.url).range("a", 2, 4) == TEN[2:6]
    with scripted(lambda *_: wrong) as server, pytest.raises(UnavailableError, match=what):
        open_store(server.url).range("a", 2, 4)


def test_a_range_behind_the_end_is_a_fault() -> None:
    short = Reply(206, TEN[8:], {"Content-Range": "bytes 8-9/10"})
    with scripted(lambda *_: short) as server, pytest.raises(DataFaultError, match="wanted 4 bytes from 8, got 2"):
        open_store(server.url).range("a", 8, 4)


def test_a_weak_tag_is_compared_and_not_sent() -> None:
    version = ['W/"1"', '"1"', 'W/"2"']
    headers = {"Content-Range": "bytes 2-5/10"}
    with scripted(lambda _, number: Reply(206, TEN[2:6], headers | {"ETag": version[number]})) as server:
        store = open_store(server.url)
        etag = store.tag("a").etag
        assert store.range("a", 2, 4, etag=etag) == TEN[2:6]
        with pytest.raises(ChangedError):
            store.range("a", 2, 4, etag=etag)
    assert not any("if-match" in asked.headers for asked in server.asked)


def test_a_server_that_refuses_a_version_is_understood() -> None:
    with scripted(lambda *_: Reply(412)) as server, pytest.raises(ChangedError):
        open_store(server.url).range("a", 2, 4, etag='"1"')
    assert [asked.headers["if-match"] for asked in server.asked] == ['"1"']


def test_caches_on_the_way_can_be_passed_by() -> None:
    with scripted(lambda *_: Reply(body=TEN)) as server:
        store = open_store(server.url.replace("//", "//me:secret@"))
        assert isinstance(store, HttpStore)
        store.get("a")
        store.past_caches().get("a")
        store.get("a")
    assert [asked.headers.get("x-stoker-bypass") for asked in server.asked] == [None, "1", None]
    assert all("authorization" in asked.headers for asked in server.asked)


def test_bytes_are_never_decoded() -> None:
    headers = {"Content-Encoding": "gzip"}
    with scripted(lambda *_: Reply(body=b"\x1f\x8b raw", headers=headers)) as server:
        assert open_store(server.url).get("a.tar.gz") == b"\x1f\x8b raw"


def test_redirects_are_followed(folder: Path) -> None:
    (folder / "a").write_bytes(TEN)
    with nginx(folder, directives="location /old/ { rewrite ^/old/(.*)$ /$1 redirect; }") as url:
        store = open_store(f"{url}/old")
        assert (store.get("a"), store.size("a"), store.range("a", 2, 2)) == (TEN, 10, b"23")


def test_a_size_that_is_not_told_is_reported(folder: Path) -> None:
    (folder / "page.html").write_bytes(TEN)
    directives = "location / { ssi on; ssi_types *; }"  # makes nginx answer in chunks
    wanted = pytest.raises(UnavailableError, match="does not tell")
    with nginx(folder, directives=directives) as url, wanted:
        open_store(url).size("page.html")


def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda *_: Reply(body=TEN)) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:secret@"))
        assert open_store("http://example.invalid/data").get("a") == TEN
    assert server.asked[0].path == "http://example.invalid/data/a"
    assert server.asked[0].headers["proxy-authorization"].startswith("Basic ")
