"""The way through a shared cache: an origin's URL as the cache has it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from stoker.errors import InputError, UnavailableError
from stoker.storage import open_store, shown


def through(url: str, via: str) -> str:
    """Give the URL at which a cache serves what lies at `url`; refuse what it does not serve."""
    with _ours(via):
        told = json.loads(open_store(via).get("-/origins"))
        origins = {str(one["url"]).rstrip("/"): str(one["name"]) for one in told}
    return through_known(url, via, origins)


def through_known(url: str, via: str, origins: Mapping[str, str]) -> str:
    """Do so for a cache whose origins are known: names by URL."""
    plain = shown(url)
    for origin in sorted(origins, key=len, reverse=True):
        if plain.rstrip("/") == origin or plain.startswith(f"{origin}/"):
            name, rest = origins[origin], plain.removeprefix(origin).strip("/")
            return "/".join(part for part in (via.rstrip("/"), name, rest) if part)
    raise InputError(
        f"this cache does not serve {plain}", where=shown(via), hint=f"its origins are {', '.join(origins) or 'none'}"
    )


def budget(via: str) -> int:
    """Tell how much a cache keeps at most."""
    with _ours(via):
        return int(json.loads(open_store(via).get("-/stats"))["budget"])


@contextmanager
def _ours(via: str) -> Iterator[None]:
    """Say so if what answers is no cache of ours."""
    try:
        yield
    except (ValueError, TypeError, KeyError, InputError) as error:
        raise UnavailableError(
            "is not a cache of stoker's", where=shown(via), hint="start one: stoker data cache"
        ) from error
