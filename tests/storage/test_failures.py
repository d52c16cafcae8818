"""How the stores behind a network fail: again where that may help, else at once and in one sentence."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from stoker.errors import AccessError, InputError, NotFoundError, StokerError, UnavailableError
from stoker.storage import Store, open_store
from tests.support.servers import Asked, Reply, aws_environ, free_port, scripted

Open = Callable[[str], Store]


@pytest.fixture(params=["http", "s3", "gs"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open a store of each kind at the URL of a server."""

    def opened(url: str) -> Store:
        for key, value in (aws_environ(url) | {"STORAGE_EMULATOR_HOST": url}).items():
            monkeypatch.setenv(key, value)
        return open_store(f"{url}/bucket" if request.param == "http" else f"{request.param}://bucket")

    return opened


@pytest.mark.parametrize("status", [429, 503])
def test_a_passing_trouble_is_tried_again(opened: Open, status: int) -> None:
    with scripted(lambda _, number: Reply(status) if number < 2 else Reply(body=b"data")) as server:
        assert opened(server.url).get("a") == b"data"
    assert len(server.asked) == 3


def test_a_broken_answer_is_tried_again(opened: Open) -> None:
    def reply(asked: Asked, number: int) -> Reply:
        if number == 0:
            return Reply(body=b"da", length=4)
        asked_rest = asked.headers.get("range", "").startswith("bytes=2-")  # obstore asks only for what is missing
        return Reply(206, b"ta", {"Content-Range": "bytes 2-3/4"}) if asked_rest else Reply(body=b"data")

    with scripted(reply) as server:
        assert opened(server.url).get("a") == b"data"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, AccessError), (403, AccessError), (404, NotFoundError), (400, UnavailableError)],
)
def test_an_answer_that_will_not_change_is_asked_once(opened: Open, status: int, error: type[StokerError]) -> None:
    with scripted(lambda *_: Reply(status)) as server, pytest.raises(error):
        opened(server.url).get("a")
    assert len(server.asked) == 1


def test_a_lasting_trouble_is_given_up(opened: Open) -> None:
    wanted = pytest.raises(UnavailableError, match=r"the server answered 503$")
    with scripted(lambda *_: Reply(503)) as server, wanted:
        opened(server.url).get("a")
    assert len(server.asked) == 5


def test_a_host_that_is_not_there_fails_in_seconds(opened: Open) -> None:
    store = opened(f"http://127.0.0.1:{free_port()}")
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"bucket/a: the server does not answer; tried 5 times$") as caught:
        store.get("a")
    assert time.monotonic() - began < 10
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("url", ["http://127.0.0.1:port/a", "http://[::1/a"])
def test_what_is_no_url_is_reported(url: str) -> None:
    with pytest.raises(InputError, match="is not a URL"):
        open_store(url).get("a")
