"""The command line as a whole: its options, its help, its exit codes, and the demo."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import stoker as package
from stoker.cli.main import make_app
from stoker.cli.renamed import RENAMED, check_renamed_options
from tests.support.paths import GOLDEN
from tests.support.trees import make_dataset, stoker

SURFACE = GOLDEN / "cli.json"


def surface(command: Any) -> dict[str, object]:
    """Every command with its arguments and options."""
    if hasattr(command, "commands"):
        return {name: surface(inner) for name, inner in sorted(command.commands.items())}
    return {"params": sorted("/".join(param.opts) for param in command.params)}


def test_commands_and_options_are_pinned(request: pytest.FixtureRequest) -> None:
    actual = surface(typer.main.get_command(make_app()))
    if request.config.getoption("--update-golden"):
        SURFACE.write_text(json.dumps(actual, indent=1, sort_keys=True) + "\n")
    assert actual == json.loads(SURFACE.read_text())


@pytest.mark.parametrize("words", [("bench",), ("image", "build"), ("cluster", "up")])
def test_commands_that_do_not_exist_are_unknown_and_not_in_the_help(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert stoker("--help") == 0
    assert not re.search(rf"^\s+{words[0]}\b", capsys.readouterr().out, re.MULTILINE)
    assert stoker(*words) == 2
    assert repr(words[0]) in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom stoker.cli.main import run\nrun(['--help'])\nrun(['data', 'convert', '--help'])\n"
        "heavy = {'numpy', 'PIL', 'msgspec', 'yaml', 'obstore', 'google_crc32c', 'scipy', 'torch', 'tensorflow'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "convert" in done.stdout
    assert done.stderr.strip() == "[]"


def test_commands_import_neither_other_commands_nor_pydantic_without_a_value_to_parse() -> None:
    """The import of pydantic would take as long as all others of the command line together."""
    code = (
        "import sys\nfrom stoker.cli.main import run\n"
        "run(['job', 'list'])\nrun(['job', 'plan', 'none.yaml', '--set', 'a=1'])\n"
        "print(sorted({'pydantic', 'stoker.cli.data'} & set(sys.modules)))\nrun(['job', 'list', '--limit', '3'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" in done.stdout.splitlines()


def groups(command: Any, *path: str) -> list[tuple[str, ...]]:
    """Every group of commands, as the words that lead to it."""
    inner = getattr(command, "commands", {})
    return [
        path,
        *(found for name, each in inner.items() if hasattr(each, "commands") for found in groups(each, *path, name)),
    ]


@pytest.mark.parametrize("path", groups(typer.main.get_command(make_app())), ids=" ".join)
def test_group_help_is_not_truncated(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker(*path, "--help") == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands
    assert not [line for line in commands.splitlines() if line.endswith(("...", "…"))]


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, old, new) for command, options in RENAMED.items() for old, new in options.items()],
)
def test_renamed_options_name_their_successor(
    command: tuple[str, ...], old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ((old, "1"), (f"{old}=1",)):
        assert stoker(*command, *words) == 2
        sentence = capsys.readouterr().err
        assert old in sentence
        assert new in sentence
        assert sentence.count("\n") == 1
    pinned: Any = json.loads(SURFACE.read_text())
    for name in command:
        pinned = pinned[name]
    assert new in pinned["params"]
    assert old not in pinned["params"]


def test_renamed_options_of_a_program_are_its_own() -> None:
    check_renamed_options(["data", "cache", "--", "--fresh"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("--version") == 0
    assert capsys.readouterr().out == f"stoker {package.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["data", "nonsense"], ["data", "convert"], ["data", "convert", "a", "b", "--wrong"]],
)
def test_usage_errors_exit_with_2_and_no_traceback(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker(*words) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "Usage" in err


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "pets")
    command = f"{sys.executable} -m stoker data convert {data} {tmp_path / 'out'} --dry-run --json --shard-samples 1"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 1"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""


def test_unreadable_folder_fails_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("data", "summary", tmp_path / ("x" * 300)) in (2, 5)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("stoker: ")


def test_demo_without_its_dataset_creates_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert stoker("demo") == 3
    assert stoker("demo", "--dir", tmp_path / "demo") == 3
    assert "scikit-learn" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_demo_runs_every_step_and_survives_a_killed_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker", "demo", "--dir", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "The demo succeeded" in done.stderr
    assert "<html" in (tmp_path / "demo" / "run.html").read_text()
    assert "kill -9" in done.stderr
    assert "because worker/0 (rank 1) was killed by SIGKILL" in done.stdout
    resumed = re.search(r"resumed in epoch (\d), after ([\d,]+) of its 1,437 samples", done.stdout)
    assert resumed is not None
    assert int(resumed[2].replace(",", "")) > 0
    assert "8 epochs: each of the 1,437 samples exactly once in every epoch" in done.stdout
    accuracy = re.search(r"validation top-1 ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    assert "1 restart" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert str(tmp_path / "demo") in again.stderr
    assert "--dir" in again.stderr


def test_arguments_are_shown_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words, usage in [
        (["doctor"], "Usage: stoker doctor [OPTIONS] [FILE]"),
        (["job", "exec"], "Usage: stoker job exec [OPTIONS] RUN CMD..."),
        (["data", "convert"], "Usage: stoker data convert [OPTIONS] SOURCE DEST"),
    ]:
        assert stoker(*words, "--help") == 0
        text = capsys.readouterr().out
        assert usage in text.splitlines()
        assert not re.search(r"<(str|int|path|list\[str\])>", text)
