"""Named objects by URL: local folders, http(s), s3:// and gs://, behind one small protocol."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote

from stoker.core.registry import Registry
from stoker.errors import InputError


class Entry(NamedTuple):
    """One object of a store: its name relative to the store's URL, and its size in bytes."""

    name: str
    size: int


class Tag(NamedTuple):
    """What tells one version of an object from another: its size, and a text of the store's, empty if it has none."""

    size: int
    etag: str


Children = tuple[list[str], list[tuple[str, int | None]]]
"""The folders of a folder, and its files with their sizes where these are told; names without the folder's."""


class Store(Protocol):
    """A folder of objects. Names are relative, with `/` between their parts."""

    url: str

    def get(self, name: str) -> bytes:
        """Read a whole object."""
        ...

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`; with an `etag`, refuse those of another version."""
        ...

    def size(self, name: str) -> int:
        """Tell an object's size in bytes."""
        ...

    def tag(self, name: str) -> Tag:
        """Tell which version of an object is there."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List all objects whose name starts with `prefix`, in order of name, folders entered."""
        ...

    def put(self, name: str, source: bytes | Path) -> None:
        """Write an object that appears whole or not at all; a file given by its path is gone after."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
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
    """Open the folder of objects at a path or URL; no object is asked for yet."""
    return STORES.get(_Parts.of(url).scheme)(url)


def open_writable(url: str) -> Store:
    """Open a folder of objects to write to; a web server only gives."""
    if _Parts.of(url).scheme in ("http", "https"):
        raise read_only(url)
    return open_store(url)


def read_only(url: str) -> InputError:
    """Say that a store cannot be written to."""
    return InputError(
        "http stores are read-only",
        where=shown(url),
        hint="write to a folder, s3:// or gs://, and serve that",
    )


def shown(url: str) -> str:
    """Give a path or URL as messages may show it: without a password or a token."""
    parts = _Parts.of(url)
    if parts.scheme not in ("http", "https"):
        return url
    host, slash, path = parts.path.partition("/")
    return f"{parts.start}{host.rpartition('@')[2]}{slash}{path.partition('#')[0]}"


def split(url: str) -> tuple[str, str]:
    """Split the URL of one object into the URL of its folder and its name there."""
    parts = _Parts.of(url)
    folder, slash, name = parts.path.rpartition("/")
    if parts.scheme == "file":
        folder = folder or slash or "."
    if name in ("", ".", "..") or not folder:
        raise InputError("names no object", where=url, hint="give the path of one file, not of a folder")
    return str(parts._replace(path=folder)), unquote(name) if parts.quoted else name


def join(url: str, name: str) -> str:
    """Give the URL of one object of a folder."""
    parts = _Parts.of(url)
    name = quote(name) if parts.quoted else name
    return str(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def local_path(url: str) -> Path | None:
    """Give the path behind a plain path or a file:// URL; None for every other scheme."""
    parts = _Parts.of(url)
    if parts.scheme != "file":
        return None
    if not parts.quoted:
        return Path(parts.path)
    path = parts.path.removeprefix("localhost")
    if not path.startswith("/"):
        raise InputError("is not a path of this machine", where=url, hint="write file:///absolute/path")
    return Path(unquote(path))


def checked(name: str) -> str:
    """Return an object's name as it is, or refuse one that could lead out of its store."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise InputError("is not an object's name", where=repr(name), hint="names are relative, like train/00000.tar")
    return name


def folder_of(prefix: str) -> str:
    """Give the folder in which all names with this prefix lie, or nothing for the whole store."""
    folder = prefix.rpartition("/")[0]
    return checked(folder) if folder else ""


def read_chunks(store: Store, name: str, size: int, chunk: int = 8 << 20) -> Iterator[bytes]:
    """Read an object of `size` bytes piece by piece, so that memory stays bounded."""
    for start in range(0, size, chunk):
        yield store.range(name, start, min(chunk, size - start))


def download(store: Store, name: str, path: Path) -> None:
    """Copy an object to a local file, which appears only when it is whole."""
    from stoker.storage.local import LocalStore

    LocalStore(str(path.parent)).write(path.name, read_chunks(store, name, store.size(name)))


class _Parts(NamedTuple):
    """A path or URL in three pieces that join to it again; `start` is empty for a plain path."""

    start: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str) -> _Parts:
        if not url:
            raise InputError("an empty path names no folder")
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
    def quoted(self) -> bool:
        """Whether the path is percent-encoded, as in a true URL; the keys of buckets are not."""
        return self.start in ("file://", "http://", "https://")

    def __str__(self) -> str:
        return "".join(self)
