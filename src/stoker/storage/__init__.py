"""Named objects by URL: local folders, http(s), s3:// and gs://, behind one small protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """One object of a store: its name relative to the store's URL, and its size in bytes."""

    name: str
    size: int


class Store(Protocol):
    """A folder of objects. Names are relative, with `/` between their parts."""

    url: str

    def get(self, name: str) -> bytes:
        """Read a whole object."""
        ...

    def range(self, name: str, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`."""
        ...

    def size(self, name: str) -> int:
        """Tell an object's size in bytes."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """List all objects whose name starts with `prefix`, in order of name, folders entered."""
        ...

    def put(self, name: str, source: bytes | Path) -> None:
        """Write an object that appears whole or not at all; a file given by its path is moved in and is gone after."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...
