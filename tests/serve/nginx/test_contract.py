"""The nginx engine against the same contract as ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.errors import ConflictError
from stoker.serve.engines import caching
from stoker.serve.settings import CacheSettings
from tests.serve.contract import CacheSuite, ServeSuite, has_nginx, running

pytestmark = pytest.mark.skipif(not has_nginx, reason="nginx is not installed")


def test_two_engines_do_not_share_a_folder(tmp_path: Path) -> None:
    settings = CacheSettings(origins=(("", "http://127.0.0.1:1"),), dir=tmp_path / "cache", size=1 << 30, port=0)
    with running(caching(settings, "nginx")), pytest.raises(ConflictError, match="another cache"):
        caching(settings, "embedded")
    with running(caching(settings, "embedded")), pytest.raises(ConflictError, match="another cache"):
        caching(settings, "nginx").start()


class TestServe(ServeSuite):
    ENGINE = "nginx"


class TestCache(CacheSuite):
    ENGINE = "nginx"
