"""Token authentication of data servers and caches: read a token file, check an Authorization header."""

from __future__ import annotations

import base64
import binascii
import hmac
from pathlib import Path

from stoker.errors import InputError

MIN_TOKEN_LENGTH = 16


def is_authorized(authorization: str, token: str) -> bool:
    """Compare a Bearer token or a Basic auth password with the token in constant time."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            credentials = base64.b64decode(credentials, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            credentials = ""
    elif scheme.lower() != "bearer":
        credentials = ""
    return hmac.compare_digest(credentials.strip().encode(), token.encode())


def read_token(path: Path) -> str:
    """Read a token from a file; raise InputError if it is too short or malformed."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise InputError(f"cannot read the token: {(what or '').lower()}", where=path) from error
    if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or any(letter.isspace() for letter in token):
        raise InputError(
            f"a token needs at least {MIN_TOKEN_LENGTH} printable characters without spaces",
            where=path,
            hint="create one with: openssl rand -hex 24",
        )
    return token
