"""Admin endpoints of the embedded engine: /-/healthy, /-/stats, /-/metrics and more, behind token authentication."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from stoker.serve.auth import is_authorized
from stoker.serve.http import Handler, Request, Response
from stoker.serve.stats import ServerStats

ADMIN_PREFIX = "/-/"


class AdminHandler:
    """Request handler that checks the token, answers the admin endpoints, and passes on all other requests."""

    def __init__(
        self,
        inner: Handler,
        stats: ServerStats,
        *,
        token: str | None,
        pages: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        self._inner, self._stats, self._pages = inner, stats, pages or {}
        self.token = token

    def __call__(self, request: Request) -> Response:
        """Handle one request."""
        is_admin = request.path.startswith(ADMIN_PREFIX)
        if is_admin and request.method not in ("GET", "HEAD"):
            return Response.text(405, Allow="GET, HEAD")
        if request.path == f"{ADMIN_PREFIX}healthy":
            return Response.text(200, "ok")
        if self.token is not None and not is_authorized(request.headers.get("authorization", ""), self.token):
            return Response.text(401, "missing or wrong token", WWW_Authenticate='Bearer, Basic realm="stoker"')
        if is_admin:
            return self._admin_page(request.path.removeprefix(ADMIN_PREFIX))
        return self._inner(request)

    def _admin_page(self, page: str) -> Response:
        if page == "metrics":
            data, kind = self._stats.to_prometheus().encode(), "text/plain; version=0.0.4"
        elif page == "stats" or page in self._pages:
            content = self._stats.to_dict() if page == "stats" else self._pages[page]()
            data, kind = json.dumps(content).encode(), "application/json"
        else:
            return Response.text(404, "no such page")
        return Response(200, {"Content-Type": kind}, (data,), len(data))
