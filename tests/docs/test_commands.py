"""Execute the `bash` blocks of README and docs/, page by page, in a directory with a small dataset `pets`."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from stoker.cli.main import make_app
from tests.support.paths import ROOT
from tests.support.trees import make_dataset

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def bash_script(page: Path) -> str:
    """Return all `bash` blocks of a page as one script."""
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


SLOW_PAGES = ("train.md",)


def pages_with_commands() -> list[object]:
    marks = dict.fromkeys(SLOW_PAGES, pytest.mark.slow)
    return [pytest.param(page, marks=marks.get(page.name, ()), id=page.name) for page in PAGES if bash_script(page)]


@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_of_a_page_succeed(page: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "pets", train=400, val=40)
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", bash_script(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    finally:  # a page that failed may have left servers in the background
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub generates them."""
    found = set[str]()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        numbered = (f"{name}-{number}" for number in itertools.count(1))
        found.add(next(anchor for anchor in itertools.chain([name], numbered) if anchor not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_link_targets_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def iter_stoker_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after `stoker` of every command in console blocks, synopses and inline code."""
    text = page.read_text()
    lines = [line for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    commands = [line.removeprefix("$ ").partition(" | ")[0] for line in lines if line.startswith("$ ")]
    commands += re.sub(r"\n {8,}", " ", text).splitlines()
    commands += re.findall(r"`([^`\n]+)`", text)
    for command in commands:
        if (command := command.removeprefix("    ")).startswith("stoker "):
            words = command.partition(" #")[0].translate(str.maketrans("[]|", "   ")).partition(" -- ")[0]
            yield words.replace("\N{HORIZONTAL ELLIPSIS}", " ").split()[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_exist(page: Path) -> None:
    for words in iter_stoker_commands(page):
        command: Any = typer.main.get_command(make_app())
        while words and words[0] in getattr(command, "commands", {}):
            command, *words = command.commands[words[0]], *words[1:]
        options = {option for parameter in command.params if not parameter.hidden for option in parameter.opts} | {
            "--help"
        }
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, (page.name, words)
