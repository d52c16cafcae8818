"""Objects of any store as verified local files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import DataFaultError
from stoker.storage import Store, read_chunks, shown
from stoker.storage.local import LocalStore, explained

ATTEMPTS = 2


def fetched(store: Store, name: str, folder: Path, *, size: int, sha256: str = "") -> Path:
    """Give the path of an object's copy in a folder; fetch it if it is not there.

    The copy appears only when it is whole and has the digest, if one is known. One that has another digest is fetched
    once more, for a cache on the way may have spoilt it.
    """
    path = folder / (sha256 or hashlib.blake2b(f"{store.url}\0{name}\0{size}".encode(), digest_size=20).hexdigest())
    with explained(path):
        if path.exists() and path.stat().st_size == size:
            return path
    for attempt in range(1, ATTEMPTS + 1):
        try:
            LocalStore(str(folder)).write(path.name, _verified(store, name, size, sha256))
        except DataFaultError:
            if attempt == ATTEMPTS:
                raise
        else:
            break
    return path


def _verified(store: Store, name: str, size: int, sha256: str) -> Iterator[bytes]:
    """Read an object; after its last byte, refuse it if the digest is another."""
    digest = hashlib.sha256()
    for chunk in read_chunks(store, name, size):
        digest.update(chunk)
        yield chunk
    if sha256 and digest.hexdigest() != sha256:
        raise DataFaultError(
            f"its sha256 is {digest.hexdigest()[:12]}…, and the manifest says {sha256[:12]}…",
            where=f"{shown(store.url).rstrip('/')}/{name}",
            hint="it was damaged or replaced: put the right shard there, or convert the dataset again",
        )
