"""The HTTP client under http(s):// and gs://: kept connections, bounded retries, one sentence per failure."""

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
from urllib3.exceptions import HTTPError, NameResolutionError, SSLError

from stoker.errors import (
    AccessError,
    DataFaultError,
    NotFoundError,
    StokerError,
    UnavailableError,
)

RETRIES = 4
PATIENCE_S = 15.0
"""No retry begins later than this after the first request."""

_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_PIECE = 1 << 20
_SENT = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+|\*)")
# Only redirects: what else is tried again is decided here, because a body can break off too.
_REDIRECTS = Retry(total=5, connect=0, read=0, status=0, other=0, redirect=5)
_NO_REDIRECTS = Retry(total=0, connect=0, read=0, status=0, other=0, redirect=0, raise_on_redirect=False)


class Answer(NamedTuple):
    """What a server answered; `path` is where the redirects ended."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    path: str


class Window(NamedTuple):
    """A range of bytes to ask for."""

    start: int
    length: int


class _WrongBytesError(HTTPError):
    """An answer with other bytes than were asked for; a cache on the way may do better next time."""


class Client:
    """Asks one server; safe to share between threads."""

    def __init__(self, url: str, *, redirects: bool = True) -> None:
        self.pool = _pool(url)
        self._retries = _REDIRECTS if redirects else _NO_REDIRECTS

    def ask(
        self,
        method: str,
        url: str,
        *,
        where: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        window: Window | None = None,
    ) -> Answer:
        """Ask, and again if that may help; what the answer says is for the caller to judge.

        A silent server is reported as `where`.
        """
        sent = dict(headers or {})
        if window:
            sent["Range"] = f"bytes={window.start}-{window.start + window.length - 1}"
        began = time.monotonic()
        for attempt in count():
            try:
                answer, error = self._ask_once(method, url, sent, body, window), None
                if answer.status not in _RETRYABLE:
                    break
            except HTTPError as failure:
                error = failure
            if attempt == RETRIES or time.monotonic() - began > PATIENCE_S:
                break
            time.sleep(0.2 * 2**attempt * random.uniform(0.5, 1.0))
        if error:
            raise UnavailableError(_silence(error), where=where, hint=f"tried {attempt + 1} times") from error
        return answer

    def _ask_once(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, window: Window | None
    ) -> Answer:
        response = self.pool.urlopen(
            method,
            url,
            body=body,
            headers=headers,
            retries=self._retries,
            timeout=Timeout(connect=3.0, read=30.0),
            preload_content=False,
            decode_content=False,
        )
        try:
            data = _read(response, window)
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return Answer(response.status, response.headers, data, urlsplit(response.geturl() or url).path)


def refusal(answer: Answer, where: str, *, missing: str = "no such object", tried: str) -> StokerError:
    """Turn an answer that is not good into the error to raise."""
    match answer.status:
        case 401 | 403:
            return AccessError("permission denied", where=where, hint=tried)
        case 404 | 410:
            return NotFoundError(missing, where=where)
        case status:
            return UnavailableError(f"the server answered {status}", where=where)


def exactly(window: Window, answer: Answer, where: str) -> bytes:
    """Give the bytes of a window, or say that the object ends too early."""
    got = 0 if answer.status == 416 else len(answer.body)
    if got != window.length:
        raise DataFaultError(f"wanted {window.length} bytes from {window.start}, got {got}", where=where)
    return answer.body


def _pool(url: str) -> PoolManager:
    """Keep connections to a server, through the proxy that the environment names for it."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if not proxy or (parts.hostname and proxy_bypass(parts.hostname)):
        return PoolManager(maxsize=32)
    auth = urlsplit(proxy)
    login = f"{auth.username}:{auth.password}" if auth.username else None
    return ProxyManager(proxy, maxsize=32, proxy_headers=make_headers(proxy_basic_auth=login))


def _read(response: BaseHTTPResponse, window: Window | None) -> bytes:
    """Read a body; from a server that ignores ranges the window alone, without holding what precedes it."""
    if window is not None and response.status == 206:
        _check_sent(response.headers.get("Content-Range", ""), window)
    if window is None or response.status != 200:
        return response.read()
    for start in range(0, window.start, _PIECE):
        _take(response, min(_PIECE, window.start - start))
    data = _take(response, window.length)
    response.close()
    return data


def _check_sent(told: str, window: Window) -> None:
    """Refuse bytes from elsewhere, and fewer than there are; what lies behind an object's end cannot be sent."""
    sent = _SENT.fullmatch(told)
    if sent is None:
        raise _WrongBytesError(f"the server does not say which bytes it sent, asked from {window.start}")
    if int(sent[1]) != window.start:
        raise _WrongBytesError(f"the server sent bytes from {sent[1]}, asked from {window.start}")
    last = window.start + window.length - 1
    if sent[3] != "*" and int(sent[2]) != min(last, int(sent[3]) - 1):
        raise _WrongBytesError(f"the server sent bytes to {sent[2]} of {sent[3]}, asked to {last}")


def _take(response: BaseHTTPResponse, length: int) -> bytes:
    data = response.read(length)
    while len(data) < length and (more := response.read(length - len(data))):
        data += more
    return data


def _silence(error: HTTPError) -> str:
    if isinstance(error, _WrongBytesError):
        return str(error)
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, NameResolutionError):
        return "no such host"
    if isinstance(reason, SSLError):
        return "the server's certificate cannot be trusted"
    return "the server does not answer"
