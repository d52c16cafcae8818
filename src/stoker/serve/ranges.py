"""Conditional and range requests (RFC 9110): evaluate the headers of a GET or HEAD, without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import formatdate, parsedate_to_datetime
from typing import NamedTuple

_SINGLE_RANGE = re.compile(r"bytes\s*=\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*", re.IGNORECASE)


class ObjectVersion(NamedTuple):
    """The validators of an object: its size, its strong ETag with quotes, and its modification time, if known."""

    size: int
    etag: str
    last_modified: float | None = None

    def headers(self) -> dict[str, str]:
        """Return the validators as response headers."""
        headers = {"ETag": self.etag, "Accept-Ranges": "bytes"}
        return (
            headers
            if self.last_modified is None
            else {**headers, "Last-Modified": formatdate(self.last_modified, usegmt=True)}
        )


class ResponseRange(NamedTuple):
    """The status of a response, and the bytes that it contains."""

    status: int
    start: int
    length: int

    def headers(self, size: int) -> dict[str, str]:
        """Return the Content-Range header, if the response needs one."""
        if self.status == 206:
            return {"Content-Range": f"bytes {self.start}-{self.start + self.length - 1}/{size}"}
        return {"Content-Range": f"bytes */{size}"} if self.status == 416 else {}


def evaluate_request(method: str, headers: Mapping[str, str], version: ObjectVersion) -> ResponseRange:
    """Return the status and byte range for a GET or HEAD with these conditions.

    Multiple ranges get the whole object, as RFC 9110 allows; Range is ignored on HEAD.
    """
    if (required := headers.get("if-match")) is not None and not _matches_etag(required, version.etag, weak=False):
        return ResponseRange(412, 0, 0)
    if (known := headers.get("if-none-match")) is not None:
        if _matches_etag(known, version.etag, weak=True):
            return ResponseRange(304, 0, 0)
    elif _is_unmodified_since(headers.get("if-modified-since"), version):
        return ResponseRange(304, 0, 0)
    whole = ResponseRange(200, 0, version.size)
    requested = _SINGLE_RANGE.fullmatch(headers.get("range", ""))
    if method == "HEAD" or requested is None or not _if_range_holds(headers.get("if-range"), version):
        return whole
    first, last = requested[1], requested[2]
    if not first and not last:
        return whole
    if not first:
        start, end = max(0, version.size - int(last)), version.size
    else:
        start, end = int(first), min(version.size, int(last) + 1 if last else version.size)
        if last and int(last) < int(first):
            return whole
    return ResponseRange(206, start, end - start) if start < end else ResponseRange(416, 0, 0)


def _matches_etag(text: str, etag: str, *, weak: bool) -> bool:
    tags = [tag.strip() for tag in text.split(",")]
    return "*" in tags or etag in tags or (weak and f"W/{etag}" in tags)


def _is_unmodified_since(text: str | None, version: ObjectVersion) -> bool:
    since = _parse_http_date(text)
    return since is not None and version.last_modified is not None and int(version.last_modified) <= since


def _if_range_holds(text: str | None, version: ObjectVersion) -> bool:
    """Return whether If-Range is absent or matches this version."""
    if text is None or text == version.etag:
        return True
    since = _parse_http_date(text)
    return since is not None and version.last_modified is not None and int(version.last_modified) == since


def _parse_http_date(text: str | None) -> float | None:
    if not text or text.startswith(('"', "W/")):
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
