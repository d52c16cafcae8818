"""Directories that tests read: of the repository, and of the shared data next to it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
NATIVE = ROOT / "native"
GOLDEN = ROOT / "tests" / "golden"
SHARED = ROOT.parent / "shared"
