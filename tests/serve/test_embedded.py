"""Embedded engine: both contracts, slow and misbehaving clients, limits, and the token."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http import client
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stoker.core.processes import handles_signal
from stoker.serve import http
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.files import FileHandler, resolve_write_target
from stoker.serve.http import HttpStatusError
from stoker.serve.settings import ServeSettings
from tests.serve.contract import CacheContract, ServerContract
from tests.support.engines import run_embedded
from tests.support.http_origin import DATA
from tests.support.http_requests import send_raw, send_request
from tests.support.waiting import wait_until


class TestServe(ServerContract):
    ENGINE = "embedded"


class TestCache(CacheContract):
    ENGINE = "embedded"


def test_trickling_client_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(http, "SENDFILE_BYTES", 64 << 10)
    (tmp_path / "a.tar").write_bytes(bytes(64 << 20))
    engine = EmbeddedEngine(ServeSettings(root=tmp_path, port=0))
    engine.start()
    parts = urlsplit(engine.url)
    try:
        slow = socket.create_connection((parts.hostname, parts.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 60
        while engine._server.clients and time.monotonic() < deadline:
            slow.recv(2048)
            time.sleep(0.1)
        assert engine._server.clients == 0
        slow.close()
    finally:
        engine.stop()


def test_server_survives_a_failed_thread_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_embedded(ServeSettings(root=tmp_path, port=0)) as url:
        start, failing = threading.Thread.start, [True]

        def fail_once(thread: threading.Thread) -> None:
            if thread.name == "stoker-client" and failing:
                failing.clear()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail_once)
        with pytest.raises((OSError, client.HTTPException)):
            send_request(url, "/-/healthy")
        assert send_request(url, "/-/healthy").status == 200


def test_unexpected_error_of_a_handler_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: http.Request) -> http.Response:
        if request.path == "/ok":
            return http.Response.text(200, "ok")
        raise RuntimeError("a fault of the handler")

    server = http.HttpServer(fail, "127.0.0.1", 0)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        response = send_request(url, "/fails")
        assert response.status == 500
        assert b"fault of the handler" not in response.body
        assert len(response.body.split()) >= 3
        assert send_request(url, "/ok").status == 200
        assert [record.exc_info for record in caplog.records if record.levelno >= logging.WARNING] == [None]
    finally:
        server.close()


def test_listing_omits_names_that_no_request_can_contain(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    (tmp_path / os.fsdecode(b"\xff.tar")).touch()
    with run_embedded(ServeSettings(root=tmp_path, port=0)) as url:
        assert [row["name"] for row in json.loads(send_request(url, "/").body)] == ["a.tar"]


def test_no_file_descriptor_leaks(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(DATA)
    with run_embedded(ServeSettings(root=tmp_path, port=0)) as url:

        def send_requests() -> None:
            etag = send_request(url, "/a.tar").headers["etag"]
            for headers in ({}, {"If_None_Match": etag}, {"Range": "bytes=999999-"}, {"If_Match": '"x"'}):
                for method in ("GET", "HEAD"):
                    send_request(url, "/a.tar", method, **headers)  # type: ignore[arg-type]
            for path in ("/", "/none", "/a.tar/", "/none/"):
                send_request(url, path)

        send_requests()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            send_requests()
        wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


def test_listing_omits_symlinks_outside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "in.tar").write_bytes(b"x")
    (root / "inside").symlink_to("in.tar")
    (root / "outside").symlink_to("/etc/passwd")
    with run_embedded(ServeSettings(root=root, port=0)) as url:
        assert {row["name"] for row in json.loads(send_request(url, "/").body)} == {"in.tar", "inside"}


@pytest.mark.parametrize("python", ["this", "3.14"])
def test_paths_that_cannot_be_written(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if python == "3.14":  # these hide all errors there
        monkeypatch.setattr(Path, "is_dir", os.path.isdir)
        monkeypatch.setattr(Path, "exists", os.path.exists)
        monkeypatch.setattr(Path, "resolve", lambda path, *, strict=False: Path(os.path.realpath(path, strict=strict)))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "outside").symlink_to("..")
    for path, status in {
        "/folder": 409,
        "/new/": 409,
        "/file/a/b": 409,
        "/" + "x" * 300: 400,
        "/loop/a": 404,
        "/outside/a": 404,
    }.items():
        with pytest.raises(HttpStatusError) as caught:
            resolve_write_target(tmp_path, path)
        assert caught.value.status == status, path
    assert resolve_write_target(tmp_path, "/new/a/b") == tmp_path / "new/a/b"
    assert resolve_write_target(tmp_path, "/loop") == tmp_path / "loop"


def test_conditional_put(tmp_path: Path) -> None:
    with run_embedded(ServeSettings(root=tmp_path, port=0, writable=True)) as url:
        assert send_request(url, "/a", "PUT", b"one", If_None_Match="*").status == 201
        assert send_request(url, "/a", "PUT", b"two", If_None_Match="*").status == 412
        assert send_request(url, "/a", "PUT", b"two", Content_Range="bytes 0-2/9").status == 400
        assert (tmp_path / "a").read_bytes() == b"one"
        assert send_request(url, "/-/healthy", "PUT", b"x").status == 405


def test_range_is_ignored_on_head(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with run_embedded(ServeSettings(root=tmp_path, port=0)) as url:
        response = send_request(url, "/a", "HEAD", Range="bytes=0-3")
        assert (response.status, response.headers["content-length"]) == (200, "10")
        assert "date" in response.headers


def test_slow_and_idle_clients_are_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http, "KEEPALIVE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 0.5)
    (tmp_path / "a.tar").write_bytes(bytes(64 << 20))
    engine = EmbeddedEngine(ServeSettings(root=tmp_path, port=0))
    engine.start()
    parts = urlsplit(engine.url)
    try:
        slow = socket.create_connection((parts.hostname, parts.port))
        slow.sendall(b"GET /a.tar HT")
        assert b" 408 " in slow.recv(100)
        idle = socket.create_connection((parts.hostname, parts.port))
        assert idle.recv(100) == b""
        lazy = socket.create_connection((parts.hostname, parts.port))
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(b"GET /a.tar HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: engine._server.clients == 0)
        for connection in (slow, idle, lazy):
            connection.close()
    finally:
        engine.stop()


def test_too_many_clients_get_503(tmp_path: Path) -> None:
    server = http.HttpServer(FileHandler(tmp_path), "127.0.0.1", 0, max_clients=2)
    server.start()
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    try:
        wait_until(lambda: server.clients == 2)
        with socket.create_connection(("127.0.0.1", server.port)) as third:
            assert b" 503 " in third.recv(100)
    finally:
        for connection in connections:
            connection.close()
        server.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"400"),
        (b"G@T / HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"501"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(100)) + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
    ],
)
def test_ambiguous_requests_are_rejected(tmp_path: Path, request_: bytes, status: bytes) -> None:
    with run_embedded(ServeSettings(root=tmp_path, port=0)) as url:
        response = send_raw(url, request_)
        assert response.split(b" ")[1] == status
        assert response.count(b"Content-Length:") == 1


def test_unread_body_is_not_parsed_as_a_request(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    smuggled = b"GET /secret HTTP/1.1\r\nHost: x\r\n\r\n"
    with run_embedded(ServeSettings(root=tmp_path, port=0)) as url:
        head = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
        assert send_raw(url, head + smuggled).count(b"Content-Length:") == 1


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_target_is_a_normalized_path_or_rejected(target: bytes) -> None:
    try:
        path = http.decode_path(b"/" + target)
    except http.HttpStatusError:
        return
    parts = path.split("/")
    assert parts[0] == ""
    assert not {".", ".."} & set(parts)
    assert "" not in parts[1:-1]
    assert not set(path) & set("\0\\\n\r")


def test_sighup_reloads_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first-token-of-many-letters\n")
    command = [sys.executable, "-m", "stoker", "data", "serve", str(tmp_path), "--port", "0", "--engine", "embedded"]
    with subprocess.Popen([*command, "--token-file", str(token)], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = re.findall(r"http://[\w.:]+", process.stderr.readline())[0]
            wait_until(lambda: handles_signal(process.pid, signal.SIGHUP))
            assert send_request(url, "/", Authorization="Bearer first-token-of-many-letters").status == 200
            token.write_text("second-token-of-many-letters")
            process.send_signal(signal.SIGHUP)
            wait_until(
                lambda: send_request(url, "/", Authorization="Bearer second-token-of-many-letters").status == 200
            )
            assert send_request(url, "/", Authorization="Bearer first-token-of-many-letters").status == 401
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
