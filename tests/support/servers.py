"""Real servers on loopback for tests, each a context manager that yields its URL."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest

from tests.support.waiting import wait_until

_NGINX_CONF = """
daemon off;
master_process off;
pid nginx.pid;
events {{}}
http {{
    access_log off;
    default_type application/octet-stream;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {{
        listen 127.0.0.1:{port};
        root "{root}";
        autoindex on;
        autoindex_format {index};
        {directives}
    }}
}}
"""
# obstore needs these headers for every object.
_OBJECT_HEADERS = {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


# Below the ephemeral ports, so that neither a second call nor a server on port 0 gets one of these.
_PORTS = itertools.cycle(range(20000 + os.getpid() % 100 * 100, 32000))


def free_port() -> int:
    """Return a loopback port that nothing listens on and that no later call returns."""
    for port in _PORTS:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("the cycle of ports never ends")


@contextmanager
def nginx(root: Path, *, index: str = "json", directives: str = "") -> Iterator[str]:
    """Serve a directory with a real, unprivileged nginx; `index` is its autoindex_format."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="nginx-") as prefix:
        conf = Path(prefix, "nginx.conf")
        conf.write_text(_NGINX_CONF.format(port=port, root=root, index=index, directives=directives))
        log = Path(prefix, "error.log")
        process = subprocess.Popen([program, "-p", prefix, "-c", conf, "-e", log])
        try:
            _wait_for_nginx(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _wait_for_nginx(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def is_listening() -> bool:
        assert process.poll() is None, log.read_text()
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_listening)


@contextmanager
def moto(bucket: str = "bucket") -> Iterator[str]:
    """Run moto's S3 with one bucket; the URL is for AWS_ENDPOINT_URL, see `aws_environ`."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    try:
        urlopen(Request(f"{url}/{bucket}", method="PUT")).close()
        yield url
    finally:
        server.stop()
        server._server.server_close()


def aws_environ(url: str) -> dict[str, str]:
    """Return the environment that directs s3:// URLs to a local server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def gcs_emulator(bucket: str = "bucket") -> Iterator[str]:
    """Run gcp-storage-emulator in memory with one bucket; the URL is for STORAGE_EMULATOR_HOST."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=bucket)
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


class RecordedRequest(NamedTuple):
    """One request that a scripted server received; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Reply:
    """A response of a scripted server; a `length` other than the body's truncates it."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


class ScriptedServer(NamedTuple):
    """A scripted server: its URL and the requests so far."""

    url: str
    requests: list[RecordedRequest]


class _QuietServer(ThreadingHTTPServer):
    """Server that prints no traceback when a client disconnects, possibly during another test."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def scripted_server(reply: Callable[[RecordedRequest, int], Reply]) -> Iterator[ScriptedServer]:
    """Serve responses computed from each request and the number of requests before it."""
    requests: list[RecordedRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = RecordedRequest(self.command, self.path, headers, body)
            requests.append(request)
            response = reply(request, len(requests) - 1)
            self.send_response(response.status)
            length = len(response.body) if response.length is None else response.length
            for key, value in ({"Content-Length": str(length)} | _OBJECT_HEADERS | response.headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = respond  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with _QuietServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield ScriptedServer(f"http://127.0.0.1:{server.server_address[1]}", requests)
        finally:
            server.shutdown()
            thread.join()


def json_reply(value: object) -> Reply:
    """Return a JSON response."""
    return Reply(body=json.dumps(value).encode(), headers={"Content-Type": "application/json"})
