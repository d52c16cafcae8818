"""The `bash` blocks of README and docs/ are executed, file by file, beside a small dataset called `pets`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.trees import make_dataset

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def scripts(page: Path) -> str:
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))


LONG = ("train.md",)


def pages() -> list[object]:
    marks = dict.fromkeys(LONG, pytest.mark.slow)
    return [pytest.param(page, marks=marks.get(page.name, ()), id=page.name) for page in PAGES if scripts(page)]


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "pets", train=400, val=40)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", scripts(page)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link
