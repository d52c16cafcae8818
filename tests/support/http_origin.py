"""An origin web server for tests of caches: it records requests, and can corrupt, truncate, delay and redirect."""

from __future__ import annotations

import hashlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from stoker.shards.manifest import Manifest, Shard, SourceInfo

DATA = bytes(itertools.islice(itertools.cycle(range(251)), 300_000))


@dataclass
class OriginServer:
    """The state of a test's origin server, which records requests and misbehaves as configured."""

    url: str
    files: dict[str, bytes]
    get_requests: list[tuple[str, str | None]] = field(default_factory=list)
    head_requests: list[str] = field(default_factory=list)
    corrupt: Callable[[str, bytes], bytes] | None = None
    """Changes the body, but not Content-Length."""
    status: int | None = None
    truncate_at: int | None = None
    """Close the connection after this many bytes of a body."""
    redirect: str | None = None
    delay_s: float = 0.0
    version: int = 1
    validators: bool = True
    """Whether responses have an ETag and Last-Modified, by which a cache distinguishes versions."""
    failing_path: str | None = None
    """A path that gets a 500 response."""
    content_type: str = "application/octet-stream"
    host_headers: list[str] = field(default_factory=list)

    def count_gets(self, path: str) -> int:
        """Return the number of GET requests for a path."""
        return sum(1 for requested, _ in self.get_requests if requested == path)


class _Handler(BaseHTTPRequestHandler):
    """Responds as the state of its server says."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self.server.state.head_requests.append(self.path)
        self._respond(head=True)

    def do_GET(self) -> None:
        self.server.state.get_requests.append((self.path, self.headers.get("Range")))
        self._respond(head=False)

    def _respond(self, *, head: bool) -> None:
        state = self.server.state
        state.host_headers.append(self.headers.get("Host", ""))
        time.sleep(state.delay_s)
        data = state.files.get(self.path)
        if state.redirect is not None:
            self._send_empty(302, {"Location": state.redirect})
            return
        if state.status is not None or data is None or self.path == state.failing_path:
            self._send_empty(500 if self.path == state.failing_path else state.status or 404)
            return
        etag = f'"{state.version}-{len(data)}"'
        if self.headers.get("If-Match", etag) not in ("*", etag):
            self._send_empty(412)
            return
        start, end, status = 0, len(data), 200
        if text := self.headers.get("Range"):
            first, _, last = text.removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(len(data), int(last) + 1 if last else len(data)), 206
        self.send_response(status)
        if state.validators:
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Type", state.content_type)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if not head:
            self._send_body(data[start:end])

    def _send_empty(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_body(self, body: bytes) -> None:
        state, length = self.server.state, len(body)
        if state.corrupt is not None:
            body = state.corrupt(self.path, body)
        if state.truncate_at is not None:
            body = body[: state.truncate_at]
        self.wfile.write(body)
        if len(body) < length:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, state: OriginServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def run_origin(files: dict[str, bytes]) -> Iterator[OriginServer]:
    """Serve files by path from memory, with ranges and conditional requests."""
    state = OriginServer("", files)
    server = _Server(state)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def build_manifest(shards: dict[str, bytes]) -> bytes:
    """Return a manifest that lists these shards."""
    entries = tuple(
        Shard(name=name, samples=1, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), index_sha256="")
        for name, data in shards.items()
    )
    return msgspec.json.encode(
        Manifest(
            version=1,
            name="set",
            split="train",
            format="tar",
            samples=len(shards),
            bytes=sum(map(len, shards.values())),
            quarantined=0,
            classes=("one",),
            seed=0,
            lanes=1,
            window=2,
            source=SourceInfo(kind="folder", samples=len(shards), digest=""),
            shrunk=None,
            plan="",
            shards=entries,
        )
    )
