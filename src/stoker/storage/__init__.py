"""Object storage by URL: local folders, http(s)://, s3:// and gs:// behind one small protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote

from stoker.core.registry import Registry
from stoker.core.units import format_bytes
from stoker.errors import InputError, UnavailableError

MAX_GET_BYTES = 128 << 20
"""The default limit of an object that is read as a whole; a manifest has about 250 bytes per shard."""
MAX_PAGE_BYTES = 32 << 20
"""The limit of one page of a listing: nginx lists 250,000 files in less."""
MAX_LISTED_OBJECTS = 1_000_000
MAX_LISTING_REQUESTS = 10_000
"""The limit of the pages of one listing. The requests for sizes that an HTML page lacks count as objects."""


class Entry(NamedTuple):
    """One object of a listing: its name relative to the store's URL, and its size in bytes."""

    name: str
    size: int


class ObjectMeta(NamedTuple):
    """The metadata that identifies one version of an object: its size and its ETag (empty if the store has none)."""

    size: int
    etag: str


FolderListing = tuple[list[str], list[tuple[str, int | None]]]
"""The subfolders and the files of one folder, as names relative to it; a size is None where the server omits it."""


class Store(Protocol):
    """A folder of objects. Object names are relative to its URL and separated by `/`."""

    url: str

    def get(self, name: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Read a whole object; raise UnavailableError if it is larger than `max_bytes`."""
        ...

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, raise ObjectChangedError if the version differs."""
        ...

    def size(self, name: str) -> int:
        """Return an object's size in bytes."""
        ...

    def head(self, name: str) -> ObjectMeta:
        """Return an object's metadata without reading it."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List all objects whose name starts with `prefix`, recursively and sorted by name."""
        ...

    def put(self, name: str, source: bytes | Path) -> None:
        """Write an object atomically; a source file is moved, so it no longer exists afterwards."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object; a missing one is not an error."""
        ...


STORES: Registry[Callable[[str], Store]] = Registry(
    "store",
    {
        "file": "stoker.storage.local:LocalStore",
        "gs": "stoker.storage.gcs:open_gcs",
        "http": "stoker.storage.http:HttpStore",
        "https": "stoker.storage.http:HttpStore",
        "s3": "stoker.storage.s3:S3Store",
    },
)


def open_store(url: str) -> Store:
    """Open the store at a path or URL without sending a request yet."""
    scheme = _UrlParts.parse(url).scheme
    try:
        store = STORES.get(scheme)
    except InputError as error:
        schemes = ", ".join(f"{name}://" for name in STORES.names())
        raise InputError(
            f"unsupported URL scheme {scheme!r}", where=redacted(url), hint=f"supported schemes: {schemes}"
        ) from error
    return store(url)


def open_writable(url: str) -> Store:
    """Open a store for writing; raise InputError for http(s), which is read-only."""
    if _UrlParts.parse(url).scheme in ("http", "https"):
        raise read_only_error(url)
    return open_store(url)


def read_only_error(url: str) -> InputError:
    """Return the error for a write to a read-only store."""
    return InputError(
        "web servers are read-only",
        where=redacted(url),
        hint="write to a local directory, an s3:// URL or a gs:// URL, and serve it over HTTP",
    )


def redacted(url: str) -> str:
    """Return a path or URL without credentials, query and fragment, safe to log."""
    parts = _UrlParts.parse(url)
    if parts.scheme not in ("http", "https"):
        return url
    host, slash, path = parts.path.partition("/")
    return f"{parts.start}{host.rpartition('@')[2]}{slash}{path.partition('#')[0]}"


def too_large_error(where: object, max_bytes: int) -> UnavailableError:
    """Return the error for an object that is too large to be read as a whole."""
    return UnavailableError(f"larger than {format_bytes(max_bytes)}, the limit for this kind of object", where=where)


class ListingLimits:
    """Count the requests and objects of one listing, so that a listing that never ends raises UnavailableError."""

    def __init__(self, where: str) -> None:
        self._where, self._requests, self._objects = redacted(where), 0, 0

    def add(self, *, requests: int = 0, objects: int = 0) -> None:
        """Count requests and objects; raise if there are too many of either."""
        self._requests += requests
        self._objects += objects
        if self._objects > MAX_LISTED_OBJECTS:
            raise self._error(f"listing has more than {MAX_LISTED_OBJECTS:,} objects")
        if self._requests > MAX_LISTING_REQUESTS:
            raise self._error(f"listing needs more than {MAX_LISTING_REQUESTS:,} requests")

    def _error(self, what: str) -> UnavailableError:
        return UnavailableError(what, where=self._where, hint="pass the URL of a subdirectory, or a brace pattern")


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of one object into the URL of its folder and its name there."""
    parts = _UrlParts.parse(url)
    folder, slash, name = parts.path.rpartition("/")
    if parts.scheme == "file":
        folder = folder or slash or "."
    if name in ("", ".", "..") or not folder:
        raise InputError("does not name an object", where=url, hint="pass the path of a file, not of a directory")
    return str(parts._replace(path=folder)), unquote(name) if parts.percent_encoded else name


def join_url(url: str, name: str) -> str:
    """Return the URL of an object in the folder at `url`."""
    parts = _UrlParts.parse(url)
    name = quote(name) if parts.percent_encoded else name
    return str(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def local_path(url: str) -> Path | None:
    """Return the path of a plain path or file:// URL; None for any other scheme."""
    parts = _UrlParts.parse(url)
    if parts.scheme != "file":
        return None
    if not parts.percent_encoded:
        return Path(parts.path)
    path = parts.path.removeprefix("localhost")
    if not path.startswith("/"):
        raise InputError("file:// URL names another host", where=url, hint="use file:///absolute/path")
    return Path(unquote(path))


def check_name(name: str) -> str:
    """Return an object name unchanged; raise InputError if it is empty, absolute or escapes the store."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise InputError("invalid object name", where=repr(name), hint="use a relative name such as train/00000.tar")
    return name


def prefix_folder(prefix: str) -> str:
    """Return the folder that contains every name with this prefix; empty for the store's root."""
    folder = prefix.rpartition("/")[0]
    return check_name(folder) if folder else ""


def read_chunks(store: Store, name: str, size: int, chunk: int = 8 << 20) -> Iterator[bytes]:
    """Read an object of `size` bytes in chunks, so that memory stays bounded."""
    for start in range(0, size, chunk):
        yield store.range(name, start, min(chunk, size - start))


def download(store: Store, name: str, path: Path) -> None:
    """Download an object to a local file, which is created atomically."""
    from stoker.storage.local import LocalStore

    LocalStore(str(path.parent)).write(path.name, read_chunks(store, name, store.size(name)))


class _UrlParts(NamedTuple):
    """A path or URL split into three parts that concatenate to it; `start` is empty for a plain path."""

    start: str
    path: str
    query: str

    @classmethod
    def parse(cls, url: str) -> _UrlParts:
        if not url:
            raise InputError("path or URL is empty")
        scheme, colon, rest = url.partition("://")
        if not colon or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
            return cls("", url, "")
        if scheme.lower() not in ("http", "https"):
            return cls(scheme.lower() + colon, rest, "")
        path, mark, query = rest.partition("?")
        return cls(scheme.lower() + colon, path, mark + query)

    @property
    def scheme(self) -> str:
        return self.start.removesuffix("://") or "file"

    @property
    def percent_encoded(self) -> bool:
        """Whether the path is percent-encoded; the keys of buckets are not."""
        return self.start in ("file://", "http://", "https://")

    def __str__(self) -> str:
        return "".join(self)
