"""Data servers and caches that run during a test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.engines import Engine
from stoker.serve.settings import CacheSettings, ServeSettings

TOKEN = "a-token-of-twenty-letters"

HAS_NGINX = shutil.which("nginx") is not None or shutil.which("nginx", path="/usr/sbin") is not None


@contextmanager
def run_engine(engine: Engine) -> Iterator[str]:
    """Run an engine, and yield its URL."""
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


def run_embedded(settings: ServeSettings | CacheSettings) -> AbstractContextManager[str]:
    """Run the embedded engine, and yield its URL."""
    return run_engine(EmbeddedEngine(settings))


@contextmanager
def run_cache(
    folder: Path, *origins: tuple[str, str], size: int = 1 << 30, revalidate_after_s: float = 60.0
) -> Iterator[str]:
    """Run a cache with the embedded engine, and yield its URL."""
    settings = CacheSettings(origins=origins, dir=folder, size=size, port=0, revalidate_after_s=revalidate_after_s)
    with run_embedded(settings) as url:
        yield url
