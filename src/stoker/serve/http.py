"""A small HTTP/1.1 server: one thread per connection, files sent with sendfile, all sizes and times bounded.

It implements what shards need and rejects the rest: anything ambiguous is an error, never a guess.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Self
from urllib.parse import unquote_to_bytes

from stoker.errors import StokerError

MAX_HEADER_BYTES: Final = 16 << 10
MAX_HEADERS: Final = 64
MAX_BODY_BYTES: Final = 1 << 40
HEADER_TIMEOUT_S: Final = 15.0
"""A request's header must arrive within this time, so that a slow client does not occupy a thread."""
KEEPALIVE_TIMEOUT_S: Final = 75.0
STALL_TIMEOUT_S: Final = 30.0
"""How long a client may neither receive nor send anything in the middle of a body."""
MIN_BYTES_PER_S: Final = 32 << 10
"""The minimum rate of a client after STALL_TIMEOUT_S, so that a trickling one does not occupy a thread either."""
SENDFILE_BYTES: Final = 1 << 20
"""Bytes per sendfile call: small enough to notice slow clients and to stop promptly."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRegion:
    """A region of an open file, sent without copying."""

    file: int
    offset: int
    length: int


Chunk = bytes | FileRegion


class FileBody(Iterator[FileRegion]):
    """A response body that is a region of a file, and closes the file."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._regions: list[FileRegion] = []

    def select(self, offset: int, length: int) -> Self:
        """Set the region to send."""
        self._regions = [FileRegion(self.file, offset, length)]
        return self

    def __next__(self) -> FileRegion:
        if not self._regions:
            raise StopIteration
        return self._regions.pop()

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `path` is decoded, absolute and normalized; header names are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Iterator[bytes] = field(default_factory=lambda: iter(()))
    length: int = 0


@dataclass(frozen=True, slots=True)
class Response:
    """One response: `length` bytes in chunks. If the body fails midway, the connection is closed to signal that."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Iterable[Chunk] = ()
    length: int = 0

    @classmethod
    def text(cls, status: int, what: str = "", **headers: str) -> Response:
        """Return a response with a line of text."""
        data = f"{what or HTTPStatus(status).phrase}\n".encode()
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, {"Content-Type": "text/plain; charset=utf-8", **extra}, (data,), len(data))


Handler = Callable[[Request], Response]


class HttpStatusError(Exception):
    """A request that gets an error response, after which the connection is closed."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class _ClientGoneError(Exception):
    """The client disconnected or was too slow."""


class HttpServer:
    """HTTP server that handles each connection in its own thread."""

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        *,
        max_clients: int = 1024,
        on_response: Callable[[int, int], None] = lambda *_: None,  # status (0 if it broke off), bytes sent
    ) -> None:
        self._handler, self._on_response = handler, on_response
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._max_clients = max_clients
        self._listener = socket.create_server((host, port), family=_address_family(host), backlog=512)
        self._accept_thread = threading.Thread(target=self._accept, name="stoker-serve", daemon=True)
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()

    def start(self) -> None:
        """Start accepting connections."""
        self._accept_thread.start()

    @property
    def clients(self) -> int:
        """The number of open connections."""
        return len(self._clients)

    def close(self) -> None:
        """Stop listening, and close every connection."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        if self._accept_thread.is_alive():
            self._accept_thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of file descriptors: wait for connections to finish
                continue
            with self._lock:
                full = len(self._clients) >= self._max_clients
                if not full:
                    self._clients.add(client)
            if full:
                with suppress(OSError):
                    client.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                client.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(client,), name="stoker-client", daemon=True).start()
            except RuntimeError as error:  # out of threads: wait for connections to finish
                log.warning("connection rejected: %s", error)
                with self._lock:
                    self._clients.discard(client)
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(STALL_TIMEOUT_S))
            connection = _HttpConnection(client, self._on_response)
            while not self._closed.is_set() and connection.handle_request(self._handler):
                pass
        except (_ClientGoneError, ConnectionError, BlockingIOError):  # the last one: too slow
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                log.warning("response broke off: %s", error)
        except Exception as error:
            _log_unexpected("response broke off", error)
        finally:
            with self._lock:
                self._clients.discard(client)
            _close_gracefully(client)


class _HttpConnection:
    """One client connection: reads requests and sends responses in order."""

    def __init__(self, client: socket.socket, on_response: Callable[[int, int], None]) -> None:
        self._client, self._on_response = client, on_response
        self._buffered = b""
        """Bytes received after the current request."""

    def handle_request(self, handler: Handler) -> bool:
        """Handle one request; return whether the connection stays open."""
        try:
            request, keep_alive = self._read_request()
        except HttpStatusError as error:
            self._send(Response.text(error.status, str(error)), keep_alive=False, head_only=False)
            return False
        if request is None:
            return False
        body = _CountedBody(self._read_body(request), request.length)
        request = Request(request.method, request.path, request.headers, body, request.length)
        try:
            response = handler(request)
        except HttpStatusError as error:
            response = Response.text(error.status, str(error))
        except OSError as error:
            log.warning("%s: %s", request.path, error)
            response = Response.text(503, "temporarily unavailable")
        except _ClientGoneError:
            raise
        except Exception as error:
            _log_unexpected(f"{request.method} {request.path}", error)
            response = Response.text(500, "unexpected error; see the log of the server")
        keep_alive = keep_alive and body.remaining == 0  # an unread body would be parsed as the next request
        self._send(response, keep_alive=keep_alive, head_only=request.method == "HEAD")
        return keep_alive

    def _read_request(self) -> tuple[Request | None, bool]:
        head = self._read_head()
        if head is None:
            return None, False
        first, *fields = head.split(b"\r\n")
        method, target, version = (*first.split(b" "), b"", b"")[:3]
        if first.count(b" ") != 2 or version not in _VERSIONS or not _TOKEN.fullmatch(method):
            raise HttpStatusError(400, "not an HTTP/1.1 request")
        headers = _parse_headers(fields)
        if version == b"HTTP/1.1" and "host" not in headers:
            raise HttpStatusError(400, "missing Host header")
        if "transfer-encoding" in headers:
            raise HttpStatusError(501, "Transfer-Encoding is not supported; send a Content-Length")
        length = _parse_content_length(headers.get("content-length", "0"))
        keep_alive = version == b"HTTP/1.1" and "close" not in headers.get("connection", "").lower()
        return Request(method.decode(), decode_path(target), headers, length=length), keep_alive

    def _read_head(self) -> bytes | None:
        """Read a request's header up to the empty line; None if the client closed the connection."""
        data, started = self._buffered.removeprefix(b"\r\n"), time.monotonic()  # some clients end a body with it
        self._client.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HEADER_TIMEOUT_S if data else KEEPALIVE_TIMEOUT_S)
        )
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEADER_BYTES:
                raise HttpStatusError(431, f"request header is larger than {MAX_HEADER_BYTES:,} bytes")
            try:
                more = self._client.recv(MAX_HEADER_BYTES)
            except BlockingIOError:
                if data:
                    raise HttpStatusError(408, "request header took too long") from None
                return None
            if not more:
                return None
            if not data:
                started = time.monotonic()
                self._client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HEADER_TIMEOUT_S))
            data += more
            if time.monotonic() - started > HEADER_TIMEOUT_S:
                raise HttpStatusError(408, "request header took too long")
        if end > MAX_HEADER_BYTES:
            raise HttpStatusError(431, f"request header is larger than {MAX_HEADER_BYTES:,} bytes")
        self._buffered = data[end + 4 :]
        return data[:end]

    def _read_body(self, request: Request) -> Iterator[bytes]:
        if request.headers.get("expect", "").lower() == "100-continue":  # only now, when the handler reads it
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(STALL_TIMEOUT_S))
        length, rate = request.length, _TransferRate()
        while length:
            if self._buffered:
                chunk, self._buffered = self._buffered[:length], self._buffered[length:]
            else:
                started = time.monotonic()
                chunk = self._client.recv(min(length, 1 << 20))
                if not chunk:
                    raise _ClientGoneError
                rate.add(len(chunk), started)
            length -= len(chunk)
            yield chunk

    def _send(self, response: Response, *, keep_alive: bool, head_only: bool) -> None:
        lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}", f"Date: {formatdate(usegmt=True)}"]
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        if response.status not in (204, 304):
            lines.append(f"Content-Length: {response.length}")
        lines.append(f"Connection: {'keep-alive' if keep_alive else 'close'}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        body, sent, complete = response.body, 0, False
        try:
            if head_only or not response.length or response.status in (204, 304):
                self._client.sendall(head)
                complete = True
                return
            rate = _TransferRate()
            self._client.sendall(head, socket.MSG_MORE)
            for chunk in body:
                sent += (
                    self._send_region(chunk, rate) if isinstance(chunk, FileRegion) else self._send_bytes(chunk, rate)
                )
            complete = sent == response.length
            if not complete:
                raise _ClientGoneError  # Content-Length was sent: closing is the only way to signal it
        except StokerError as error:
            log.warning("%s", error)
            raise _ClientGoneError from error
        finally:
            self._on_response(response.status if complete else 0, sent)
            if (close := getattr(body, "close", None)) is not None:
                close()

    def _send_bytes(self, data: bytes, rate: _TransferRate) -> int:
        started = time.monotonic()
        self._client.sendall(data)
        rate.add(len(data), started)
        return len(data)

    def _send_region(self, region: FileRegion, rate: _TransferRate) -> int:
        sent = 0
        while sent < region.length:
            started = time.monotonic()
            count = os.sendfile(
                self._client.fileno(), region.file, region.offset + sent, min(SENDFILE_BYTES, region.length - sent)
            )
            if not count:
                raise _ClientGoneError  # the file was truncated
            sent += count
            rate.add(count, started)
        return sent


class _TransferRate:
    """The transfer rate of a client; time spent in the server does not count."""

    def __init__(self) -> None:
        self._bytes, self._seconds = 0, 0.0

    def add(self, count: int, started: float) -> None:
        """Add a transfer; raise _ClientGoneError if the client is too slow."""
        self._bytes += count
        self._seconds += time.monotonic() - started
        if self._seconds > STALL_TIMEOUT_S and self._bytes < self._seconds * MIN_BYTES_PER_S:
            raise _ClientGoneError


class _CountedBody(Iterator[bytes]):
    """A request body that counts the bytes not read yet."""

    def __init__(self, chunks: Iterator[bytes], length: int) -> None:
        self._chunks, self.remaining = chunks, length

    def __next__(self) -> bytes:
        chunk = next(self._chunks)
        self.remaining -= len(chunk)
        return chunk


def decode_path(target: bytes) -> str:
    """Decode a request target into a path; reject every encoding of a path outside the root."""
    if not target.startswith(b"/"):
        raise HttpStatusError(400, "request target must be a path")
    raw = target.partition(b"?")[0]
    if b"#" in raw or re.search(rb"%(?![0-9A-Fa-f]{2})", raw):
        raise HttpStatusError(400, "invalid path")
    try:
        path = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise HttpStatusError(400, "path is not UTF-8") from None
    parts = path[1:].split("/")
    if any(part in (".", "..") for part in parts) or "" in parts[:-1]:
        raise HttpStatusError(400, "path contains empty segments or dot segments")
    if any(ord(letter) < 32 or ord(letter) == 127 or letter == "\\" for letter in path):
        raise HttpStatusError(400, "path contains control characters or backslashes")
    return path


def _parse_headers(fields: Iterable[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in fields:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", value):
            raise HttpStatusError(400, "malformed header")
        key = name.decode().lower()
        if key in headers and key in ("host", "content-length", "authorization", "range"):
            raise HttpStatusError(400, f"duplicate header {key}")
        headers[key] = value.strip(b" \t").decode("latin-1")
        if len(headers) > MAX_HEADERS:
            raise HttpStatusError(431, f"more than {MAX_HEADERS} headers")
    return headers


def _parse_content_length(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise HttpStatusError(400, "Content-Length is not a number")
    length = int(text)
    if length > MAX_BODY_BYTES:
        raise HttpStatusError(413, "body is too large")
    return length


def _log_unexpected(what: str, error: Exception) -> None:
    """Log an error in one line; its traceback is only logged for debugging."""
    log.error("%s: %s: %s", what, type(error).__name__, error)
    log.debug("%s", what, exc_info=error)


def _address_family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _close_gracefully(client: socket.socket) -> None:
    """Close gracefully, so that a response sent before the whole request was read still arrives."""
    with suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0.5))
        for _ in range(16):
            if not client.recv(1 << 16):
                break
    client.close()
