"""Cache URLs: where a shared caching proxy serves the objects of an origin's URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from stoker.errors import AccessDeniedError, InputError, UnavailableError
from stoker.storage import open_store, redacted

ORIGIN_SCHEMES = ("http://", "https://", "s3://", "gs://")
"""URLs that a caching proxy can fetch from."""


class _OriginRow(msgspec.Struct):
    name: str
    url: str


class _Stats(msgspec.Struct):
    budget: int


def find_cache_url(url: str, cache: str) -> str:
    """Return the URL at which the cache serves `url`; raise InputError if `url` is below none of its origins."""
    with _require_stoker_cache(cache):
        rows = msgspec.json.decode(open_store(cache).get("-/origins"), type=list[_OriginRow])
        origins = {row.url.rstrip("/"): row.name for row in rows}
    return build_cache_url(url, cache, origins)


def build_cache_url(url: str, cache: str, origins: Mapping[str, str]) -> str:
    """Return the cache URL of `url` for a cache with known origins, given as {URL: name}."""
    plain = redacted(url)
    for origin in sorted(origins, key=len, reverse=True):
        if plain.rstrip("/") == origin or plain.startswith(f"{origin}/"):
            name, rest = origins[origin], plain.removeprefix(origin).strip("/")
            return "/".join(part for part in (cache.rstrip("/"), name, rest) if part)
    raise InputError(
        f"cache has no origin for {plain}",
        where=redacted(cache),
        hint=f"its origins are {', '.join(origins) or 'none'}",
    )


def read_cache_budget(cache: str) -> int:
    """Return the size limit of a cache in bytes."""
    with _require_stoker_cache(cache):
        return msgspec.json.decode(open_store(cache).get("-/stats"), type=_Stats).budget


@contextmanager
def _require_stoker_cache(cache: str) -> Iterator[None]:
    """Raise UnavailableError if there is no response, or one that is not from a stoker cache."""
    try:
        yield
    except AccessDeniedError:
        raise
    except UnavailableError as error:
        raise UnavailableError(
            f"cannot connect to the cache: {error.what}",
            where=redacted(cache),
            hint="check that it is running and that the URL is correct",
        ) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError, InputError) as error:
        raise UnavailableError(
            "not a stoker cache", where=redacted(cache), hint="start one with: stoker data cache"
        ) from error
