"""CONTRIBUTING.md: its map names every module and nothing else, and its glossary stays short."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MAP = TEXT.partition("```text\n")[2].partition("```")[0].partition("\nnative/")[0]
SOURCE = ROOT / "src" / "stoker"


def module_names() -> list[str]:
    return [path.name for path in SOURCE.rglob("*.py") if not path.name.startswith("__")]


def test_map_names_every_module_as_often_as_it_exists() -> None:
    names = re.findall(r"[a-z0-9_]+\.py\b", MAP)
    assert sorted(names) == sorted(module_names())


def test_map_names_every_package() -> None:
    packages = {path.parent.name for path in SOURCE.rglob("__init__.py")} - {"stoker"}
    assert packages <= set(re.findall(r"([a-z_]+)/", MAP))


def test_glossary_has_at_most_40_terms() -> None:
    rows = re.findall(r"^\| (?!term|---)([^|]+) \|", TEXT, re.MULTILINE)
    assert 20 <= len(rows) <= 40
    assert len(rows) == len(set(rows))
