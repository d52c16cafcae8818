"""Connections of urllib3 whose responses are limited in bytes and time, whatever the server sends.

The limits hold where bytes leave the socket, so they also cover what http.client reads without returning it: headers,
interim responses, chunk sizes and trailers.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from contextvars import ContextVar
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from stoker.core.units import format_bytes

MAX_HEADER_BYTES = 256 << 10
MAX_CHUNKS = 100_000
"""The limit of the chunks of a body with `Transfer-Encoding: chunked`, each of which takes time to parse."""
MIN_BYTES_PER_S = 1 << 10
"""The minimum rate of a response that takes longer than the read timeout."""
BODY_BYTES: ContextVar[int] = ContextVar("BODY_BYTES", default=0)
"""The bytes of the body that the current request asks for."""

_OVERHEAD_BYTES = 1 << 20


class ResponseTooLargeError(HTTPError):
    """The server sent more than was requested."""


class SlowResponseError(HTTPError):
    """The server sent bytes too slowly, though never so slowly that the read timeout expired."""


class _LimitedReader(io.RawIOBase):
    """The bytes of one response; raises when there are too many of them, or when they arrive too slowly."""

    def __init__(self, raw: io.RawIOBase, timeout_s: float | None) -> None:
        self._raw, self._timeout_s = raw, timeout_s
        self.start_part("header", MAX_HEADER_BYTES)

    def start_part(self, name: str, max_bytes: int) -> None:
        """Allow this many bytes from here on, and measure the rate anew: a server may take long to start a body."""
        self._part, self._max_bytes = name, max_bytes
        self._bytes, self._seconds = 0, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        started = time.monotonic()
        count = self._raw.readinto(buffer)
        self._seconds += time.monotonic() - started
        self._bytes += count or 0
        if self._bytes > self._max_bytes:
            raise ResponseTooLargeError(f"response {self._part} is longer than {self._max_bytes:,} bytes")
        timeout_s = self._timeout_s
        if timeout_s is not None and self._seconds > timeout_s and self._bytes < self._seconds * MIN_BYTES_PER_S:
            raise SlowResponseError(f"response {self._part} is slower than {format_bytes(MIN_BYTES_PER_S)}/s")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _LimitedResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._reader = _LimitedReader(self.fp.detach(), sock.gettimeout())
        self.fp = io.BufferedReader(self._reader)
        self._chunks = 0

    def begin(self) -> None:
        super().begin()
        # Twice the body: a chunked one has a line before every chunk.
        self._reader.start_part("body", 2 * BODY_BYTES.get() + _OVERHEAD_BYTES)

    def _read_next_chunk_size(self) -> int:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise ResponseTooLargeError(f"response body has more than {MAX_CHUNKS:,} chunks")
        size: int = super()._read_next_chunk_size()  # type: ignore[misc]
        if size < 0:
            raise ValueError("chunk size is negative")
        return size

    def _read_and_discard_trailer(self) -> None:
        self._reader.start_part("trailer", MAX_HEADER_BYTES)
        super()._read_and_discard_trailer()  # type: ignore[misc]


class _LimitedConnection(HTTPConnection):
    response_class = _LimitedResponse


class _LimitedTlsConnection(HTTPSConnection):
    response_class = _LimitedResponse


class _LimitedPool(HTTPConnectionPool):
    ConnectionCls = _LimitedConnection


class _LimitedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _LimitedTlsConnection


def limit_responses(manager: PoolManager) -> PoolManager:
    """Make a pool manager limit the responses of all its connections; BODY_BYTES sets the size of a body."""
    manager.pool_classes_by_scheme = {"http": _LimitedPool, "https": _LimitedTlsPool}
    return manager
