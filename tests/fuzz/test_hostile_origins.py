"""Hostile origins: web servers and buckets that send too much, too little, too slowly, or nonsense.

Storage readers raise a StokerError, the caching proxy answers with an error, and neither uses much memory or time.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from http.client import IncompleteRead
from pathlib import Path
from typing import cast

import pytest

from stoker import storage
from stoker.errors import StokerError
from stoker.storage import Store, http_client, open_store, s3
from tests.fuzz.hostile_origin import OriginRequest, Respond, run_hostile_origin
from tests.fuzz.mutation import mutate
from tests.fuzz.resources import fixed_seeds, fresh_seeds, limited_resources
from tests.support.engines import run_cache
from tests.support.http_requests import send_request
from tests.support.servers import aws_environ

TIMEOUT_S = 0.25
MAX_SECONDS = 30.0
"""How long an operation may take, with all its requests and on a busy machine."""
FLOOD_CHUNK = bytes(1 << 20)
FLOOD_CHUNKS = 500
SIZE = 1000
MAX_MESSAGE_LENGTH = 500
OBJECT_HEADERS = b'ETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n'


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "READ_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(http_client, "RETRIES", 0)
    monkeypatch.setattr(storage, "MAX_LISTING_REQUESTS", 100)
    monkeypatch.setattr(storage, "MAX_LISTED_OBJECTS", 20_000)
    monkeypatch.setattr(s3, "METADATA_TIMEOUT_S", 3 * TIMEOUT_S)
    monkeypatch.setattr(s3, "FOLDER_TIMEOUT_S", 3 * TIMEOUT_S)
    monkeypatch.setattr(s3, "_BODY_TIMEOUT", timedelta(seconds=4 * TIMEOUT_S))
    monkeypatch.setitem(s3._CLIENT, "read_timeout", timedelta(seconds=TIMEOUT_S))
    monkeypatch.setitem(s3._RETRY, "max_retries", 0)


def head(status: str = "200 OK", *headers: str) -> bytes:
    return f"HTTP/1.1 {status}\r\n".encode() + OBJECT_HEADERS + "".join(f"{line}\r\n" for line in headers).encode()


def start(request: OriginRequest, *headers: str) -> bytes:
    """Return the header of a valid response to a request for an object of SIZE bytes."""
    if request.range is None:
        return head("200 OK", *headers)
    first, length = request.range
    return head("206 Partial Content", f"Content-Range: bytes {first}-{first + length - 1}/{SIZE}", *headers)


def body_length(request: OriginRequest) -> int:
    return SIZE if request.range is None else request.range[1]


def flood() -> Iterator[bytes]:
    return itertools.repeat(FLOOD_CHUNK, FLOOD_CHUNKS)


def answer_head(respond: Respond) -> Respond:
    """Answer HEAD requests and metadata of buckets correctly, so that an attack on the body is reached."""

    def answer(request: OriginRequest) -> Iterator[bytes]:
        if request.method == "HEAD":
            yield head("200 OK", f"Content-Length: {SIZE}") + b"\r\n"
        elif "fields=size" in request.path:
            text = json.dumps({"size": str(SIZE), "generation": "1"})
            yield head("200 OK", f"Content-Length: {len(text)}") + b"\r\n" + text.encode()
        else:
            yield from respond(request)

    return answer


def long_declared_body(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, f"Content-Length: {len(FLOOD_CHUNK) * FLOOD_CHUNKS}") + b"\r\n"
    yield from flood()


def body_goes_on(request: OriginRequest) -> Iterator[bytes]:
    yield start(request) + b"\r\n" + bytes(body_length(request))
    yield from flood()


def body_goes_on_after_its_length(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, f"Content-Length: {body_length(request)}") + b"\r\n" + bytes(body_length(request))
    yield from flood()


def chunks_go_on(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Transfer-Encoding: chunked") + b"\r\n"
    for chunk in flood():
        yield b"%x\r\n%b\r\n" % (len(chunk), chunk)


def tiny_chunks(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Transfer-Encoding: chunked") + b"\r\n"
    yield from itertools.repeat(b"1\r\nx\r\n" * 100_000, FLOOD_CHUNKS)


def negative_chunk(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Transfer-Encoding: chunked") + b"\r\n-1\r\n"
    yield from flood()


def large_negative_chunk(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Transfer-Encoding: chunked") + b"\r\n-92233720368547758075\r\nhello\r\n0\r\n\r\n"


def invalid_chunk(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Transfer-Encoding: chunked") + b"\r\nzz\r\n" + bytes(100)


def long_chunk_extension(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Transfer-Encoding: chunked") + b"\r\n5;"
    yield from flood()


def endless_trailers(request: OriginRequest) -> Iterator[bytes]:
    length = body_length(request)
    yield start(request, "Transfer-Encoding: chunked") + b"\r\n%x\r\n%b\r\n0\r\n" % (length, bytes(length))
    yield from itertools.repeat(b"A: b\r\n" * 100_000, FLOOD_CHUNKS)


@cache
def make_gzip_bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(FLOOD_CHUNK) for _ in range(FLOOD_CHUNKS)), packer.flush()])


def gzip_bomb(request: OriginRequest) -> Iterator[bytes]:
    bomb = make_gzip_bomb()
    yield start(request, "Content-Encoding: gzip", f"Content-Length: {len(bomb)}") + b"\r\n" + bomb


def header_flood(_: OriginRequest) -> Iterator[bytes]:
    yield head()
    yield from itertools.repeat(b"A: b\r\n" * 100_000, FLOOD_CHUNKS)


def long_header(_: OriginRequest) -> Iterator[bytes]:
    yield head() + b"A: "
    yield from itertools.repeat(b"a" * len(FLOOD_CHUNK), FLOOD_CHUNKS)


def endless_interim_responses(_: OriginRequest) -> Iterator[bytes]:
    yield from itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, FLOOD_CHUNKS)


def no_http(_: OriginRequest) -> Iterator[bytes]:
    yield b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(range(256)) * 16


def nothing(_: OriginRequest) -> Iterator[bytes]:
    yield b""


def invalid_length(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Content-Length: abc") + b"\r\n"


def negative_length(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Content-Length: -1") + b"\r\n"


def long_length(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, f"Content-Length: {'9' * 5000}") + b"\r\n"


def two_lengths(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, "Content-Length: 5", "Content-Length: 7") + b"\r\nhello"


def date_in_the_far_future(request: OriginRequest) -> Iterator[bytes]:
    header = start(request, f"Content-Length: {body_length(request)}").replace(b"2026", b"20026")
    yield header + b"\r\n" + bytes(body_length(request))


def short_body(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, f"Content-Length: {body_length(request)}") + b"\r\nshort"


def no_content_range(request: OriginRequest) -> Iterator[bytes]:
    yield head("206 Partial Content", f"Content-Length: {body_length(request)}") + b"\r\n" + bytes(body_length(request))


def long_content_range(request: OriginRequest) -> Iterator[bytes]:
    length, digits = body_length(request), "9" * 5000
    header = head("206 Partial Content", f"Content-Range: bytes 0-{digits}/{digits}", f"Content-Length: {length}")
    yield header + b"\r\n" + bytes(length)


def backward_content_range(request: OriginRequest) -> Iterator[bytes]:
    yield head("206 Partial Content", "Content-Range: bytes 9-0/5", "Content-Length: 5") + b"\r\nhello"


def invalid_redirect(_: OriginRequest) -> Iterator[bytes]:
    yield head("302 Found", "Location: http://[::bad", "Content-Length: 0") + b"\r\n"


def redirect_to_a_file(_: OriginRequest) -> Iterator[bytes]:
    yield head("302 Found", "Location: file:///etc/passwd", "Content-Length: 0") + b"\r\n"


def redirect_loop(request: OriginRequest) -> Iterator[bytes]:
    yield head("302 Found", f"Location: {request.path}", "Content-Length: 0") + b"\r\n"


def long_redirect_body(request: OriginRequest) -> Iterator[bytes]:
    yield head("302 Found", f"Location: {request.path}") + b"\r\n"
    yield from flood()


def long_error_body(_: OriginRequest) -> Iterator[bytes]:
    yield head("404 Not Found") + b"\r\n"
    yield from flood()


def stall_before_the_header(_: OriginRequest) -> Iterator[bytes]:
    time.sleep(20 * TIMEOUT_S)
    yield b""


def stall_in_the_body(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, f"Content-Length: {body_length(request)}") + b"\r\nhello"
    time.sleep(20 * TIMEOUT_S)


def trickling_header(_: OriginRequest) -> Iterator[bytes]:
    yield head()
    for _ in range(100):
        time.sleep(TIMEOUT_S / 2)
        yield b"A: b\r\n"


def trickling_body(request: OriginRequest) -> Iterator[bytes]:
    yield start(request, f"Content-Length: {body_length(request)}") + b"\r\n"
    for _ in range(100):
        time.sleep(TIMEOUT_S / 2)
        yield b"x"


def page(content: bytes, kind: str = "application/json") -> bytes:
    return head("200 OK", f"Content-Type: {kind}", f"Content-Length: {len(content)}") + b"\r\n" + content


def nested_json(_: OriginRequest) -> Iterator[bytes]:
    yield page(b'{"items":' + b"[" * 1_000_000)


def wrong_json(_: OriginRequest) -> Iterator[bytes]:
    yield page(b'[{"name":7,"type":"file"},{"name":"a","size":"x"},{"name":"\\ud800"},null]')


def broken_xml(_: OriginRequest) -> Iterator[bytes]:
    yield page(b"<ListBucketResult><IsTrunc\n\n\x1b[31m" + b"x" * 100_000 + b"</ListBucketResult>", "application/xml")


def endless_pages(request: OriginRequest) -> Iterator[bytes]:
    """Send a tree of millions of folders; or pages of a bucket, each with a new token."""
    depth = request.path.count("/")
    if "list-type" in request.path:
        yield s3_page(token=str(time.monotonic_ns()))
    elif "/storage/v1/" in request.path:
        yield page(json.dumps({"nextPageToken": str(time.monotonic_ns()), "items": []}).encode())
    else:
        names = [str(number) for number in range(50)] if depth < 5 else []
        yield page(json.dumps([{"name": name, "type": "directory"} for name in names]).encode())


def repeated_pages(request: OriginRequest) -> Iterator[bytes]:
    if "list-type" in request.path:
        yield s3_page(token="same", names=[f"{number:04}" for number in range(1000)])
    elif "/storage/v1/" in request.path:
        yield page(json.dumps({"nextPageToken": "same", "items": [{"name": "a", "size": "1"}]}).encode())
    else:
        yield page(b'<a href="a/">a/</a> <a href="./">.</a> <a href="http://[::bad">b</a>', "text/html")


def hostile_html(_: OriginRequest) -> Iterator[bytes]:
    yield page(b"<a href='" * 200_000 + b"<!--" * 200_000 + b"<![CDATA[" * 200_000 + b"<a " * 200_000, "text/html")


def s3_page(token: str, names: list[str] | None = None) -> bytes:
    rows = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
        for name in names or ()
    )
    return page(
        f"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        f"{rows}</ListBucketResult>".encode(),
        "application/xml",
    )


ATTACKS: dict[str, Respond] = {
    attack.__name__: attack
    for attack in (
        long_declared_body,
        body_goes_on,
        body_goes_on_after_its_length,
        chunks_go_on,
        tiny_chunks,
        negative_chunk,
        large_negative_chunk,
        invalid_chunk,
        long_chunk_extension,
        endless_trailers,
        gzip_bomb,
        header_flood,
        long_header,
        endless_interim_responses,
        no_http,
        nothing,
        invalid_length,
        negative_length,
        long_length,
        two_lengths,
        date_in_the_far_future,
        short_body,
        no_content_range,
        long_content_range,
        backward_content_range,
        invalid_redirect,
        redirect_to_a_file,
        redirect_loop,
        long_redirect_body,
        long_error_body,
        stall_before_the_header,
        stall_in_the_body,
        trickling_header,
        trickling_body,
        nested_json,
        wrong_json,
        broken_xml,
        endless_pages,
        repeated_pages,
        hostile_html,
    )
}
ONE_OF_EACH_KIND = {
    "body_goes_on",
    "tiny_chunks",
    "negative_chunk",
    "endless_trailers",
    "gzip_bomb",
    "header_flood",
    "endless_interim_responses",
    "no_http",
    "long_length",
    "date_in_the_far_future",
    "short_body",
    "backward_content_range",
    "redirect_loop",
    "long_error_body",
    "stall_in_the_body",
    "trickling_body",
    "nested_json",
    "broken_xml",
    "endless_pages",
    "repeated_pages",
    "hostile_html",
}
ATTACK_PARAMS = [
    pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow, id=name) for name in ATTACKS
]
VALID_RESPONSES = (
    start(OriginRequest("GET", "/", (100, 500)), "Content-Length: 500") + b"\r\n" + bytes(500),
    start(OriginRequest("GET", "/", None), f"Content-Length: {SIZE}") + b"\r\n" + bytes(SIZE),
    head("200 OK", "Transfer-Encoding: chunked") + b"\r\n5\r\nhello\r\n3;a=b\r\n{}\n\r\n0\r\nA: b\r\n\r\n",
    head("301 Moved", "Location: http://127.0.0.1:1/train/", "Content-Length: 0") + b"\r\n",
    page(b'[{"name":"train","type":"directory"},{"name":"a.tar","type":"file","size":1000}]'),
    page(b'<html><a href="../">..</a><a href="a%20b.tar">a b.tar</a><a href="/bucket/train/">train/</a>', "text/html"),
    page(b'{"nextPageToken":"x","items":[{"name":"a","size":"7"}],"prefixes":["b/"],"size":"9","generation":"1"}'),
    s3_page("x", ["a", "b/c"]),
)
TOKENS = (
    b"Content-Length: 99999999999\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Location: http://[::bad\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"\\ud800",
    b"&#x0;",
    b"[" * 5000,
    b"1e999",
)
RANGE_LENGTH = 500
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("train/a.tar"),
    "range": lambda store: store.range("train/a.tar", 100, RANGE_LENGTH, etag='"1"'),
    "head": lambda store: store.head("train/a.tar"),
    "list": lambda store: list(store.list()),
}


@pytest.fixture(params=["http", "gs", "s3"])
def open_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Store]:
    def open_at(url: str) -> Store:
        for key, value in (aws_environ(url) | {"STORAGE_EMULATOR_HOST": url}).items():
            monkeypatch.setenv(key, value)
        return open_store(f"{url}/bucket" if request.param == "http" else f"{request.param}://bucket")

    return open_at


S3_FLOODS = {"long_error_body"}
"""obstore reads an error response without a limit."""
S3_LISTING_FLOODS = {"long_declared_body", "body_goes_on", "chunks_go_on", "negative_chunk"} | S3_FLOODS
"""obstore reads a page of a listing without a limit."""


@pytest.mark.parametrize("attack", ATTACK_PARAMS)
def test_store_survives(open_at: Callable[[str], Store], attack: str) -> None:
    with run_hostile_origin(ATTACKS[attack]) as url:
        store = open_at(url)
        for name in OPERATIONS:
            if isinstance(store, s3.S3Store) and attack in (S3_LISTING_FLOODS if name == "list" else S3_FLOODS):
                continue
            with limited_resources():
                check_operation(store, name)


@pytest.mark.parametrize("attack", ATTACK_PARAMS)
def test_cache_survives(tmp_path: Path, attack: str, caplog: pytest.LogCaptureFixture) -> None:
    respond = ATTACKS[attack]
    with (
        run_hostile_origin(respond) as bad,
        run_hostile_origin(answer_head(respond)) as bad_body,
        run_cache(tmp_path / "cache", ("bad", bad), ("body", bad_body)) as url,
        limited_resources(),
    ):
        for path in ("/bad/train/a.tar", "/body/train/a.tar", "/bad/", "/bad/train/"):
            check_cache(url, path)
            check_cache(url, path, Range="bytes=100-599")
    assert logged_errors(caplog) == []


def test_stores_survive_random_responses(open_at: Callable[[str], Store]) -> None:
    check_random_responses(open_at, fixed_seeds(60))


@pytest.mark.slow
def test_stores_survive_fresh_random_responses(open_at: Callable[[str], Store]) -> None:
    check_random_responses(open_at, fresh_seeds(60), cpu_s=60)


def test_cache_survives_random_responses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_random_responses_to_cache(tmp_path, fixed_seeds(60))
    assert logged_errors(caplog) == []


@pytest.mark.slow
def test_cache_survives_fresh_random_responses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_random_responses_to_cache(tmp_path, fresh_seeds(60), cpu_s=60)
    assert logged_errors(caplog) == []


def check_operation(store: Store, name: str) -> None:
    """Run an operation: in time, it raises a StokerError, or a range returns as many bytes as were requested."""
    started = time.monotonic()
    try:
        result = OPERATIONS[name](store)
    except StokerError as error:
        message = str(error)
    else:
        message = "://"
        assert name != "range" or len(cast(bytes, result)) == RANGE_LENGTH
    assert time.monotonic() - started < MAX_SECONDS
    assert "://" in message  # it names the URL
    assert message.isprintable()
    assert len(message) < MAX_MESSAGE_LENGTH


def check_cache(url: str, path: str, **headers: str) -> None:
    """Request an object of a bad origin: an error, a body that breaks off, or the right number of bytes."""
    started = time.monotonic()
    with suppress(IncompleteRead):
        response = send_request(url, path, **headers)  # type: ignore[arg-type]
        assert response.status not in (500, 503), response.body
        assert response.status != 206 or len(response.body) == RANGE_LENGTH
    assert time.monotonic() - started < MAX_SECONDS
    assert send_request(url, "/-/healthy").status == 200


def check_random_responses(open_at: Callable[[str], Store], seeds: Iterator[random.Random], cpu_s: float = 10) -> None:
    replies: list[bytes] = [b""]
    with run_hostile_origin(lambda _: iter(replies)) as url, limited_resources(cpu_s=cpu_s):
        store = open_at(url)
        for rng in seeds:
            name = rng.choice(list(OPERATIONS))
            replies[0] = make_response(rng)
            try:
                check_operation(store, name)
            except Exception as error:
                raise AssertionError(f"{name} of {replies[0]!r}") from error


def check_random_responses_to_cache(folder: Path, seeds: Iterator[random.Random], cpu_s: float = 10) -> None:
    replies: list[bytes] = [b""]

    def respond(_: OriginRequest) -> Iterator[bytes]:
        yield replies[0]

    with (
        run_hostile_origin(respond) as bad,
        run_hostile_origin(answer_head(respond)) as bad_body,
        run_cache(folder / "cache", ("bad", bad), ("body", bad_body)) as url,
        limited_resources(cpu_s=cpu_s),
    ):
        for rng in seeds:
            replies[0] = make_response(rng)
            try:
                check_cache(url, f"/{rng.choice(('bad', 'body'))}/{rng.choice(('a.tar', 'train/', ''))}")
                check_cache(url, f"/body/{rng.random()}.tar", Range="bytes=100-599")
            except Exception as error:
                raise AssertionError(f"response {replies[0]!r}") from error


def make_response(rng: random.Random) -> bytes:
    return mutate(rng.choice(VALID_RESPONSES), rng, TOKENS)


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
