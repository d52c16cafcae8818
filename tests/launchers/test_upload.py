"""Upload of the working directory: ignore patterns and the list of files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stoker.errors import InputError
from stoker.launchers.upload import IgnorePatterns, find_largest, list_files


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


def test_virtual_environments_of_any_name_are_not_uploaded(tmp_path: Path) -> None:
    for name in ("a.py", "venv/pyvenv.cfg", "venv/bin/python", "deep/env/pyvenv.cfg", "deep/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(tmp_path, []) == ["a.py", "deep/b.py"]
    assert list_files(tmp_path, ["!/venv/"]) == ["a.py", "deep/b.py", "venv/bin/python", "venv/pyvenv.cfg"]


def test_largest_parts_are_those_of_the_working_directory(tmp_path: Path) -> None:
    sizes = {"a.bin": 500, "shards/train/0.tar": 400, "shards/val/0.tar": 300, "photos/cat.jpg": 600}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    assert find_largest(tmp_path, list_files(tmp_path, [])) == [("shards/", 700), ("photos/", 600)]


PATTERNS = {
    "escapes": ["lit\\*.bin", "\\!bang", "\\#hash", "space\\ "],
    "trailing spaces": ["a.bin   ", "# comment"],
    "classes": ["[!a-c].txt", "[^x].md", "v[0-9].log"],
    "exceptions": ["*", "!*/", "!*.py"],
    "an exception in an excluded folder has no effect": ["deep/", "!deep/a.py"],
    "stars": ["deep/**/x", "**/logs", "deep/*/y.txt", "/top*"],
    "folders only": ["logs/", "a.txt/"],
}
FILES = (
    *("a.py", "a.bin", "lit*.bin", "litx.bin", "!bang", "#hash", "space ", "space", "# comment", "a.txt", "d.txt"),
    *("b.md", "x.md", "v1.log", "vx.log", "topfile", "deep/a.py", "deep/topfile", "deep/x", "deep/p/x", "deep/p/q/x"),
    *("deep/p/y.txt", "deep/p/q/y.txt", "logs/l", "deep/logs/l", "deep/p/logs"),
)


@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
def test_files_are_those_that_git_lists(patterns: list[str], tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".git/info/exclude").write_text("\n".join(patterns) + "\n")
    argv = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    listing = subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert list_files(tmp_path, patterns) == sorted(listing.rstrip("\0").split("\0"))


def test_ignore_file_that_is_no_text_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / ".stokerignore").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"\.stokerignore: not UTF-8"):
        list_files(tmp_path, [])
