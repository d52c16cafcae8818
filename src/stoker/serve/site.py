"""What both engines have in front of the data: the token, and pages about the server itself below `/-/`."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.errors import InputError
from stoker.serve.http import Handler, Reply, Request
from stoker.serve.stats import Stats

ABOUT = "/-/"
MIN_TOKEN = 16


class Site:
    """Asks for the token, answers about itself, and hands on the rest."""

    def __init__(
        self,
        inner: Handler,
        stats: Stats,
        *,
        token: str | None,
        pages: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        self._inner, self._stats, self._pages = inner, stats, pages or {}
        self.token = token

    def __call__(self, request: Request) -> Reply:
        """Answer one request."""
        is_about = request.path.startswith(ABOUT)
        if is_about and request.method not in ("GET", "HEAD"):
            return Reply.text(405, Allow="GET, HEAD")
        if request.path == f"{ABOUT}healthy":
            return Reply.text(200, "ok")
        if self.token is not None and not is_allowed(request.headers.get("authorization", ""), self.token):
            return Reply.text(401, "a token is needed", WWW_Authenticate='Bearer, Basic realm="stoker"')
        if is_about:
            return self._about(request.path.removeprefix(ABOUT))
        return self._inner(request)

    def _about(self, page: str) -> Reply:
        if page == "metrics":
            data, kind = self._stats.metrics().encode(), "text/plain; version=0.0.4"
        elif page == "stats" or page in self._pages:
            told = self._stats.told() if page == "stats" else self._pages[page]()
            data, kind = json.dumps(told).encode(), "application/json"
        else:
            return Reply.text(404, "no such page")
        return Reply(200, {"Content-Type": kind}, (data,), len(data))


def is_allowed(authorization: str, token: str) -> bool:
    """Compare a bearer token, or the password of a login, in a time that does not tell how much of it is right."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            given = ""
    elif kind.lower() != "bearer":
        given = ""
    return hmac.compare_digest(given.strip().encode(), token.encode())


def read_token(path: Path) -> str:
    """Read a token from a file; refuse one that could be guessed."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not plain text"
        raise InputError(f"the token cannot be read: {(what or '').lower()}", where=path) from error
    if len(token) < MIN_TOKEN or not token.isprintable() or any(letter.isspace() for letter in token):
        raise InputError(
            f"a token is {MIN_TOKEN} or more letters without spaces",
            where=path,
            hint="make one: openssl rand -hex 24",
        )
    return token
