"""ASGI middleware that bounds and counts requests: host, token, size of the body, security headers, metrics.

Every response passes through here, so that also an error has a sentence, the headers, and its place in the metrics.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from stoker.core.units import format_bytes
from stoker.model_server.metrics import ServerMetrics
from stoker.model_server.settings import HEALTH_PATH, ModelServerSettings
from stoker.serve.auth import is_authorized
from stoker.serve.loopback import is_loopback_header

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_TOTAL_BYTES = 512 << 20
"""Bodies of all requests together."""
BODY_TIMEOUT_S = 60.0
DISCARD_BYTES, DISCARD_S = 256 << 20, 10.0
"""How much of a rejected body is read, so that the client can read the response before the connection is closed."""
RETRY_SOON = {"retry-after": "1"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class RejectedError(Exception):
    """A request that is answered without the application."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers or {}


class RequestGuard:
    """Middleware around the application; `get_token` returns the current token, or None if none is required."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ModelServerSettings,
        metrics: ServerMetrics,
        get_token: Callable[[], str | None],
    ) -> None:
        self._app, self._settings, self._metrics, self._get_token = app, settings, metrics, get_token
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        self._metrics.in_flight += 1

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
            await send(message)

        body = _Body(receive, scope)
        try:
            self._check(scope)
            await self._read(body)
            await self._app(scope, body.replay(), send_with_headers)
        except RejectedError as rejected:
            await _send_error(send_with_headers, rejected)
        finally:
            self._held_bytes -= body.held
            self._metrics.in_flight -= 1
            seconds = time.perf_counter() - started
            self._metrics.add_request(_endpoint(scope["path"]), status, seconds)
            if self._settings.access_log:
                client = (scope.get("client") or ("-",))[0]
                log.info('%s "%s %s" %d %.1f ms', client, scope["method"], scope["path"], status, seconds * 1e3)

    def _check(self, scope: Scope) -> None:
        """Raise RejectedError unless the host and the token are right; the health check needs neither."""
        if scope["path"] == HEALTH_PATH:
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        token = self._get_token()
        if token is not None:
            if not is_authorized(headers.get(b"authorization", ""), token):
                challenge = {"www-authenticate": 'Basic realm="stoker model server", charset="UTF-8"'}
                raise RejectedError(401, "this server requires a token: send it as a Bearer token", challenge)
        elif self._settings.check_host and not is_loopback_header(headers.get(b"host", "")):
            raise RejectedError(421, "this server only accepts requests to localhost")

    async def _read(self, body: _Body) -> None:
        """Read a body within the limits of size, memory and time."""
        limit = self._settings.max_body_bytes
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not body.is_complete and max(body.declared, body.size) <= limit:
                    self._held_bytes += await body.read()
                    if self._held_bytes > MAX_TOTAL_BYTES:
                        raise RejectedError(503, "too many large requests at once; try again later", RETRY_SOON)
        except TimeoutError as error:
            raise RejectedError(408, f"request body did not arrive within {BODY_TIMEOUT_S:g} s") from error
        if max(body.declared, body.size) > limit:
            self._held_bytes -= body.forget()
            await body.discard()
            raise RejectedError(413, f"request body is larger than {format_bytes(limit)}, the limit of this server")


class _Body:
    """The body of a request, as it arrives."""

    def __init__(self, receive: Receive, scope: Scope) -> None:
        self._receive = receive
        self.declared = int(next((value for name, value in scope["headers"] if name == b"content-length"), b"0"))
        self._parts: list[bytes] = []
        self.size = self.held = 0
        """Bytes that have arrived, and those in memory."""
        self.is_complete = False

    async def read(self) -> int:
        """Read and keep the next part; return its size."""
        part = await self._next()
        self._parts.append(part)
        self.held += len(part)
        return len(part)

    def forget(self) -> int:
        """Free what was read; return its size."""
        self._parts.clear()
        held, self.held = self.held, 0
        return held

    async def discard(self) -> None:
        """Read on without keeping anything, for a bounded time."""
        if self.declared > DISCARD_BYTES:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while not self.is_complete and self.size <= DISCARD_BYTES:
                    await self._next()

    def replay(self) -> Receive:
        """Return a `receive` that delivers the body again."""
        messages: list[Message] = [{"type": "http.request", "body": b"".join(self._parts), "more_body": False}]
        self._parts.clear()

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        return receive

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise RejectedError(400, "client disconnected")
        part: bytes = message.get("body", b"")
        self.size += len(part)
        self.is_complete = not message.get("more_body", False)
        return part


async def _send_error(send: Send, rejected: RejectedError) -> None:
    body = json.dumps({"error": str(rejected)}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **rejected.headers}
    if rejected.status in (408, 413, 503):
        headers["connection"] = "close"
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": rejected.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _endpoint(path: str) -> str:
    """Return the kind of a path, so that the number of metrics is bounded."""
    if path.startswith("/v1/models/"):
        return "predict" if path.endswith(":predict") else "metadata" if path.endswith("/metadata") else "status"
    return path[1:] if path in ("/classify", HEALTH_PATH, "/metrics") else "page" if path == "/" else "other"
