"""HTTP store: folders of a web server, read-only, listed through the server's index pages."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urljoin, urlsplit

import msgspec
from urllib3 import make_headers

from stoker.errors import InputError, NotFoundError, ObjectChangedError, UnavailableError
from stoker.storage import (
    MAX_GET_BYTES,
    MAX_PAGE_BYTES,
    Entry,
    FolderListing,
    ListingLimits,
    ObjectMeta,
    check_name,
    join_url,
    prefix_folder,
    read_only_error,
    redacted,
)
from stoker.storage.http_client import ByteRange, HttpClient, HttpResponse, exact_body, to_error

MAX_FOLDER_DEPTH = 16
BYPASS_CACHES_HEADERS = {"X-Stoker-Bypass": "1", "Cache-Control": "no-cache"}
"""Request headers that make stoker's caches and any other cache on the way revalidate with the origin."""

_MAX_SHOWN_LENGTH = 300


class HttpStore:
    """The files below a URL; its user and password are sent as Basic auth, its query goes with every request."""

    def __init__(self, url: str, *, redirects: bool = True) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise InputError("invalid URL", where=url) from error
        if not parts.hostname:
            raise InputError("URL has no host", where=url)
        self.url = url
        self._root = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._tried = "the URL contains no user:password"
        self._headers: dict[str, str] = {}
        if parts.username or parts.password:
            user = unquote(parts.username or "")
            self._headers = dict(make_headers(basic_auth=f"{user}:{unquote(parts.password or '')}"))
            self._tried = f"tried the user {user!r} of the URL"
        self._client = HttpClient(url, redirects=redirects)
        self.supports_ranges = True
        """Whether every range request so far got a partial response (206), not the whole file."""

    def get(self, name: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Read a whole file; raise UnavailableError if it is larger than `max_bytes`."""
        return self._request("GET", name, max_bytes=max_bytes).body

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`, even from a server without range support."""
        if not length:
            return b""
        byte_range = ByteRange(start, length)
        # If-Match never matches a weak ETag; the response's own validator is compared as well.
        condition = {"If-Match": etag} if etag.startswith('"') else {}
        response = self._request("GET", name, byte_range, condition)
        if response.status == 412 or (etag and _is_other_version(response, etag)):
            raise ObjectChangedError(where=self._where(name))
        self.supports_ranges = self.supports_ranges and response.status != 200
        return exact_body(byte_range, response, self._where(name))

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return self.head(name).size

    def head(self, name: str) -> ObjectMeta:
        """Return a file's metadata by a HEAD request; Last-Modified stands in for a missing ETag."""
        response = self._request("HEAD", name)
        length = response.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise UnavailableError("server sent no valid Content-Length", where=self._where(name))
        return ObjectMeta(int(length), _validator(response))

    def bypassing_caches(self) -> HttpStore:
        """Return the same store with requests that bypass every cache on the way to the origin."""
        direct = copy.copy(self)
        direct._headers = self._headers | BYPASS_CACHES_HEADERS
        return direct

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the files whose name starts with `prefix`, sorted by name, from the server's index pages."""
        folder = prefix_folder(prefix)
        return self._walk(f"{folder}/" if folder else "", prefix, ListingLimits(self._root))

    def list_folder(self, folder: str) -> FolderListing:
        """List one folder (empty, or ending with a slash) from its index page."""
        children = sorted(self._read_index(folder).items())
        folders = [name[:-1] for name, _ in children if name.endswith("/")]
        return folders, [(name, size) for name, size in children if not name.endswith("/")]

    def put(self, name: str, source: bytes | Path) -> None:  # noqa: ARG002
        """Raise InputError: http stores are read-only."""
        raise read_only_error(self.url)

    def delete(self, name: str) -> None:  # noqa: ARG002
        """Raise InputError: http stores are read-only."""
        raise read_only_error(self.url)

    def _where(self, name: str) -> str:
        return _shown(join_url(self._root, name))

    def _request(
        self,
        method: str,
        name: str,
        byte_range: ByteRange | None = None,
        condition: Mapping[str, str] | None = None,
        max_bytes: int = MAX_GET_BYTES,
    ) -> HttpResponse:
        url = join_url(self._root, check_name(name))
        where = _shown(url)
        headers = self._headers | dict(condition or {})
        response = self._client.request(
            method, url, where=where, headers=headers, byte_range=byte_range, max_bytes=max_bytes
        )
        if response.path.endswith("/") or (
            300 <= response.status < 400 and response.headers.get("Location", "").endswith("/")
        ):
            raise NotFoundError("is a directory, not a file", where=where)
        if (
            response.status in (200, 206)
            or (byte_range and response.status == 416)
            or (condition and response.status == 412)
        ):
            return response
        raise to_error(response, where, tried=self._tried)

    def _walk(self, folder: str, prefix: str, limits: ListingLimits) -> Iterator[Entry]:
        """List a folder (empty, or ending with a slash) recursively."""
        limits.add(requests=1)
        if folder.count("/") > MAX_FOLDER_DEPTH:
            raise UnavailableError(f"directories are nested deeper than {MAX_FOLDER_DEPTH}", where=self._where(folder))
        for child, size in sorted(self._read_index(folder).items()):
            name = folder + child
            if not name.startswith(prefix):
                continue
            if name.endswith("/"):
                yield from self._walk(name, prefix, limits)
            else:
                limits.add(objects=1)  # also limits the requests for sizes
                yield Entry(name, self.size(name) if size is None else size)

    def _read_index(self, folder: str) -> dict[str, int | None]:
        """Read a folder's index page; return {name: size if listed}, with a trailing slash on folders."""
        url = join_url(self._root, folder)
        response = self._client.request("GET", url, where=_shown(url), headers=self._headers, max_bytes=MAX_PAGE_BYTES)
        if response.status == 404 and folder:
            return {}
        if response.status != 200:
            missing = "no such directory, or the server does not list it"
            tried = f"{self._tried}; the server must list directories (nginx: autoindex on), or use a brace pattern"
            raise to_error(response, _shown(url), missing=missing, tried=tried)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise UnavailableError("server compressed the index page, which was not requested", where=_shown(url))
        if response.headers.get("Content-Type", "").startswith("application/json"):
            return _parse_json_index(response.body, _shown(url))
        return dict.fromkeys(_parse_html_index(response.body, url))


def _shown(url: str) -> str:
    """Return a URL as it may be printed: without credentials, and short even if a server lists endless names."""
    text, half = redacted(url), _MAX_SHOWN_LENGTH // 2
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:half]}…{text[-half:]}"


def _validator(response: HttpResponse) -> str:
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


def _is_other_version(response: HttpResponse, version: str) -> bool:
    """Compare a response's validator weakly with `version`: a compressing proxy weakens ETags on the way."""
    current = response.headers.get("Last-Modified" if version.endswith(" GMT") else "ETag") or version
    return current.removeprefix("W/") != version.removeprefix("W/")


class _IndexRow(msgspec.Struct):
    name: str
    type: str
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None


def _parse_json_index(page: bytes, where: str) -> dict[str, int | None]:
    """Parse an index page of nginx with `autoindex_format json`."""
    try:
        rows = msgspec.json.decode(page, type=list[_IndexRow])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UnavailableError(
            "index page is not in nginx's JSON format", where=where, hint="set autoindex_format to json or html"
        ) from error
    return {row.name + "/" * (row.type == "directory"): row.size for row in rows if _is_file_name(row.name)}


def _parse_html_index(page: bytes, url: str) -> Iterator[str]:
    """Parse an HTML index page (nginx, Apache, Python); yield only the links to direct children."""
    base = urlsplit(url)
    parser = _LinkParser()
    parser.feed(page.decode("utf-8", "replace"))
    for link in parser.links:
        try:
            target = urlsplit(urljoin(url, link))
        except ValueError:  # an invalid host
            continue
        if target[:2] != base[:2] or target.query or not unquote(target.path).startswith(unquote(base.path)):
            continue
        child = unquote(target.path).removeprefix(unquote(base.path))
        if _is_file_name(child.removesuffix("/")):
            yield child


def _is_file_name(name: str) -> bool:
    return "/" not in name and "\0" not in name and name not in ("", ".", "..")


class _LinkParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]
