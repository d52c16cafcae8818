"""docs/reliability.md: named tests exist, every row names one, and fault tests are on the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text()
GUARANTEES, _, LIMITATIONS = TEXT.partition("\n## Known limitations\n")
NODE_ID = re.compile(r"`(tests/[\w/]+\.py::[\w:]+)`")
FAULT_TESTS = (
    "tests/e2e/test_kill_drill.py",
    "tests/launchers/ray/test_faults.py",
    "tests/launchers/ray/test_slot_daemon.py",
    "tests/launchers/slurm/test_faults.py",
    "tests/launchers/ssh/test_drill.py",
    "tests/launchers/ssh/test_faults.py",
    "tests/launchers/ssh/test_guarantees.py",
    "tests/launchers/ssh/test_host_connection.py",
    "tests/launchers/ssh/test_reconnect.py",
    "tests/launchers/test_local_faults.py",
)


def list_tests(path: str) -> dict[str, bool]:
    """Return the node IDs of the tests in a file, without parameters, and whether they are expected to fail."""
    return {f"{path}::{name}": fails for name, fails in _iter_tests(ast.parse((ROOT / path).read_text()).body)}


def _iter_tests(body: list[ast.stmt]) -> Iterator[tuple[str, bool]]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, any("mark.xfail" in ast.unparse(decorator) for decorator in node.decorator_list)
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}::{name}", fails) for name, fails in _iter_tests(node.body))


def rows(text: str) -> list[str]:
    """Return the rows of all tables in a text, without their headers."""
    lines = re.findall(r"^\|.*\|$", text, re.MULTILINE)
    return [line for line in lines if not line.startswith(("|---", "| guarantee ", "| limitation "))]


def test_named_tests_exist() -> None:
    named = NODE_ID.findall(TEXT)
    existing = {node_id for path in {name.partition("::")[0] for name in named} for node_id in list_tests(path)}
    assert [name for name in named if name not in existing] == []
    assert TEXT.count("::test_") == len(named)  # none is misspelled such that it is not found


def test_every_row_names_a_test() -> None:
    assert len(rows(GUARANTEES)) > 50
    assert [row for row in rows(TEXT) if not NODE_ID.search(row)] == []


@pytest.mark.parametrize("path", FAULT_TESTS)
def test_every_fault_test_is_on_the_page(path: str) -> None:
    assert set(list_tests(path)) <= set(NODE_ID.findall(TEXT))


def test_known_limitations_are_the_tests_that_are_expected_to_fail() -> None:
    failing = {name for path in FAULT_TESTS for name, fails in list_tests(path).items() if fails}
    assert set(NODE_ID.findall(LIMITATIONS)) == failing
