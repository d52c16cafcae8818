"""Folders behind a web server: read-only, listed through the server's own index pages."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from urllib3 import make_headers

from stoker.errors import ChangedError, InputError, NotFoundError, UnavailableError
from stoker.storage import Children, Entry, Tag, checked, folder_of, join, read_only, shown
from stoker.storage.http_client import Answer, Client, Window, exactly, refusal

MAX_DEPTH = 16
BYPASS = {"X-Stoker-Bypass": "1", "Cache-Control": "no-cache"}
"""Asks the caches on the way, ours and others, to ask the origin themselves."""


class HttpStore:
    """The files below a URL; a login in it is sent, and its query goes with every request."""

    def __init__(self, url: str, *, redirects: bool = True) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise InputError("is not a URL", where=url) from error
        if not parts.hostname:
            raise InputError("names no host", where=url)
        self.url = url
        self._root = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._tried = "the URL holds no login"
        self._headers: dict[str, str] = {}
        if parts.username or parts.password:
            user = unquote(parts.username or "")
            self._headers = dict(make_headers(basic_auth=f"{user}:{unquote(parts.password or '')}"))
            self._tried = f"tried the URL's login as {user!r}"
        self._client = Client(url, redirects=redirects)
        self.ranged = True
        """Whether the server has not yet answered with a whole file where a part was asked for."""

    def get(self, name: str) -> bytes:
        """Read a whole file."""
        return self._ask("GET", name).body

    def range(self, name: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Read exactly `length` bytes from `start`, also from a server that knows no ranges."""
        if not length:
            return b""
        window = Window(start, length)
        # A weak tag never matches; a server that ignores the question still tells what it sent.
        asked = {"If-Match": etag} if etag.startswith('"') else {}
        answer = self._ask("GET", name, window, asked)
        if answer.status == 412 or (etag and _is_other(answer, etag)):
            raise ChangedError(where=self._where(name))
        self.ranged = self.ranged and answer.status != 200
        return exactly(window, answer, self._where(name))

    def size(self, name: str) -> int:
        """Tell a file's size in bytes."""
        return self.tag(name).size

    def tag(self, name: str) -> Tag:
        """Tell which version of a file is there, by its ETag or else by when it was modified."""
        answer = self._ask("HEAD", name)
        length = answer.headers.get("Content-Length")
        if length is None:
            raise UnavailableError("the server does not tell the file's size", where=self._where(name))
        return Tag(int(length), _version(answer))

    def past_caches(self) -> HttpStore:
        """Give the same files as the origin has them, whatever a cache on the way holds."""
        direct = copy.copy(self)
        direct._headers = self._headers | BYPASS
        return direct

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List the files whose name starts with `prefix`, in order of name, by the server's index pages."""
        folder = folder_of(prefix)
        return self._walk(f"{folder}/" if folder else "", prefix)

    def children(self, folder: str) -> Children:
        """List one folder, whose name is empty or ends with a slash, by its index page."""
        found = sorted(self._index(folder).items())
        return [name[:-1] for name, _ in found if name.endswith("/")], [
            one for one in found if not one[0].endswith("/")
        ]

    def put(self, name: str, source: bytes | Path) -> None:  # noqa: ARG002
        """Refuse: a web server only gives."""
        raise read_only(self.url)

    def delete(self, name: str) -> None:  # noqa: ARG002
        """Refuse: a web server only gives."""
        raise read_only(self.url)

    def _where(self, name: str) -> str:
        return shown(join(self._root, name))

    def _ask(
        self, method: str, name: str, window: Window | None = None, asked: Mapping[str, str] | None = None
    ) -> Answer:
        url = join(self._root, checked(name))
        where = shown(url)
        headers = self._headers | dict(asked or {})
        answer = self._client.ask(method, url, where=where, headers=headers, window=window)
        if answer.path.endswith("/") or (
            300 <= answer.status < 400 and answer.headers.get("Location", "").endswith("/")
        ):
            raise NotFoundError("is a folder, not a file", where=where)
        if answer.status in (200, 206) or (window and answer.status == 416) or (asked and answer.status == 412):
            return answer
        raise refusal(answer, where, tried=self._tried)

    def _walk(self, folder: str, prefix: str) -> Iterator[Entry]:
        """List a folder, whose name is empty or ends with a slash, and the folders in it."""
        if folder.count("/") > MAX_DEPTH:
            raise UnavailableError(f"folders nest deeper than {MAX_DEPTH}", where=self._where(folder))
        for child, size in sorted(self._index(folder).items()):
            name = folder + child
            if not name.startswith(prefix):
                continue
            if name.endswith("/"):
                yield from self._walk(name, prefix)
            else:
                yield Entry(name, self.size(name) if size is None else size)

    def _index(self, folder: str) -> dict[str, int | None]:
        """Read a folder's index page: its files with their sizes where told, its folders with a slash."""
        url = join(self._root, folder)
        answer = self._client.ask("GET", url, where=shown(url), headers=self._headers)
        if answer.status == 404 and folder:
            return {}
        if answer.status != 200:
            missing = "no such folder, or the server has no index page for it"
            tried = f"{self._tried}; the server must also list folders (nginx: autoindex on), else give a brace pattern"
            raise refusal(answer, shown(url), missing=missing, tried=tried)
        if answer.headers.get("Content-Type", "").startswith("application/json"):
            return _json_index(answer.body, shown(url))
        return dict.fromkeys(_html_index(answer.body, url))


def _version(answer: Answer) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _is_other(answer: Answer, version: str) -> bool:
    """Compare with what a version was made of; a proxy that packs its answers makes tags weak on the way."""
    now = answer.headers.get("Last-Modified" if version.endswith(" GMT") else "ETag") or version
    return now.removeprefix("W/") != version.removeprefix("W/")


def _json_index(page: bytes, where: str) -> dict[str, int | None]:
    """Read what nginx writes under `autoindex_format json`."""
    try:
        return {
            row["name"] + "/" * (row["type"] == "directory"): row.get("size")
            for row in json.loads(page)
            if _is_plain(row["name"])
        }
    except (ValueError, TypeError, KeyError) as error:
        raise UnavailableError(
            "the index page is not one of nginx's", where=where, hint="want autoindex_format json or html"
        ) from error


def _html_index(page: bytes, url: str) -> Iterator[str]:
    """Read the links of an index page of nginx, Apache or Python that lead one step down, nowhere else."""
    here = urlsplit(url)
    links = _Links()
    links.feed(page.decode("utf-8", "replace"))
    for link in links.found:
        there = urlsplit(urljoin(url, link))
        if there[:2] != here[:2] or there.query or not unquote(there.path).startswith(unquote(here.path)):
            continue
        child = unquote(there.path).removeprefix(unquote(here.path))
        if _is_plain(child.removesuffix("/")):
            yield child


def _is_plain(name: str) -> bool:
    return "/" not in name and name not in ("", ".", "..")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if tag == "a" and key == "href" and value]
