"""Where a cache fetches from: named URLs, and nothing else, whatever a request says."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from stoker.errors import AccessError, InputError
from stoker.serve.http import RefusedError, Reply
from stoker.shards.manifest import read_manifest
from stoker.storage import Children, Store, open_store, shown
from stoker.storage.http import HttpStore

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_INDEX = "index"
SCHEMES = ("http://", "https://", "s3://", "gs://")
MANIFEST_FRESH_S = 60.0


class Digest(NamedTuple):
    """What a manifest says of a shard."""

    size: int
    sha256: str


class _Listed(Store, Protocol):
    """A store that lists one folder without entering those in it."""

    def children(self, folder: str) -> Children:
        """Give the names of a folder's folders, and its files with their sizes where these are told."""
        ...


class _Manifest:
    """What was read of one folder's manifest."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fresh_until = 0.0
        self.digests: Mapping[str, Digest] = {}


class Origin:
    """One place that is cached, under a name of its own."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url, self.shown = name, url, shown(url).rstrip("/")
        # Where a redirect leads is not for an origin to say: it may be a place that only this machine can reach.
        self.store: _Listed = (
            HttpStore(url, redirects=False) if url.startswith("http") else cast(_Listed, open_store(url))
        )
        self.silent_until = 0.0
        """Until then it is not asked about what there is a copy of: it did not answer."""
        self._lock = threading.Lock()
        self._manifests: dict[str, _Manifest] = {}

    def digests(self, folder: str) -> Mapping[str, Digest]:
        """Give what the manifest in a folder says of its shards; nothing if there is none."""
        with self._lock:
            manifest = self._manifests.setdefault(folder, _Manifest())
        with manifest.lock:  # one asks, the others wait for it
            if time.monotonic() >= manifest.fresh_until:
                manifest.digests = self._read(folder)
                manifest.fresh_until = time.monotonic() + MANIFEST_FRESH_S
            return manifest.digests

    def _read(self, folder: str) -> Mapping[str, Digest]:
        """Read a manifest; that there is none must be said, no answer is not enough."""
        try:
            found = read_manifest(self.store, f"{folder}/" if folder else "")
        except (InputError, AccessError):  # a bucket that may not be listed denies what is not there
            return {}
        return {shard.name: Digest(shard.bytes, shard.sha256) for shard in found.shards}

    def digest(self, name: str) -> Digest | None:
        """Find what the manifest beside an object says of it."""
        folder, _, base = name.rpartition("/")
        return None if base.endswith(".json") or folder.endswith(_INDEX) else self.digests(folder).get(base)

    def forget_digests(self, name: str) -> None:
        """Read the manifest beside an object anew next time."""
        with self._lock:
            self._manifests.pop(name.rpartition("/")[0], None)

    def listing(self, folder: str) -> Reply:
        """List a folder as nginx does under `autoindex_format json`."""
        folders, files = self.store.children(folder)
        if folder and not folders and not files:
            raise RefusedError(404, "no such folder")
        rows: list[dict[str, object]] = [{"name": name, "type": "directory"} for name in folders]
        for name, size in files:
            row: dict[str, object] = {"name": name, "type": "file"}
            rows.append(row if size is None else {**row, "size": size})
        data = json.dumps(rows).encode()
        return Reply(200, {"Content-Type": "application/json", "X-Cache": "BYPASS"}, (data,), len(data))


class Origins:
    """All origins: one at the root, or each below its name."""

    def __init__(self, urls: Sequence[tuple[str, str]]) -> None:
        self._by_name = {name: Origin(name, url) for name, url in urls}

    def find(self, path: str) -> tuple[Origin, str]:
        """Find the origin of a path, and the object's name there."""
        if "" in self._by_name:
            return self._by_name[""], path[1:]
        first, slash, rest = path[1:].partition("/")
        origin = self._by_name.get(first)
        if origin is None or not slash:
            raise RefusedError(404, f"no such origin: there are {', '.join(self._by_name)}")
        return origin, rest

    def told(self) -> list[dict[str, str]]:
        """Tell names and URLs, without logins."""
        return [{"name": name, "url": origin.shown} for name, origin in self._by_name.items()]


def read_origins(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Read `NAME=URL` or, if there is only one, `URL`."""
    origins: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = "", text
        if not url.startswith(SCHEMES) or not _names_host(url):
            raise InputError(f"--origin is {text!r}, and must be [NAME=]URL with http, https, s3 or gs")
        if name and not _NAME.fullmatch(name):
            raise InputError(f"--origin: {name!r} is no name: lower-case letters, digits and dashes, at most 40")
        if name in origins:
            raise InputError(f"--origin: {name or 'an origin without a name'} comes twice", hint="name each: NAME=URL")
        origins[name] = url.rstrip("/")
    if not origins:
        raise InputError("no --origin is given", hint="for example --origin imagenet=s3://bucket/imagenet")
    if "" in origins and len(origins) > 1:
        raise InputError("several origins need a name each", hint="write --origin NAME=URL")
    return list(origins.items())


def _names_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
