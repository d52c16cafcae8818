"""nginx engine: both contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import ConflictError
from stoker.serve.engines import create_cache
from stoker.serve.settings import CacheSettings
from tests.serve.contract import CacheContract, ServerContract
from tests.support.engines import HAS_NGINX, run_engine

pytestmark = pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed")


def test_two_engines_cannot_share_a_folder(tmp_path: Path) -> None:
    settings = CacheSettings(origins=(("", "http://127.0.0.1:1"),), dir=tmp_path / "cache", size=1 << 30, port=0)
    with run_engine(create_cache(settings, "nginx")), pytest.raises(ConflictError, match=f"{settings.dir}: .*--dir"):
        create_cache(settings, "embedded")
    with run_engine(create_cache(settings, "embedded")), pytest.raises(ConflictError, match=f"{settings.dir}: .*--dir"):
        create_cache(settings, "nginx").start()


class TestServe(ServerContract):
    ENGINE = "nginx"


class TestCache(CacheContract):
    ENGINE = "nginx"
