"""A small HTTP/1.1 server: a thread for each connection, files sent by the kernel, and everything bounded.

It knows what shards need and refuses the rest: what it cannot take literally is an error, never a guess.
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

MAX_HEAD: Final = 16 << 10
MAX_FIELDS: Final = 64
MAX_BODY: Final = 1 << 40
HEAD_S: Final = 15.0
"""A request's head must be there within this; a slow client holds a thread no longer."""
IDLE_S: Final = 75.0
STALL_S: Final = 30.0
"""How long a client may take nothing, or give nothing, in the middle of a body."""
MIN_RATE: Final = 32 << 10
"""Bytes per second that a client must take or give once STALL_S are over: a drip holds a thread no longer either."""
PIECE: Final = 1 << 20
"""Bytes handed to the kernel at a time: small enough that slowness is noticed and stopping is prompt."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an open file, to be sent without a copy."""

    file: int
    offset: int
    length: int


Piece = bytes | Span


class OpenFile(Iterator[Span]):
    """A body that is a part of a file, which it closes once and in any case."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._spans: list[Span] = []

    def part(self, offset: int, length: int) -> Self:
        """Choose what is sent."""
        self._spans = [Span(self.file, offset, length)]
        return self

    def __next__(self) -> Span:
        if not self._spans:
            raise StopIteration
        return self._spans.pop()

    def close(self) -> None:
        """Close the file; more than once does nothing."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `path` is decoded, absolute and without tricks; names of headers are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Iterator[bytes] = field(default_factory=lambda: iter(()))
    length: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered: `length` bytes in pieces. A body that fails half-way ends the connection, so that it shows."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Iterable[Piece] = ()
    length: int = 0

    @classmethod
    def text(cls, status: int, what: str = "", **headers: str) -> Reply:
        """Answer with a line of text."""
        data = f"{what or HTTPStatus(status).phrase}\n".encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, {"Content-Type": "text/plain; charset=utf-8", **named}, (data,), len(data))


Handler = Callable[[Request], Reply]


class RefusedError(Exception):
    """A request that is not served as it stands; the connection is closed after the answer."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status


class _GoneError(Exception):
    """The client has gone, or was too slow."""


class Server:
    """Listens, and answers each connection in a thread of its own."""

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        *,
        max_clients: int = 1024,
        answered: Callable[[int, int], None] = lambda *_: None,  # status, 0 if it broke off, and bytes
    ) -> None:
        self._handler, self._answered = handler, answered
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._max_clients = max_clients
        self._listener = socket.create_server((host, port), family=_family(host), backlog=512)
        self._accepting = threading.Thread(target=self._accept, name="stoker-serve", daemon=True)
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to answer."""
        self._accepting.start()

    @property
    def clients(self) -> int:
        """How many connections there are."""
        return len(self._clients)

    def close(self) -> None:
        """Stop listening, and end every connection."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        if self._accepting.is_alive():
            self._accepting.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of descriptors: those who have one will finish
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
            except RuntimeError as error:  # no more threads for this process: those there are will finish
                log.warning("a client is sent away: %s", error)
                with self._lock:
                    self._clients.discard(client)
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(STALL_S))
            connection = _Connection(client, self._answered)
            while not self._closed.is_set() and connection.answer(self._handler):
                pass
        except (_GoneError, ConnectionError, BlockingIOError):  # the last: it was too slow
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                log.warning("an answer broke off: %s", error)
        except Exception:
            log.exception("a request failed")
        finally:
            with self._lock:
                self._clients.discard(client)
            _hang_up(client)


class _Connection:
    """One client: requests in, replies out, in order."""

    def __init__(self, client: socket.socket, answered: Callable[[int, int], None]) -> None:
        self._client, self._answered = client, answered
        self._ahead = b""
        """What came behind the request that is being answered."""

    def answer(self, handler: Handler) -> bool:
        """Answer one request, and tell whether another may follow."""
        try:
            request, keep = self._read()
        except RefusedError as refused:
            self._send(Reply.text(refused.status, str(refused)), keep=False, head_only=False)
            return False
        if request is None:
            return False
        left = _Counted(self._body(request), request.length)
        request = Request(request.method, request.path, request.headers, left, request.length)
        try:
            reply = handler(request)
        except RefusedError as refused:
            reply = Reply.text(refused.status, str(refused))
        except OSError as error:
            log.warning("%s cannot be served: %s", request.path, error)
            reply = Reply.text(503, "not now")
        keep = keep and left.left == 0  # what was not read of a body would look like the next request
        self._send(reply, keep=keep, head_only=request.method == "HEAD")
        return keep

    def _read(self) -> tuple[Request | None, bool]:
        head = self._read_head()
        if head is None:
            return None, False
        first, *fields = head.split(b"\r\n")
        words = first.split(b" ")
        if len(words) != 3 or words[2] not in _VERSIONS or not _TOKEN.fullmatch(words[0]):
            raise RefusedError(400, "not an HTTP/1.1 request")
        headers = _headers(fields)
        if words[2] == b"HTTP/1.1" and "host" not in headers:
            raise RefusedError(400, "there is no Host header")
        if "transfer-encoding" in headers:
            raise RefusedError(501, "a body must come with its Content-Length")
        length = _length(headers.get("content-length", "0"))
        keep = words[2] == b"HTTP/1.1" and "close" not in headers.get("connection", "").lower()
        return Request(words[0].decode(), decoded(words[1]), headers, length=length), keep

    def _read_head(self) -> bytes | None:
        """Read up to the empty line; None when the client is done."""
        data, started = self._ahead.removeprefix(b"\r\n"), time.monotonic()  # some clients end a body so
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HEAD_S if data else IDLE_S))
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD:
                raise RefusedError(431, f"the request's head is larger than {MAX_HEAD:,} bytes")
            try:
                more = self._client.recv(MAX_HEAD)
            except BlockingIOError:
                if data:
                    raise RefusedError(408, "the request's head took too long") from None
                return None
            if not more:
                return None
            if not data:
                started = time.monotonic()
                self._client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HEAD_S))
            data += more
            if time.monotonic() - started > HEAD_S:
                raise RefusedError(408, "the request's head took too long")
        if end > MAX_HEAD:
            raise RefusedError(431, f"the request's head is larger than {MAX_HEAD:,} bytes")
        self._ahead = data[end + 4 :]
        return data[:end]

    def _body(self, request: Request) -> Iterator[bytes]:
        if request.headers.get("expect", "").lower() == "100-continue":  # only now, when somebody wants it
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(STALL_S))
        length, pace = request.length, _Pace()
        while length:
            if self._ahead:
                piece, self._ahead = self._ahead[:length], self._ahead[length:]
            else:
                began = time.monotonic()
                piece = self._client.recv(min(length, 1 << 20))
                if not piece:
                    raise _GoneError
                pace.went(len(piece), began)
            length -= len(piece)
            yield piece

    def _send(self, reply: Reply, *, keep: bool, head_only: bool) -> None:
        lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}", f"Date: {formatdate(usegmt=True)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        if reply.status not in (204, 304):
            lines.append(f"Content-Length: {reply.length}")
        lines.append(f"Connection: {'keep-alive' if keep else 'close'}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        body, sent, well = reply.body, 0, False
        try:
            if head_only or not reply.length or reply.status in (204, 304):
                self._client.sendall(head)
                well = True
                return
            pace = _Pace()
            self._client.sendall(head, socket.MSG_MORE)
            for piece in body:
                sent += self._send_span(piece, pace) if isinstance(piece, Span) else self._send_bytes(piece, pace)
            well = sent == reply.length
            if not well:
                raise _GoneError  # the length was promised: only an end of the connection tells the truth
        except StokerError as error:
            log.warning("%s", error)
            raise _GoneError from error
        finally:
            self._answered(reply.status if well else 0, sent)
            if (close := getattr(body, "close", None)) is not None:
                close()

    def _send_bytes(self, data: bytes, pace: _Pace) -> int:
        began = time.monotonic()
        self._client.sendall(data)
        pace.went(len(data), began)
        return len(data)

    def _send_span(self, span: Span, pace: _Pace) -> int:
        sent = 0
        while sent < span.length:
            began = time.monotonic()
            count = os.sendfile(self._client.fileno(), span.file, span.offset + sent, min(PIECE, span.length - sent))
            if not count:
                raise _GoneError  # the file has shrunk
            sent += count
            pace.went(count, began)
        return sent


class _Pace:
    """How fast a client takes or gives; what the server itself waits for does not count."""

    def __init__(self) -> None:
        self._bytes, self._seconds = 0, 0.0

    def went(self, count: int, began: float) -> None:
        """Add what went since then; let go of a client that is too slow."""
        self._bytes += count
        self._seconds += time.monotonic() - began
        if self._seconds > STALL_S and self._bytes < self._seconds * MIN_RATE:
            raise _GoneError


class _Counted(Iterator[bytes]):
    """A body that knows how much of it was not read."""

    def __init__(self, pieces: Iterator[bytes], length: int) -> None:
        self._pieces, self.left = pieces, length

    def __next__(self) -> bytes:
        piece = next(self._pieces)
        self.left -= len(piece)
        return piece


def decoded(target: bytes) -> str:
    """Turn a request's target into a path; refuse whatever could mean a place outside, by any spelling."""
    if not target.startswith(b"/"):
        raise RefusedError(400, "the target must be a path")
    raw = target.partition(b"?")[0]
    if b"#" in raw or re.search(rb"%(?![0-9A-Fa-f]{2})", raw):
        raise RefusedError(400, "not a path")
    try:
        path = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise RefusedError(400, "the path is not UTF-8") from None
    parts = path[1:].split("/")
    if any(part in (".", "..") for part in parts) or "" in parts[:-1]:
        raise RefusedError(400, "a path has no empty parts and no dots alone")
    if any(ord(letter) < 32 or ord(letter) == 127 or letter == "\\" for letter in path):
        raise RefusedError(400, "a path has no control characters and no backslashes")
    return path


def _headers(fields: Iterable[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in fields:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", value):
            raise RefusedError(400, "a header that cannot be read")
        key = name.decode().lower()
        if key in headers and key in ("host", "content-length", "authorization", "range"):
            raise RefusedError(400, f"the header {key} comes twice")
        headers[key] = value.strip(b" \t").decode("latin-1")
        if len(headers) > MAX_FIELDS:
            raise RefusedError(431, f"more than {MAX_FIELDS} headers")
    return headers


def _length(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise RefusedError(400, "Content-Length is not a number")
    length = int(text)
    if length > MAX_BODY:
        raise RefusedError(413, "the body is too large")
    return length


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _hang_up(client: socket.socket) -> None:
    """Close in order, so that an answer sent before all of a request was read still arrives."""
    with suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0.5))
        for _ in range(16):
            if not client.recv(1 << 16):
                break
    client.close()
