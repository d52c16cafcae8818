"""Failures of the network stores: transient ones are retried, permanent ones raise at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
from urllib3 import HTTPResponse

from stoker import storage
from stoker.errors import AccessDeniedError, InputError, NotFoundError, StokerError, UnavailableError
from stoker.storage import MAX_GET_BYTES, Store, http_client, open_store
from stoker.storage.http_client import MAX_REDIRECTS, RETRY_DEADLINE_S
from tests.fuzz.hostile_origin import OriginRequest, run_hostile_origin
from tests.support.servers import RecordedRequest, Reply, aws_environ, free_port, json_reply, scripted_server

Open = Callable[[str], Store]


@pytest.fixture(params=["http", "s3", "gs"])
def open_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Open:
    """A function that opens a store of each kind at the URL of a server."""

    def open_at(url: str) -> Store:
        for key, value in (aws_environ(url) | {"STORAGE_EMULATOR_HOST": url}).items():
            monkeypatch.setenv(key, value)
        return open_store(f"{url}/bucket" if request.param == "http" else f"{request.param}://bucket")

    return open_at


@pytest.mark.parametrize("status", [429, 503])
def test_transient_error_status_is_retried(open_at: Open, status: int) -> None:
    with scripted_server(lambda _, number: Reply(status) if number < 2 else Reply(body=b"data")) as server:
        assert open_at(server.url).get("a") == b"data"
    assert len(server.requests) == 3


def test_truncated_response_is_retried(open_at: Open) -> None:
    def reply(request: RecordedRequest, number: int) -> Reply:
        if number == 0:
            return Reply(body=b"da", length=4)
        wants_rest = request.headers.get("range", "").startswith("bytes=2-")  # obstore requests only the missing bytes
        return Reply(206, b"ta", {"Content-Range": "bytes 2-3/4"}) if wants_rest else Reply(body=b"data")

    with scripted_server(reply) as server:
        assert open_at(server.url).get("a") == b"data"
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, AccessDeniedError), (403, AccessDeniedError), (404, NotFoundError), (400, UnavailableError)],
)
def test_permanent_error_status_is_not_retried(open_at: Open, status: int, error: type[StokerError]) -> None:
    with scripted_server(lambda *_: Reply(status)) as server, pytest.raises(error):
        open_at(server.url).get("a")
    assert len(server.requests) == 1


def test_retries_are_bounded(open_at: Open) -> None:
    with scripted_server(lambda *_: Reply(503)) as server, pytest.raises(UnavailableError, match=r"\b503$"):
        open_at(server.url).get("a")
    assert len(server.requests) == 5


def test_unreachable_host_fails_within_the_retry_deadline(open_at: Open) -> None:
    store = open_at(f"http://127.0.0.1:{free_port()}")
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"bucket/a: connection refused \(5 attempts\)$") as caught:
        store.get("a")
    assert time.monotonic() - started < 2 * RETRY_DEADLINE_S
    assert caught.value.__cause__ is not None


def test_silent_server_is_reported_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.storage.http_client.READ_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/bucket"
        with pytest.raises(UnavailableError, match=r"no response within 0\.1 s \(5 attempts\)$"):
            open_store(url).get("a")


@pytest.mark.parametrize("url", ["http://127.0.0.1:port/a", "http://[::1/a"])
def test_invalid_url_is_reported(url: str) -> None:
    with pytest.raises(InputError) as caught:
        open_store(url).get("a")
    assert caught.value.where == url


@pytest.mark.parametrize("length", [100, 500 << 20])
def test_body_longer_than_the_range_is_an_error_of_the_server(open_at: Open, length: int) -> None:
    reply = Reply(206, bytes(100), {"Content-Range": "bytes 0-9/1000"}, length=length)
    with scripted_server(lambda *_: reply) as server:
        with pytest.raises(UnavailableError, match=r"bucket/a: response is longer than 10 bytes"):
            open_at(server.url).range("a", 0, 10)
        assert len(server.requests) == 1


def test_part_of_an_object_is_not_taken_for_the_whole() -> None:
    part = Reply(206, b"da", {"Content-Range": "bytes 0-1/4"})
    with scripted_server(lambda _, number: part if number == 0 else Reply(body=b"data")) as server:
        assert open_store(f"{server.url}/bucket").get("a") == b"data"


def test_object_larger_than_the_limit_is_not_read(open_at: Open) -> None:
    with scripted_server(lambda *_: Reply(body=b"x", length=MAX_GET_BYTES + 1)) as server:
        with pytest.raises(UnavailableError, match="bucket/a"):
            open_at(server.url).get("a")
        assert len(server.requests) == 1


@pytest.mark.parametrize("location", ["http://[::bad", "file:///etc/passwd", "gopher://x/", "//[/"])
def test_invalid_redirect_is_reported(location: str) -> None:
    with scripted_server(lambda *_: Reply(302, headers={"Location": location})) as server:
        with pytest.raises(UnavailableError, match="/a: server redirected to an invalid URL"):
            open_store(f"{server.url}/bucket").get("a")
        assert len(server.requests) == 1


def test_redirects_are_limited() -> None:
    with scripted_server(lambda *_: Reply(302, headers={"Location": "/bucket/a"})) as server:
        with pytest.raises(UnavailableError, match="redirected"):
            open_store(f"{server.url}/bucket").get("a")
        assert len(server.requests) == MAX_REDIRECTS + 1


def test_credentials_are_not_sent_to_the_target_of_a_redirect() -> None:
    with scripted_server(lambda *_: Reply(body=b"data")) as other:
        redirect = Reply(302, headers={"Location": f"{other.url}/a"})
        with scripted_server(lambda request, _: Reply(body=b"own") if request.path == "/own" else redirect) as server:
            url = server.url.replace("://", "://user:password@")
            assert open_store(f"{url}/bucket").get("a") == b"data"
            redirect.headers["Location"] = "/own"
            assert open_store(f"{url}/bucket").get("a") == b"own"
    assert "authorization" not in other.requests[0].headers
    assert all("authorization" in request.headers for request in server.requests)


@pytest.mark.parametrize(
    ("url", "target", "is_same"),
    [
        ("http://host/a", "http://HOST:80/b", True),
        ("https://host:443/a", "https://host/b", True),
        ("http://[::1]/a", "http://[::1]:80/b", True),
        ("http://host/a", "http://host:443/b", False),
        ("http://host/a", "https://host/b", False),
        ("http://host/a", "http://host.example/b", False),
    ],
)
def test_credentials_are_kept_if_only_the_spelling_of_the_port_differs(
    url: str, target: str, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Mapping[str, str]] = []

    def respond(_: str, url: str, *, headers: Mapping[str, str], **__: object) -> HTTPResponse:
        sent.append(headers)
        location = {"Location": target} if len(sent) == 1 else {}
        return HTTPResponse(b"", location, 302 if location else 200, request_url=url)

    client = http_client.HttpClient(url)
    monkeypatch.setattr(client.pool, "urlopen", respond)
    client.request("GET", url, where=url, headers={"Authorization": "Basic x"})
    assert ["Authorization" in headers for headers in sent] == [True, is_same]


@pytest.mark.parametrize("length", ["abc", "-1", "", "9" * 5000])
def test_invalid_content_length_is_reported(length: str) -> None:
    reply = Reply(headers={"Content-Length": length})
    with scripted_server(lambda *_: reply) as server, pytest.raises(UnavailableError, match="Content-Length"):
        open_store(f"{server.url}/bucket").head("a")


def test_repeated_page_of_a_listing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(lambda *_: json_reply({"nextPageToken": "same", "items": []})) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        with pytest.raises(UnavailableError, match="gs://bucket"):
            list(open_store("gs://bucket").list())
        assert len(server.requests) == 2


@pytest.mark.parametrize("size", [None, 7])
def test_listing_that_never_ends_is_reported(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(storage, "MAX_LISTING_REQUESTS", 20)
    monkeypatch.setattr(storage, "MAX_LISTED_OBJECTS", 50)
    rows = [{"name": f"{number}.tar", "type": "file", "size": size} for number in range(9)]
    with scripted_server(lambda *_: json_reply([*rows, {"name": "z", "type": "directory"}])) as server:
        with pytest.raises(UnavailableError, match="listing") as caught:
            list(open_store(f"{server.url}/bucket").list())
        assert caught.value.where == f"{server.url}/bucket"
        assert sum(request.method == "GET" for request in server.requests) <= 21
        assert sum(request.method == "HEAD" for request in server.requests) <= 50


def test_requests_for_sizes_count_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_LISTING_REQUESTS", 2)
    page = "".join(f'<a href="{number}.tar">x</a>' for number in range(5)).encode()

    def respond(request: RecordedRequest, _: int) -> Reply:
        return Reply(body=b"data") if request.path.endswith(".tar") else Reply(body=page)

    with scripted_server(respond) as server:
        assert [entry.size for entry in open_store(f"{server.url}/bucket").list()] == [4] * 5
        monkeypatch.setattr(storage, "MAX_LISTED_OBJECTS", 4)
        with pytest.raises(UnavailableError, match="more than 4 objects"):
            list(open_store(f"{server.url}/bucket").list())


def test_trickling_response_ends_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_client, "RETRIES", 0)

    def trickle(_: OriginRequest) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
        for _ in range(1000):
            time.sleep(0.1)
            yield b"x"

    with run_hostile_origin(trickle) as url:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=r"/bucket/a: response body is slower than 1 KiB/s"):
            open_store(f"{url}/bucket").get("a")
        assert time.monotonic() - started < 30


def test_slow_header_does_not_count_against_the_rate_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "READ_TIMEOUT_S", 2.0)

    def respond(_: OriginRequest) -> Iterator[bytes]:
        time.sleep(1.2)
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
        time.sleep(1.2)
        yield b"data"

    with run_hostile_origin(respond) as url:
        assert open_store(f"{url}/bucket").get("a") == b"data"
