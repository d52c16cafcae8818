"""The engine of ours against the contract, and what only it promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.contract import CacheSuite, ServeSuite
from stoker.serve import slices
from stoker.serve.embedded import EmbeddedEngine
from stoker.serve.settings import CacheSettings, ServeSettings


@contextmanager
def running(settings: ServeSettings | CacheSettings) -> Iterator[str]:
    engine = EmbeddedEngine(settings)
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


class TestServe(ServeSuite):
    @contextmanager
    def start(self, root: Path, *, token: str | None = None, writable: bool = False) -> Iterator[str]:
        with running(ServeSettings(root=root, port=0, token=token, writable=writable)) as url:
            yield url


class TestCache(CacheSuite):
    SLICE = slices.SLICE
    CHECKS_DIGESTS = True

    @contextmanager
    def start(
        self,
        origins: dict[str, str],
        folder: Path,
        *,
        size: int = 1 << 30,
        fresh_s: float = 60.0,
        token: str | None = None,
    ) -> Iterator[str]:
        settings = CacheSettings(
            origins=tuple(origins.items()), dir=folder, size=size, port=0, fresh_s=fresh_s, token=token
        )
        with running(settings) as url:
            yield url
