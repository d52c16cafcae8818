"""The table of files in a run folder: documented, and complete for what a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.jobs.run_files import RUN_FILES, VERSION, find_run_file, format_table
from stoker.jobs.run_folder import RunFolder, create_run
from tests.launchers.contract import job_of
from tests.support.paths import DOCS

PAGE = DOCS / "jobs.md"


def test_page_has_the_table(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text()
    begin = text.index("| file | content | launcher |")
    end = text.index("\n\n", begin) + 1
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text[:begin] + format_table() + text[end:])
    assert text[begin:end] == format_table(), "run the test with --update-golden"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("logs/worker-0.12.log", "logs/<slot>.<attempt>.log"),
        ("checkpoints/epoch-3/model.pt", "checkpoints/"),
        ("setup.user@node1.log", "setup.<host>.log"),
        ("exit.0.worker-1", "exit.<attempt>.<slot>"),
    ],
)
def test_names_match_their_entries(path: str, name: str) -> None:
    file = find_run_file(path)
    assert file is not None
    assert file.name == name


@pytest.mark.parametrize("path", ["processes.json", "remote/worker-0.0.json", "logs/sub/worker-0.0.log", "xlock"])
def test_other_names_have_no_entry(path: str) -> None:
    assert find_run_file(path) is None


def test_names_are_listed_once() -> None:
    names = [file.name for file in RUN_FILES]
    assert len(names) == len(set(names))


def test_new_runs_have_the_current_version(stoker_home: Path) -> None:
    run = create_run(job_of("true"), {})
    assert run.version == VERSION
    (run.folder / "version").unlink()
    assert RunFolder(run.folder).version == 1
