"""Token authentication in nginx: compare the Authorization header without storing the token."""

from __future__ import annotations

import base64
import hashlib
import re

from stoker.errors import InputError

BASIC_AUTH_USER = "stoker"
"""The user name for clients that only support Basic auth; the password is the token."""

_TOKEN = re.compile(r"[!-~]{1,1024}")


def token_map(token: str | None) -> str:
    """Return the maps that compare the Authorization header as a digest keyed by the token.

    nginx compares byte by byte and stops at the first difference; as both sides are hashed, the timing reveals
    nothing about the token. It also keeps the token itself out of the configuration.
    """
    if token is None:
        return ""
    if not _TOKEN.fullmatch(token):
        raise InputError("a token must be 1 to 1024 printable ASCII characters without spaces")
    credentials = base64.b64encode(f"{BASIC_AUTH_USER}:{token}".encode()).decode()
    return f"""\
# The scheme is case-insensitive, the credentials are not.
map $http_authorization $stoker_credentials {{
    default "";
    "~*^bearer +(?<stoker_bearer>[^ ]+) *$" "Bearer $stoker_bearer";
    "~*^basic +(?<stoker_basic>[^ ]+) *$" "Basic $stoker_basic";
}}
map $stoker_credentials $stoker_digest {{
    default "{_token_digest(token, f"Bearer {token}")}";
    "~^Basic " "{_token_digest(token, f"Basic {credentials}")}";
}}
map "$secure_link$uri" $stoker_refused {{
    default 1;
    "~^1/" 0;
    /-/healthy 0;
}}
"""


def token_check(token: str | None) -> str:
    """Return the directives that respond with 401 to a request without the token."""
    if token is None:
        return ""
    return f"""\
secure_link $stoker_digest;
secure_link_md5 "{_token_key(token)}$stoker_credentials";
if ($stoker_refused) {{
    return 401;
}}
"""


def _token_key(token: str) -> str:
    return hashlib.sha256(b"stoker nginx " + token.encode()).hexdigest()


def _token_digest(token: str, header: str) -> str:
    digest = hashlib.md5((_token_key(token) + header).encode(), usedforsecurity=False).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
