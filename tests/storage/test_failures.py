"""Failures of the network stores: transient ones are retried, permanent ones raise at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from stoker.errors import AccessDeniedError, InputError, NotFoundError, StokerError, UnavailableError
from stoker.storage import Store, open_store
from stoker.storage.http_client import RETRY_DEADLINE_S
from tests.support.servers import RecordedRequest, Reply, aws_environ, free_port, scripted_server

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
