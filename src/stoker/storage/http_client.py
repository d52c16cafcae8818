"""HTTP client of the http(s):// and gs:// stores: connection pool, range requests, bounded retries, clear errors."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Retry, Timeout, make_headers
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)

from stoker.core.units import pluralize
from stoker.errors import (
    AccessDeniedError,
    NotFoundError,
    StokerError,
    UnavailableError,
    VerificationError,
)

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
RETRIES = 4
RETRY_DEADLINE_S = 15.0
"""No retry starts later than this after the first request."""

_RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_READ_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)")
# urllib3 only follows redirects; retries are decided here, because the body can break off too.
_REDIRECTS = Retry(total=5, connect=0, read=0, status=0, other=0, redirect=5)
_NO_REDIRECTS = Retry(total=0, connect=0, read=0, status=0, other=0, redirect=0, raise_on_redirect=False)


class HttpResponse(NamedTuple):
    """A complete response; `path` is the URL path after redirects."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    path: str


class ByteRange(NamedTuple):
    """The bytes to request of an object."""

    start: int
    length: int


class _WrongRangeError(HTTPError):
    """A response with other bytes than requested; retried, because an intermediate cache may recover."""


class HttpClient:
    """HTTP client for one server; safe to share between threads."""

    def __init__(self, url: str, *, redirects: bool = True) -> None:
        self.pool = _create_pool(url)
        self._retries = _REDIRECTS if redirects else _NO_REDIRECTS

    def request(
        self,
        method: str,
        url: str,
        *,
        where: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        byte_range: ByteRange | None = None,
    ) -> HttpResponse:
        """Send a request, retrying transient failures, and return the response whatever its status.

        An unreachable server raises UnavailableError at `where`.
        """
        sent = dict(headers or {})
        if byte_range:
            sent["Range"] = f"bytes={byte_range.start}-{byte_range.start + byte_range.length - 1}"
        started = time.monotonic()
        for attempt in count():
            try:
                response, error = self._request_once(method, url, sent, body, byte_range), None
                if response.status not in _RETRYABLE_STATUSES:
                    break
            except HTTPError as failure:
                error = failure
            if attempt == RETRIES or time.monotonic() - started > RETRY_DEADLINE_S:
                break
            time.sleep(0.2 * 2**attempt * random.uniform(0.5, 1.0))
        if error:
            what = f"{_describe_failure(error)} ({pluralize(attempt + 1, 'attempt')})"
            raise UnavailableError(what, where=where) from error
        return response

    def _request_once(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, byte_range: ByteRange | None
    ) -> HttpResponse:
        response = self.pool.urlopen(
            method,
            url,
            body=body,
            headers=headers,
            retries=self._retries,
            timeout=Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            preload_content=False,
            decode_content=False,
        )
        try:
            data = _read_body(response, byte_range)
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return HttpResponse(response.status, response.headers, data, urlsplit(response.geturl() or url).path)


def to_error(response: HttpResponse, where: str, *, missing: str = "no such object", tried: str) -> StokerError:
    """Return the error for a response with an error status; `tried` describes the credentials used."""
    match response.status:
        case 401 | 403:
            return AccessDeniedError("permission denied", where=where, hint=tried)
        case 404 | 410:
            return NotFoundError(missing, where=where)
        case status:
            return UnavailableError(f"server responded with HTTP {status}", where=where)


def exact_body(byte_range: ByteRange, response: HttpResponse, where: str) -> bytes:
    """Return the body of a range request; raise VerificationError if the object ends before the range does."""
    length = 0 if response.status == 416 else len(response.body)
    if length != byte_range.length:
        raise VerificationError(
            f"expected {byte_range.length} bytes at offset {byte_range.start}, got {length}", where=where
        )
    return response.body


def _create_pool(url: str) -> PoolManager:
    """Create a connection pool, through the proxy that the environment variables set for this URL."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if not proxy or (parts.hostname and proxy_bypass(parts.hostname)):
        return PoolManager(maxsize=32)
    auth = urlsplit(proxy)
    credentials = f"{auth.username}:{auth.password}" if auth.username else None
    return ProxyManager(proxy, maxsize=32, proxy_headers=make_headers(proxy_basic_auth=credentials))


def _read_body(response: BaseHTTPResponse, byte_range: ByteRange | None) -> bytes:
    """Read a body; if the server ignored Range, skip to the range without keeping what precedes it."""
    if byte_range is not None and response.status == 206:
        _check_content_range(response.headers.get("Content-Range", ""), byte_range)
    if byte_range is None or response.status != 200:
        return response.read()
    for start in range(0, byte_range.start, _READ_BYTES):
        _read_up_to(response, min(_READ_BYTES, byte_range.start - start))
    data = _read_up_to(response, byte_range.length)
    response.close()
    return data


def _check_content_range(header: str, byte_range: ByteRange) -> None:
    """Raise if Content-Range differs from the requested range (clipped at the end of the object)."""
    sent = _CONTENT_RANGE.fullmatch(header)
    if sent is None:
        raise _WrongRangeError(f"server sent no valid Content-Range, requested from {byte_range.start}")
    if int(sent[1]) != byte_range.start:
        raise _WrongRangeError(f"server sent bytes from {sent[1]}, requested from {byte_range.start}")
    last = byte_range.start + byte_range.length - 1
    if sent[3] != "*" and int(sent[2]) != min(last, int(sent[3]) - 1):
        raise _WrongRangeError(f"server sent bytes to {sent[2]} of {sent[3]}, requested to {last}")


def _read_up_to(response: BaseHTTPResponse, length: int) -> bytes:
    data = response.read(length)
    while len(data) < length and (more := response.read(length - len(data))):
        data += more
    return data


def _describe_failure(error: HTTPError) -> str:
    if isinstance(error, _WrongRangeError):
        return str(error)
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, NameResolutionError):
        return "could not resolve host name"
    if isinstance(reason, SSLError):
        return "TLS certificate verification failed"
    if isinstance(reason, ConnectTimeoutError) and not isinstance(reason, NewConnectionError):
        return f"no response within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(reason, ReadTimeoutError):
        return f"no response within {READ_TIMEOUT_S:g} s"
    default = "connection closed by the server" if isinstance(reason, ProtocolError) else "no response from the server"
    return _find_os_error(reason) or default


def _find_os_error(error: BaseException) -> str:
    """Return the message of the operating system behind an error, such as "connection refused", or ""."""
    causes = (error, error.__cause__, getattr(error, "original_error", None), *error.args)
    return next((cause.strerror.lower() for cause in causes if isinstance(cause, OSError) and cause.strerror), "")
