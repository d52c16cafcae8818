"""Conditional and partial requests: what the headers ask of an object, decided without any I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import formatdate, parsedate_to_datetime
from typing import NamedTuple

_ONE = re.compile(r"bytes\s*=\s*([0-9]{0,18})\s*-\s*([0-9]{0,18})\s*", re.IGNORECASE)


class Version(NamedTuple):
    """What an object is known by: its size, its strong ETag with quotes, and its time of change, if known."""

    size: int
    etag: str
    changed: float | None = None

    def headers(self) -> dict[str, str]:
        """Tell it to the client."""
        told = {"ETag": self.etag, "Accept-Ranges": "bytes"}
        return told if self.changed is None else {**told, "Last-Modified": formatdate(self.changed, usegmt=True)}


class Asked(NamedTuple):
    """The answer's status, and which bytes it has."""

    status: int
    start: int
    length: int

    def headers(self, size: int) -> dict[str, str]:
        """Tell which bytes these are."""
        if self.status == 206:
            return {"Content-Range": f"bytes {self.start}-{self.start + self.length - 1}/{size}"}
        return {"Content-Range": f"bytes */{size}"} if self.status == 416 else {}


def asked(method: str, headers: Mapping[str, str], version: Version) -> Asked:
    """Decide what a GET or HEAD gets: all of it, one part, or only that nothing has changed.

    Several ranges at once get the whole, as the standard allows; of a HEAD a range means nothing.
    """
    if (wanted := headers.get("if-match")) is not None and not _names(wanted, version.etag, weak=False):
        return Asked(412, 0, 0)
    if (known := headers.get("if-none-match")) is not None:
        if _names(known, version.etag, weak=True):
            return Asked(304, 0, 0)
    elif _not_changed_since(headers.get("if-modified-since"), version):
        return Asked(304, 0, 0)
    everything = Asked(200, 0, version.size)
    part = _ONE.fullmatch(headers.get("range", ""))
    if method == "HEAD" or part is None or not _is_meant(headers.get("if-range"), version):
        return everything
    first, last = part[1], part[2]
    if not first and not last:
        return everything
    if not first:
        start, end = max(0, version.size - int(last)), version.size
    else:
        start, end = int(first), min(version.size, int(last) + 1 if last else version.size)
        if last and int(last) < int(first):
            return everything
    return Asked(206, start, end - start) if start < end else Asked(416, 0, 0)


def _names(text: str, etag: str, *, weak: bool) -> bool:
    tags = [tag.strip() for tag in text.split(",")]
    return "*" in tags or etag in tags or (weak and f"W/{etag}" in tags)


def _not_changed_since(text: str | None, version: Version) -> bool:
    since = _when(text)
    return since is not None and version.changed is not None and int(version.changed) <= since


def _is_meant(text: str | None, version: Version) -> bool:
    """Whether a range is asked of this very version."""
    if text is None or text == version.etag:
        return True
    since = _when(text)
    return since is not None and version.changed is not None and int(version.changed) == since


def _when(text: str | None) -> float | None:
    if not text or text.startswith(('"', "W/")):
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
