"""Upload of the working directory: ignore patterns and the list of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.launchers.upload import IgnorePatterns, list_files


@pytest.mark.parametrize(
    ("pattern", "excluded", "included"),
    [
        ("*.bin", ["a.bin", "deep/a.bin"], ["a.bins", "bin"]),
        ("data", ["data", "deep/data"], ["database"]),
        ("/data", ["data"], ["deep/data"]),
        ("a/b", ["a/b"], ["x/a/b"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/xb"]),
        ("**/logs", ["logs", "a/b/logs"], ["log"]),
        ("a/**", ["a/x", "a/x/y"], ["a"]),
        ("run-?.[ab]x", ["run-1.ax", "run-2.bx"], ["run-12.ax", "run-1.cx"]),
        ("[!a]*", ["b"], ["a"]),
        ("# no", [], ["# no"]),
        (r"\#yes", ["#yes"], []),
        ("a+b.(x)", ["a+b.(x)"], ["aab.x"]),
    ],
)
def test_ignore_pattern(pattern: str, excluded: list[str], included: list[str]) -> None:
    is_ignored = IgnorePatterns([pattern])
    assert [path for path in (*excluded, *included) if is_ignored(path, is_folder=False)] == excluded


def test_last_matching_pattern_decides() -> None:
    is_ignored = IgnorePatterns(["*.bin", "", "!keep.bin", "build/"])
    assert is_ignored("a.bin", is_folder=False)
    assert not is_ignored("deep/keep.bin", is_folder=False)
    assert is_ignored("build", is_folder=True)
    assert not is_ignored("build", is_folder=False)


def test_list_files_applies_default_and_own_patterns(tmp_path: Path) -> None:
    for name in (
        "a.py",
        ".git/HEAD",
        "pkg/__pycache__/a.pyc",
        "pkg/b.py",
        "runs/log",
        ".venv/bin/python",
        "out/x",
        "y/out",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".stokerignore").write_text("/out\n")
    assert list_files(tmp_path, ["y/"], skip=tmp_path / "runs") == [".stokerignore", "a.py", "pkg/b.py"]
    assert ".venv/bin/python" in list_files(tmp_path, ["!.venv/"])
