"""The HTTP API: TensorFlow Serving's REST protocol, `/classify`, and the page; imports starlette."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from importlib import resources
from typing import Any

from stoker.core.threads import ThreadPool
from stoker.errors import InputError, MissingExtraError, NotFoundError, StokerError
from stoker.model_server.batching import OverloadedError
from stoker.model_server.guard import RETRY_SOON, RequestGuard
from stoker.model_server.images import rank_classes
from stoker.model_server.metrics import ServerMetrics
from stoker.model_server.predict_json import format_response, parse_request
from stoker.model_server.settings import HEALTH_PATH, ModelServerSettings
from stoker.model_server.versions import LoadedVersion, ModelVersions
from stoker.trainers.model_description import FILE_NAME

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError("starlette", "web", purpose="the model server") from error

log = logging.getLogger(__name__)

MAX_TOP, DEFAULT_TOP = 100, 5
PAGE_FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css", "/icon.svg": "icon.svg"}
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def create_app(
    settings: ModelServerSettings,
    versions: ModelVersions,
    metrics: ServerMetrics,
    get_token: Callable[[], str | None] = lambda: None,
) -> Any:
    """Return the ASGI application; it looks for newer versions while it runs."""
    api = ModelApi(settings, versions, metrics)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(versions.watch(settings.poll_s))
        yield
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await versions.close()
        api.close()

    app = Starlette(
        routes=api.routes(),
        exception_handlers={HTTPException: _handle_http_error, Exception: _handle_error},  # type: ignore[dict-item]
        lifespan=lifespan,
    )
    return RequestGuard(app, settings, metrics, get_token)


class ModelApi:
    """The endpoints of one served model."""

    def __init__(self, settings: ModelServerSettings, versions: ModelVersions, metrics: ServerMetrics) -> None:
        self._settings, self._versions, self._metrics = settings, versions, metrics
        # Parsing and decoding happen beside the event loop, in as many threads as there are cores.
        self._pool = ThreadPool(len(os.sched_getaffinity(0)), "stoker-request")

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()

    def routes(self) -> list[Route]:
        """Return the routes."""
        model = "/v1/models/{name}"
        version = model + "/versions/{version}"
        routes = [Route(path, _serve_page, methods=["GET"]) for path in PAGE_FILES]
        for prefix in (version, model):
            routes += [
                Route(prefix + ":predict", _translate_errors(self.predict), methods=["POST"]),
                Route(prefix + ":{verb}", _translate_errors(self.reject_verb), methods=["GET", "POST"]),
                Route(prefix + "/metadata", _translate_errors(self.metadata), methods=["GET"]),
                Route(prefix, _translate_errors(self.status), methods=["GET"]),
            ]
        return [
            *routes,
            Route("/classify", _translate_errors(self.classify), methods=["POST"]),
            Route("/model", _translate_errors(self.describe), methods=["GET"]),
            Route(HEALTH_PATH, self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def predict(self, request: Request) -> Response:
        """Run the model on the tensors of a request."""
        with self._find_version(request).lease() as version:
            body, limit = await request.body(), self._settings.max_body_bytes
            parsed = await self._in_thread(parse_request, body, version.model.signatures, max_bytes=limit)
            outputs = await version.predict(parsed.signature, parsed.inputs)
            return _json_response(await self._in_thread(format_response, parsed, outputs))

    async def reject_verb(self, request: Request) -> Response:
        """Reject `:classify`, `:regress` and the wrong method for `:predict`."""
        if request.path_params["verb"] == "predict":
            return _error_response(405, "send :predict requests with POST", {"allow": "POST"})
        raise NotFoundError(f"unknown operation :{request.path_params['verb']}", hint="use :predict")

    async def classify(self, request: Request) -> Response:
        """Classify the image in the body of a request."""
        top = _parse_top(request.query_params.get("top"))
        with self._versions.get().lease() as version:
            description, decoder = version.model.description, version.decoder
            if description is None or decoder is None:
                raise NotFoundError(
                    f"the model does not say which images it takes: it has no {FILE_NAME}",
                    hint=f"use /v1/models/{self._settings.name}:predict",
                )
            body = await request.body()
            if not body:
                raise InputError("request has no body", hint="send the bytes of an image")
            image = await self._in_thread(decoder.decode, body)
            name = next(iter(version.model.signatures[description.signature].inputs))
            outputs = await version.predict(description.signature, {name: image})
            best = rank_classes(next(iter(outputs.values()))[0], description, top)
            classes = [asdict(score) for score in best]
            return _json_response({"model": self._settings.name, "version": str(version.number), "classes": classes})

    async def status(self, request: Request) -> Response:
        """Return the state of each version."""
        number = self._parse_version(request)
        states = [(version.number, "AVAILABLE", "OK", "") for version in self._versions.loaded]
        states += [(failed.candidate.order, "END", "INTERNAL", failed.reason) for failed in self._versions.failed]
        chosen = [state for state in states if number in (None, state[0])]
        if not chosen:
            raise NotFoundError(f"model {self._settings.name!r} has no version {number}")
        return _json_response(
            {
                "model_version_status": [
                    {"version": str(each), "state": state, "status": {"error_code": code, "error_message": message}}
                    for each, state, code, message in sorted(chosen, reverse=True)
                ]
            }
        )

    async def metadata(self, request: Request) -> Response:
        """Return the signatures of a version."""
        version = self._find_version(request)
        signatures = {name: signature.metadata() for name, signature in version.model.signatures.items()}
        return _json_response(
            {
                "model_spec": {
                    "name": self._settings.name,
                    "signature_name": "",
                    "version": str(version.number),
                },
                "metadata": {"signature_def": {"signature_def": signatures}},
            }
        )

    async def describe(self, request: Request) -> Response:  # noqa: ARG002
        """Return what the page shows: name, version, number of classes and image size."""
        version = self._versions.get()
        description = version.model.description
        image = None if description is None else {"size": description.image.size, "classes": len(description.classes)}
        return _json_response({"name": self._settings.name, "version": str(version.number), "image": image})

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Return 200 while a version is loaded."""
        return Response("ok\n", 200 if self._versions.loaded else 503, media_type="text/plain")

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """Return the metrics for Prometheus."""
        text = self._metrics.render([version.number for version in self._versions.loaded])
        return Response(text, media_type="text/plain; version=0.0.4")

    def _find_version(self, request: Request) -> LoadedVersion:
        return self._versions.get(self._parse_version(request))

    def _parse_version(self, request: Request) -> int | None:
        """Return the version that the path names; raise NotFoundError for another model."""
        name, text = request.path_params["name"], request.path_params.get("version")
        if name != self._settings.name:
            raise NotFoundError(f"unknown model {name!r}", hint=f"this server has {self._settings.name!r}")
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise InputError(f"version must be a number, got {text!r}")
        return int(text)

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **options))


def _translate_errors(endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Wrap an endpoint: errors become a status and a sentence."""

    async def call(request: Request) -> Response:
        try:
            response: Response = await endpoint(request)
        except NotFoundError as error:
            return _error_response(404, str(error))
        except InputError as error:
            return _error_response(400, str(error))
        except OverloadedError as error:
            return _error_response(503, str(error), RETRY_SOON)
        except StokerError as error:
            return _error_response(500, str(error))
        return response

    return call


async def _serve_page(request: Request) -> Response:
    name = PAGE_FILES[request.url.path]
    data = resources.files("stoker.model_server").joinpath("page", name).read_bytes()
    return Response(data, media_type=MEDIA_TYPES[name.rpartition(".")[2]])


async def _handle_http_error(request: Request, error: HTTPException) -> Response:
    what = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed here"}
    return _error_response(error.status_code, what.get(error.status_code, error.detail), dict(error.headers or {}))


async def _handle_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _error_response(500, f"the model failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _parse_top(text: str | None) -> int:
    if text is None:
        return DEFAULT_TOP
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:4]) <= MAX_TOP):
        raise InputError(f"top must be between 1 and {MAX_TOP}, got {text!r}")
    return int(text)


def _json_response(value: object) -> Response:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Response(body, media_type="application/json")


def _error_response(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps({"error": sentence}).encode(), status, headers, media_type="application/json")
