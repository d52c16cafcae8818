"""What tests of several launchers need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a working folder in it, in which we are."""
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path
