"""Fixtures of the storage tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.storage.cache import DiskCache
from tests.support.cached_objects import CHUNK, DATA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch in small chunks with a single retry."""
    monkeypatch.setattr("stoker.storage.cache.CHUNK_BYTES", CHUNK)
    monkeypatch.setattr("stoker.storage.http_client.RETRIES", 1)


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


@pytest.fixture
def origin_folder(folder: Path) -> Path:
    """A folder with one object, train/a.tar."""
    (folder / "train").mkdir()
    (folder / "train/a.tar").write_bytes(DATA)
    return folder
