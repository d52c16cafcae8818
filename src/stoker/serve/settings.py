"""What a data server and a cache are told, whichever engine runs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """A folder to serve."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    token_file: Path | None = None
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Origins by name ("" for one at the root), and where and how much of them is kept."""

    origins: tuple[tuple[str, str], ...]
    dir: Path
    size: int
    host: str = "127.0.0.1"
    port: int = 3128
    token: str | None = None
    token_file: Path | None = None
    fresh_s: float = 60.0
    """How long an object is served before its origin is asked whether it is still the same."""
