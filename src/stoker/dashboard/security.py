"""Security of the dashboard: who may read it, and what its pages may load."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from stoker.serve.auth import is_authorized
from stoker.serve.loopback import is_loopback_header

COOKIE = "stoker_dash"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Access:
    """Who may read: anyone who reaches a loopback address, else a client with the token or the one-time link."""

    def __init__(self, token: str | None, *, is_loopback: bool) -> None:
        self._token, self._is_loopback = token, is_loopback
        self._session = secrets.token_urlsafe(32)
        self.link_key: str | None = secrets.token_urlsafe(24) if token else None
        """The key of the one-time link; None once it was used."""

    def check(self, request: Request) -> Response | None:
        """Return the response that refuses a request; None if it is allowed."""
        if self._is_loopback and not is_loopback_header(request.headers.get("host", "").lower()):
            return JSONResponse({"error": "the Host header is not that of this server"}, 421)
        if request.method not in ("GET", "HEAD") and not _is_same_origin(request):
            return JSONResponse({"error": "requests from other sites are not allowed"}, 403)
        if self._token is None:
            return None
        cookie = request.cookies.get(COOKIE, "")
        if hmac.compare_digest(cookie.encode(), self._session.encode()):
            return None
        if is_authorized(request.headers.get("authorization", ""), self._token):
            return None
        return JSONResponse({"error": "a token is required"}, 401, {"WWW-Authenticate": "Bearer"})

    def login(self, key: str) -> Response:
        """Exchange the key of the one-time link for a cookie."""
        known, given = self.link_key or "", key
        if not known or not hmac.compare_digest(known.encode(), given.encode()):
            return PlainTextResponse(
                "This link was already used, or is not valid. Restart stoker dash for a new one.", 403
            )
        self.link_key = None
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, self._session, httponly=True, samesite="strict", path="/")
        return response


def _is_same_origin(request: Request) -> bool:
    """Whether a request is from a page of this server, or not from a page: only browsers send these headers."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
    is_own = origin is None or origin.lower().partition("://")[2] == request.headers.get("host", "").lower()
    return is_own and site in ("same-origin", "none")


def add_headers(headers: Any, extra: Mapping[str, str] = HEADERS) -> None:
    """Add the security headers to a response."""
    for name, value in extra.items():
        headers[name] = value
