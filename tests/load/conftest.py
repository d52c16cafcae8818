"""Shard sets shared by the tests of the loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loaders import remember_threads
from tests.support.trees import make_tree, stoker


@pytest.fixture(autouse=True)
def _remember_threads() -> None:
    remember_threads()


@pytest.fixture(scope="session")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety images of three classes: the folder `pets`, and shard sets of it in `tar` and `tfrecord`."""
    root = tmp_path_factory.mktemp("loader")
    make_tree(root / "pets", {"ant": 30, "bee": 30, "cat": 30})
    for kind in ("tar", "tfrecord"):
        assert stoker("data", "convert", root / "pets", root / kind, "--format", kind, "--shard-samples", 20) == 0
    return root
