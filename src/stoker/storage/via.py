"""The way through a shared cache: an origin's URL as the cache has it."""

from __future__ import annotations

import json

from stoker.errors import InputError, UnavailableError
from stoker.storage import open_store, shown

_TOLD = "-/origins"


def through(url: str, via: str) -> str:
    """Give the URL at which a cache serves what lies at `url`; refuse what it does not serve."""
    where = shown(via)
    try:
        told = json.loads(open_store(via).get(_TOLD))
        origins = {str(one["url"]).rstrip("/"): str(one["name"]) for one in told}
    except (ValueError, TypeError, KeyError, InputError) as error:
        raise UnavailableError(
            "is not a cache of stoker's", where=where, hint="start one: stoker data cache"
        ) from error
    plain = shown(url)
    for origin in sorted(origins, key=len, reverse=True):
        if plain.rstrip("/") == origin or plain.startswith(f"{origin}/"):
            name, rest = origins[origin], plain.removeprefix(origin).strip("/")
            return "/".join(part for part in (via.rstrip("/"), name, rest) if part)
    raise InputError(
        f"this cache does not serve {plain}", where=where, hint=f"its origins are {', '.join(origins) or 'none'}"
    )
