"""Hostile requests to the embedded server, over real sockets: each is answered or cut off, and the server goes on."""

from __future__ import annotations

import logging
import os
import random
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker.serve.settings import ServeSettings
from tests.fuzz.mutation import mutate
from tests.fuzz.resources import fixed_seeds, fresh_seeds, limited_resources
from tests.support.engines import run_embedded
from tests.support.http_requests import send_request

DATA = bytes(range(256)) * 40
HOST = b"Host: x\r\n"
VALID = (
    b'GET /train/a.tar HTTP/1.1\r\nHost: x\r\nRange: bytes=10-19\r\nIf-Range: "x"\r\nConnection: close\r\n\r\n',
    b"HEAD /train/a.tar HTTP/1.1\r\nHost: x\r\nIf-Modified-Since: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
    b"GET /train/ HTTP/1.1\r\nHost: x\r\nAuthorization: Basic c3Rva2Vy\r\n\r\nGET /-/stats HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PUT /new/b.tar HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    b"DELETE /new/b.tar HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n",
)
TOKENS = (
    b"HTTP/1.1",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 18446744073709551616\r\n",
    b"Range: bytes=0-,1-\r\n",
    b"/../",
    b"%2e%2e%2f",
    b"%ff",
    b"\xc0\xae",
    b"A" * 20_000,
)
CORPUS = {
    "nothing": b"",
    "line ends": b"\r\n" * 10_000,
    "no version": b"GET /train/a.tar\r\n\r\n",
    "version": b"GET / HTTP/9999999999.1\r\n" + HOST + b"\r\n",
    "binary": bytes(range(256)) * 64,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400) + b"\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "long method": b"G" * 15_000 + b" / HTTP/1.1\r\n" + HOST + b"\r\n",
    "long target": b"GET /" + b"a" * 15_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "deep target": b"GET " + b"/a" * 7_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "header without a colon": b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
    "header without an end": b"GET / HTTP/1.1\r\nA: " + b"b" * 200_000,
    "bare line feeds": b"GET / HTTP/1.1\nHost: x\n\n",
    "header flood": b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 2_000 + b"\r\n",
    "many names": b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"A%d: b\r\n" % n for n in range(90)) + b"\r\n",
    "chunked": b"PUT /c HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n",
    "chunked twice": b"PUT /c HTTP/1.1\r\n"
    + HOST
    + b"Transfer-Encoding: chunked, chunked\r\nContent-Length: 1\r\n\r\nx",
    "lengths": b"PUT /c HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "list of lengths": b"PUT /c HTTP/1.1\r\n" + HOST + b"Content-Length: 1, 1\r\n\r\nx",
    "negative length": b"PUT /c HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\nx",
    "hexadecimal length": b"PUT /c HTTP/1.1\r\n" + HOST + b"Content-Length: 0x1\r\n\r\nx",
    "long length": b"PUT /c HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 5_000 + b"\r\n\r\nx",
    "large length": b"PUT /c HTTP/1.1\r\n" + HOST + b"Content-Length: 1099511627776\r\n\r\nx",
    "many ranges": b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"Range: bytes=" + b"0-0," * 3_000 + b"1-1\r\n\r\n",
    "long range": b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"Range: bytes=" + b"9" * 5_000 + b"-\r\n\r\n",
    "backward range": b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"Range: bytes=9-1\r\n\r\n",
    "date": b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"If-Modified-Since: Thu, 99 Jan 99999 99:99:99 GMT\r\n\r\n",
    "ETags": b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"If-None-Match: " + b'"' * 9_000 + b"\r\n\r\n",
    "credentials": b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"Authorization: Basic \xff\xfe=====\r\n\r\n",
    "percent": b"GET /%zz%%%0 HTTP/1.1\r\n" + HOST + b"\r\n",
    "null": b"GET /train%00/a.tar HTTP/1.1\r\n" + HOST + b"\r\n",
    "not UTF-8": b"GET /%ff%fe HTTP/1.1\r\n" + HOST + b"\r\n",
    "surrogate": b"GET /%ed%a0%80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "symlink to itself": b"GET /loop HTTP/1.1\r\n" + HOST + b"\r\nGET / HTTP/1.1\r\n" + HOST + b"\r\n",
    "write below a file": b"PUT /train/a.tar/b HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\nx",
    "write of a long name": b"PUT /" + b"n" * 300 + b" HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\nx",
    "named pipe": b"GET /pipe HTTP/1.1\r\n" + HOST + b"\r\nPUT /pipe/a HTTP/1.1\r\n" + HOST + b"\r\n",
    "pipeline": (b"GET /train/a.tar HTTP/1.1\r\n" + HOST + b"\r\n") * 200,
}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    root = tmp_path / "root"
    (root / "train").mkdir(parents=True)
    (root / "train" / "a.tar").write_bytes(DATA)
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    (tmp_path / "secret").write_text("the secret")
    with run_embedded(ServeSettings(root=root, port=0, writable=True)) as url:
        yield url


@pytest.mark.parametrize("name", CORPUS)
def test_hostile_request(url: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_requests(url, [CORPUS[name]], caplog)


def test_random_requests(url: str, caplog: pytest.LogCaptureFixture) -> None:
    check_requests(url, map(make_request, fixed_seeds(300)), caplog)


@pytest.mark.slow
def test_fresh_random_requests(url: str, caplog: pytest.LogCaptureFixture) -> None:
    check_requests(url, map(make_request, fresh_seeds(60)), caplog, cpu_s=60)


def make_request(rng: random.Random) -> bytes:
    return mutate(rng.choice(VALID), rng, TOKENS)


def check_requests(url: str, requests: Iterable[bytes], caplog: pytest.LogCaptureFixture, *, cpu_s: float = 10) -> None:
    with limited_resources(cpu_s=cpu_s):
        for request in requests:
            response = exchange(url, request)
            assert not response or response.startswith(b"HTTP/1.1 "), request
            assert b"the secret" not in response, request
            status = int(response[9:12]) if response else 400
            assert status < 500 or status == 501, (request, response[:200])
        assert send_request(url, "/train/a.tar").status in (200, 404)  # a random request may have deleted it
        assert send_request(url, "/-/healthy").status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def exchange(url: str, request: bytes) -> bytes:
    """Send bytes and end of file; return what the server sends until it closes the connection."""
    parts = urlsplit(url)
    response = bytearray()
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60) as client:
        try:
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            while more := client.recv(1 << 16):
                response += more
        except ConnectionError:  # the server closed the connection before it read all
            pass
    return bytes(response)
