"""The web server of the dashboard: the API, live updates and the page, with access checks on every request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker import __version__
from stoker.dashboard import routes, stream
from stoker.dashboard.export import bundle_scripts
from stoker.dashboard.notify import Notifier
from stoker.dashboard.runs import RunCatalog
from stoker.dashboard.security import Access, add_headers
from stoker.errors import ConflictError, InputError, NotFoundError, StokerError

STATIC = Path(__file__).with_name("static")
STREAM_INTERVAL_S = 1.0
KEEP_ALIVE_S = 15.0


def create_app(catalog: RunCatalog, access: Access, notifier: Notifier | None = None) -> Starlette:
    """Return the application."""
    document = msgspec.json.encode(routes.openapi(__version__))
    script = bundle_scripts("main.js")

    async def read_openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    async def login(request: Request) -> Response:
        return access.login(request.query_params.get("key", ""))

    async def read_page(_: Request) -> Response:
        return Response(
            await run_in_threadpool((STATIC / "index.html").read_bytes), media_type="text/html; charset=utf-8"
        )

    async def read_script(_: Request) -> Response:
        return Response(script, media_type="text/javascript; charset=utf-8")

    async def read_stream(request: Request) -> Response:
        return await _open_stream(catalog, request)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(_notify_forever(notifier)) if notifier else None
        yield
        if task:
            task.cancel()

    table: list[BaseRoute] = [Route(one.path, _endpoint(catalog, one), methods=[one.method]) for one in routes.API]
    table += [
        Route(routes.STREAM_PATH, read_stream),
        Route("/api/openapi.json", read_openapi),
        Route("/login", login),
        Route("/", read_page),
        Route("/static/main.js", read_script),  # with its imports: one request instead of three rounds
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = Middleware(_Guard, access=access)
    app = Starlette(
        routes=table,
        middleware=[guard, Middleware(GZipMiddleware, minimum_size=1024, compresslevel=1)],
        exception_handlers={404: _not_found, 405: _not_allowed, Exception: _server_error},
        lifespan=lifespan,
    )
    app.state.stopping = asyncio.Event()
    return app


class DashboardServer(uvicorn.Server):
    """Server that ends the streams of live updates before it stops."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="critical", access_log=False, timeout_graceful_shutdown=2, server_header=False
            )
        )
        self._stopping: asyncio.Event = app.state.stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to serve."""
        self._stopping.set()
        await super().shutdown(sockets)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until the process is interrupted."""
    DashboardServer(app).run([listener])


def _endpoint(catalog: RunCatalog, route: routes.ApiRoute) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            query = msgspec.convert(dict(request.query_params), route.query, strict=False)
            return await run_in_threadpool(answer, request.path_params.get("run"), query)
        except msgspec.ValidationError as error:
            return _error(400, str(error))
        except NotFoundError as error:
            return _error(404, str(error))
        except ConflictError as error:
            return _error(409, str(error))
        except InputError as error:
            return _error(400, str(error))
        except (StokerError, OSError) as error:
            return _error(404, f"the run cannot be read: {error}")

    def answer(run_id: str | None, query: Any) -> Response:
        found = route.handle(catalog, None if run_id is None else catalog.find(run_id), query)
        if isinstance(found, routes.Text):
            headers = {"Content-Disposition": f'attachment; filename="{found.filename}"'} if found.filename else {}
            return Response(found.content, media_type=found.content_type, headers=headers)
        return Response(msgspec.json.encode(found), media_type="application/json")

    return endpoint


async def _open_stream(catalog: RunCatalog, request: Request) -> Response:
    """Send what a run gains, from the position in Last-Event-ID on, else from now on."""
    try:
        run = catalog.find(request.path_params["run"])
        position = stream.StreamPosition.parse(
            request.headers.get("last-event-id", "") or request.query_params.get("from", "")
        )
        if position is None:
            position = await run_in_threadpool(stream.current_position, run)
    except (StokerError, OSError) as error:
        return _error(404, str(error))

    stopping: asyncio.Event = request.app.state.stopping

    async def messages(position: stream.StreamPosition) -> AsyncIterator[bytes]:
        loop, sent_at, previous = asyncio.get_running_loop(), 0.0, b""
        while not stopping.is_set() and not await request.is_disconnected():
            try:
                update, after = await run_in_threadpool(stream.read_update, run, position)
            except (StokerError, OSError):
                return
            state = msgspec.json.encode(msgspec.structs.replace(update.run, elapsed_s=0.0, goodput=None, cost=None))
            if after != position or state != previous:
                yield stream.format_message(update, after)
                position, previous, sent_at = after, state, loop.time()
            elif loop.time() - sent_at > KEEP_ALIVE_S:
                yield b": alive\n\n"
                sent_at = loop.time()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), STREAM_INTERVAL_S)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages(position), media_type="text/event-stream", headers=headers)


class _Guard:
    """Middleware that checks access, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                add_headers(headers)
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        refusal = None if scope["path"] == "/login" else self._access.check(Request(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)


async def _notify_forever(notifier: Notifier) -> None:
    while True:
        await run_in_threadpool(notifier.check)
        await asyncio.sleep(notifier.interval_s)


def _error(code: int, text: str) -> Response:
    return JSONResponse({"error": text}, code)


async def _not_found(_: Request, __: Exception) -> Response:
    return _error(404, "not found")


async def _not_allowed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": "method not allowed"}, 405, getattr(error, "headers", None))


async def _server_error(_: Request, __: Exception) -> Response:
    return _error(500, "internal error")
