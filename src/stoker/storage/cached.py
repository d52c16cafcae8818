"""Objects of any store as verified local files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.errors import DataFaultError, StoppedError
from stoker.storage import Store, read_chunks, shown
from stoker.storage.local import LocalStore, explained

ATTEMPTS = 2


def kept(store: Store, name: str, folder: Path, *, size: int, sha256: str = "") -> Path | None:
    """Give the path of an object's copy in a folder, or None if there is no whole one."""
    path = _path(store, name, folder, size, sha256)
    with explained(path):
        return path if path.exists() and path.stat().st_size == size else None


def fetched(
    store: Store,
    name: str,
    folder: Path,
    *,
    size: int,
    sha256: str = "",
    wanted: Callable[[], bool] = lambda: True,
) -> Path:
    """Give the path of an object's copy in a folder; fetch it if it is not there, as long as it is wanted.

    The copy appears only when it is whole and has the digest, if one is known. One that has another digest is fetched
    once more, for a cache on the way may have spoilt it.
    """
    if path := kept(store, name, folder, size=size, sha256=sha256):
        return path
    path = _path(store, name, folder, size, sha256)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            LocalStore(str(folder)).write(path.name, _verified(store, name, size, sha256, wanted))
        except DataFaultError:
            if attempt == ATTEMPTS:
                raise
        else:
            break
    return path


def _path(store: Store, name: str, folder: Path, size: int, sha256: str) -> Path:
    return folder / (sha256 or hashlib.blake2b(f"{store.url}\0{name}\0{size}".encode(), digest_size=20).hexdigest())


def _verified(store: Store, name: str, size: int, sha256: str, wanted: Callable[[], bool]) -> Iterator[bytes]:
    """Read an object; after its last byte, refuse it if the digest is another."""
    where = f"{shown(store.url).rstrip('/')}/{name}"
    digest = hashlib.sha256()
    for chunk in read_chunks(store, name, size):
        if not wanted():
            raise StoppedError("is no longer wanted", where=where)
        digest.update(chunk)
        yield chunk
    if sha256 and digest.hexdigest() != sha256:
        raise DataFaultError(
            f"its sha256 is {digest.hexdigest()[:12]}…, and the manifest says {sha256[:12]}…",
            where=where,
            hint="it was damaged or replaced: put the right shard there, or convert the dataset again",
        )
