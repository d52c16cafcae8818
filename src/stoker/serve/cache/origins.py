"""Origins of a cache: the named URLs that it fetches from, and their manifests."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from stoker.errors import AccessDeniedError, InputError
from stoker.serve.http import HttpStatusError, Response
from stoker.shards.manifest import read_manifest
from stoker.storage import FolderListing, Store, open_store, redacted
from stoker.storage.cache_url import ORIGIN_SCHEMES
from stoker.storage.http import HttpStore

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_INDEX_SUFFIX = "index"
MANIFEST_FRESHNESS_S = 60.0


class ShardDigest(NamedTuple):
    """Size and digest of a shard, from its manifest."""

    size: int
    sha256: str


class _ListableStore(Store, Protocol):
    """A store that can list a single folder."""

    def list_folder(self, folder: str) -> FolderListing:
        """Return the subfolders and files of one folder."""
        ...


class _CachedManifest:
    """The digests of one folder's manifest, and how long they are fresh."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fresh_until = 0.0
        self.digests: Mapping[str, ShardDigest] = {}


class Origin:
    """One origin of the cache, with its name."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url, self.redacted_url = name, url, redacted(url).rstrip("/")
        # Redirects are not followed: an origin could point to a host that only this machine can reach.
        self.store: _ListableStore = (
            HttpStore(url, redirects=False) if url.startswith("http") else cast(_ListableStore, open_store(url))
        )
        self.unavailable_until = 0.0
        """Do not revalidate cached objects until then, because the origin did not respond."""
        self._lock = threading.Lock()
        self._manifests: dict[str, _CachedManifest] = {}

    def digests(self, folder: str) -> Mapping[str, ShardDigest]:
        """Return the digests in a folder's manifest; empty if it has none."""
        with self._lock:
            manifest = self._manifests.setdefault(folder, _CachedManifest())
        with manifest.lock:  # one thread reads it, the others wait
            if time.monotonic() >= manifest.fresh_until:
                manifest.digests = self._read_digests(folder)
                manifest.fresh_until = time.monotonic() + MANIFEST_FRESHNESS_S
            return manifest.digests

    def _read_digests(self, folder: str) -> Mapping[str, ShardDigest]:
        """Read a manifest; raise if the origin does not respond, which does not mean that there is none."""
        try:
            manifest = read_manifest(self.store, f"{folder}/" if folder else "")
        except (InputError, AccessDeniedError):  # a bucket without list permission denies access to missing objects
            return {}
        return {shard.name: ShardDigest(shard.bytes, shard.sha256) for shard in manifest.shards}

    def digest(self, name: str) -> ShardDigest | None:
        """Return the digest of an object from the manifest in its folder, if it is listed there."""
        folder, _, base = name.rpartition("/")
        return None if base.endswith(".json") or folder.endswith(_INDEX_SUFFIX) else self.digests(folder).get(base)

    def forget_digests(self, name: str) -> None:
        """Read the manifest in an object's folder again next time."""
        with self._lock:
            self._manifests.pop(name.rpartition("/")[0], None)

    def list_folder(self, folder: str) -> Response:
        """List a folder like nginx with `autoindex_format json`."""
        folders, files = self.store.list_folder(folder)
        if folder and not folders and not files:
            raise HttpStatusError(404, "no such directory")
        rows: list[dict[str, object]] = [{"name": name, "type": "directory"} for name in folders]
        for name, size in files:
            row: dict[str, object] = {"name": name, "type": "file"}
            rows.append(row if size is None else {**row, "size": size})
        data = json.dumps(rows).encode()
        return Response(200, {"Content-Type": "application/json", "X-Cache": "BYPASS"}, (data,), len(data))


class Origins:
    """All origins: a single one at the root, or each below its name."""

    def __init__(self, urls: Sequence[tuple[str, str]]) -> None:
        self._by_name = {name: Origin(name, url) for name, url in urls}

    def resolve(self, path: str) -> tuple[Origin, str]:
        """Return the origin of a request path, and the object's name there."""
        if "" in self._by_name:
            return self._by_name[""], path[1:]
        first, slash, rest = path[1:].partition("/")
        origin = self._by_name.get(first)
        if origin is None or not slash:
            raise HttpStatusError(404, f"no such origin; origins are {', '.join(self._by_name)}")
        return origin, rest

    def to_list(self) -> list[dict[str, str]]:
        """Return the names and URLs of the origins, without credentials."""
        return [{"name": name, "url": origin.redacted_url} for name, origin in self._by_name.items()]


def parse_origins(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Parse `NAME=URL` options, or a single `URL`."""
    origins: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = "", text
        if not url.startswith(ORIGIN_SCHEMES) or not _has_host(url):
            raise InputError(f"--origin must be [NAME=]URL with http, https, s3 or gs, got {text!r}")
        if name and not _NAME.fullmatch(name):
            raise InputError(f"--origin: invalid name {name!r}: use at most 40 lowercase letters, digits and '-'")
        if name in origins:
            raise InputError(
                f"--origin: duplicate {name or 'origin without a name'}",
                hint="pass --origin NAME=URL with a different name for each",
            )
        origins[name] = url.rstrip("/")
    if not origins:
        raise InputError("--origin is required", hint="for example: --origin imagenet=s3://bucket/imagenet")
    if "" in origins and len(origins) > 1:
        raise InputError("multiple origins must be named", hint="pass --origin NAME=URL with a different name for each")
    return list(origins.items())


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
