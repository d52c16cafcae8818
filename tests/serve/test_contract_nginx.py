"""The nginx engine against the same contract as ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve.contract import CacheSuite, ServeSuite
from stoker.errors import ConflictError
from stoker.serve.engines import Engine, caching, serving
from stoker.serve.settings import CacheSettings, ServeSettings

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None and shutil.which("nginx", path="/usr/sbin") is None, reason="nginx is not installed"
)


@contextmanager
def running(engine: Engine) -> Iterator[str]:
    engine.start()
    try:
        yield engine.url
    finally:
        engine.stop()


def test_two_engines_do_not_share_a_folder(tmp_path: Path) -> None:
    settings = CacheSettings(origins=(("", "http://127.0.0.1:1"),), dir=tmp_path / "cache", size=1 << 30, port=0)
    with running(caching(settings, "nginx")), pytest.raises(ConflictError, match="another cache"):
        caching(settings, "embedded")
    with running(caching(settings, "embedded")), pytest.raises(ConflictError, match="another cache"):
        caching(settings, "nginx").start()


class TestServe(ServeSuite):
    @contextmanager
    def start(self, root: Path, *, token: str | None = None, writable: bool = False) -> Iterator[str]:
        with running(serving(ServeSettings(root=root, port=0, token=token, writable=writable), "nginx")) as url:
            yield url


class TestCache(CacheSuite):
    SLICE = 8 << 20

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
        with running(caching(settings, "nginx")) as url:
            yield url
