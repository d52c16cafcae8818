"""Settings of a data server and of a cache, for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """A data server: the folder to serve, and the address to listen on."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    token_file: Path | None = None
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """A cache: origins as (name, URL), with "" for a single one at the root, its folder and its size in bytes."""

    origins: tuple[tuple[str, str], ...]
    dir: Path
    size: int
    host: str = "127.0.0.1"
    port: int = 3128
    token: str | None = None
    token_file: Path | None = None
    revalidate_after_s: float = 60.0
    """How long a cached object is fresh; after that it is revalidated with its origin."""
