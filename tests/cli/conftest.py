"""Fixtures of the command line tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from socketserver import BaseServer

import pytest

from tests.support.http_origin import DATA
from tests.support.runs import Runs


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence the test server about clients that disconnect during a response."""
    monkeypatch.setattr(BaseServer, "handle_error", lambda *_: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one file, a.tar."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.tar").write_bytes(DATA)
    return tmp_path / "root"


@pytest.fixture
def runs(workspace: Path) -> Iterator[Runs]:
    """Runs of a STOKER_HOME of its own; what a test has started is stopped."""
    assert workspace.is_dir()
    made = Runs()
    yield made
    made.stop()
