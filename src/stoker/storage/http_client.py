"""HTTP client of the http(s):// and gs:// stores: connection pool, range requests, bounded retries, clear errors."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from http.client import HTTPException
from io import BytesIO
from itertools import count
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Timeout, make_headers
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)
from urllib3.util import parse_url

from stoker.core.units import pluralize
from stoker.errors import (
    AccessDeniedError,
    NotFoundError,
    StokerError,
    UnavailableError,
    VerificationError,
)
from stoker.storage import MAX_GET_BYTES
from stoker.storage.http_limits import BODY_BYTES, ResponseTooLargeError, SlowResponseError, limit_responses

CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 30.0
RETRIES = 4
MAX_REDIRECTS = 5
RETRY_DEADLINE_S = 15.0
"""No retry starts later than this after the first request."""

_RETRYABLE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_READ_BYTES = 1 << 20
_MAX_DISCARDED_BYTES = 64 << 10
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


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


class _InvalidResponseError(HTTPError):
    """A response that no retry would fix."""


_PERMANENT = (_InvalidResponseError, ResponseTooLargeError)


class HttpClient:
    """HTTP client for one server; safe to share between threads."""

    def __init__(self, url: str, *, redirects: bool = True) -> None:
        self.pool = _create_pool(url)
        self._max_redirects = MAX_REDIRECTS if redirects else 0

    def request(
        self,
        method: str,
        url: str,
        *,
        where: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        byte_range: ByteRange | None = None,
        max_bytes: int = MAX_GET_BYTES,
    ) -> HttpResponse:
        """Send a request, retrying transient failures, and return the response whatever its status.

        A server that is unreachable, or that sends more than the range or `max_bytes`, raises UnavailableError at
        `where`. A body is read only with status 200 or 206, and is never decompressed.
        """
        sent = dict(headers or {})
        if byte_range:
            sent["Range"] = f"bytes={byte_range.start}-{byte_range.start + byte_range.length - 1}"
        BODY_BYTES.set(byte_range.start + byte_range.length if byte_range else max_bytes)
        started = time.monotonic()
        for attempt in count():
            try:
                response, error = self._request_once(method, url, sent, body, byte_range, max_bytes), None
                if response.status not in _RETRYABLE_STATUSES:
                    break
            except HTTPError as failure:
                error = failure
            is_permanent = isinstance(error, _PERMANENT)
            if is_permanent or attempt == RETRIES or time.monotonic() - started > RETRY_DEADLINE_S:
                break
            time.sleep(0.2 * 2**attempt * random.uniform(0.5, 1.0))
        if error:
            what = f"{_describe_failure(error)} ({pluralize(attempt + 1, 'attempt')})"
            raise UnavailableError(what, where=where) from error
        return response

    def _request_once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        byte_range: ByteRange | None,
        max_bytes: int,
    ) -> HttpResponse:
        try:
            response, path = self._follow_redirects(method, url, headers, body)
            try:
                data = _read_body(response, byte_range, max_bytes)
            except BaseException:
                response.close()
                raise
        except (ValueError, HTTPException) as error:  # http.client raises them for some malformed responses
            if isinstance(error, HTTPError):
                raise
            raise _InvalidResponseError("server sent an invalid response") from error
        response.release_conn()
        return HttpResponse(response.status, response.headers, data, path)

    def _follow_redirects(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[BaseHTTPResponse, str]:
        """Send a request; return the response and the URL path after redirects. urllib3 would read their bodies."""
        for redirects in count():
            response = self.pool.urlopen(
                method,
                url,
                body=body,
                headers=headers,
                retries=False,
                redirect=False,
                timeout=Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
                preload_content=False,
                decode_content=False,
            )
            location = response.get_redirect_location()
            if not location or not self._max_redirects or method not in ("GET", "HEAD"):
                return response, urlsplit(url).path
            _discard_body(response)
            if redirects == self._max_redirects:
                raise _InvalidResponseError(f"server redirected more than {self._max_redirects} times")
            target = _join_redirect(url, location)
            if _origin(target) != _origin(url):
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            url = target
        raise AssertionError("count() never ends")


def _join_redirect(url: str, location: str) -> str:
    """Return the URL that a redirect points to."""
    try:
        target = urljoin(url, location)
        if urlsplit(target).scheme in ("http", "https") and urlsplit(target).hostname:
            return parse_url(target).url
    except ValueError:
        pass
    raise _InvalidResponseError("server redirected to an invalid URL")


def _origin(url: str) -> tuple[str, str | None, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme]


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
        return limit_responses(PoolManager(maxsize=32))
    auth = urlsplit(proxy)
    credentials = f"{auth.username}:{auth.password}" if auth.username else None
    return limit_responses(ProxyManager(proxy, maxsize=32, proxy_headers=make_headers(proxy_basic_auth=credentials)))


def _read_body(response: BaseHTTPResponse, byte_range: ByteRange | None, max_bytes: int) -> bytes:
    """Read a body; if the server ignored Range, skip to the range without keeping what precedes it."""
    if response.status not in (200, 206):
        _discard_body(response)
        return b""
    if byte_range is None:
        if response.status == 206 and response.length_remaining != 0:  # 0 is that of HEAD
            raise _WrongRangeError("server sent a part of the object, requested the whole")
        return _read_whole(response, max_bytes)
    if response.status == 206:
        _check_content_range(response.headers.get("Content-Range", ""), byte_range)
        return _read_whole(response, byte_range.length)
    for start in range(0, byte_range.start, _READ_BYTES):
        _read_up_to(response, min(_READ_BYTES, byte_range.start - start))
    data = _read_up_to(response, byte_range.length)
    response.close()
    return data


def _read_whole(response: BaseHTTPResponse, max_bytes: int) -> bytes:
    """Read a body to its end; raise as soon as it is known to exceed `max_bytes`."""
    length = response.length_remaining
    if length is not None and length <= max_bytes:
        return response.read()
    if length is None:
        data = _read_up_to(response, max_bytes + 1)
        if len(data) <= max_bytes:
            return data
        del data  # the traceback of the error would keep it in memory
    raise ResponseTooLargeError(f"response is longer than {max_bytes:,} bytes, the maximum for this request")


def _discard_body(response: BaseHTTPResponse) -> None:
    """Read a short body, so that the connection can be used again; close the connection otherwise."""
    if response.length_remaining is not None and response.length_remaining <= _MAX_DISCARDED_BYTES:
        response.read()
        response.release_conn()
    else:
        response.close()


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
    with BytesIO() as data:  # unlike a list of chunks, it needs no copy at the end
        while length and (chunk := response.read(min(length, _READ_BYTES))):
            length -= data.write(chunk)
        return data.getvalue()


def _describe_failure(error: HTTPError) -> str:
    if isinstance(error, (_WrongRangeError, SlowResponseError, *_PERMANENT)):
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
