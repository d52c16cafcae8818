"""No input of a parser gives a traceback, ten seconds of CPU time or 300 MiB."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.limits import check_corpus, check_fresh_inputs

TARGETS = sorted(path.stem for path in (Path(__file__).parent / "targets").glob("[a-z]*.py"))


@pytest.mark.parametrize("target", TARGETS)
def test_known_hostile_inputs(target: str, tmp_path: Path) -> None:
    check_corpus(f"tests.fuzz.targets.{target}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_fresh_inputs(target: str, tmp_path: Path) -> None:
    check_fresh_inputs(f"tests.fuzz.targets.{target}", tmp_path, seed=random.SystemRandom().getrandbits(32), seconds=60)
