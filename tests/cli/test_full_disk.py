"""Commands that write to a full disk: the error names the path, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.core.scratch import scratch_directory
from stoker.jobs.run_folder import RunFolder
from tests.support.disks import full_disk
from tests.support.trees import stoker

FILLER = "filler"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with full_disk(tmp_path / "tiny") as folder:
        yield folder


def files_of(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != FILLER]


def test_init_names_the_job_file(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(disk)
    assert stoker("init", disk / "job.yaml") == 5
    assert capsys.readouterr().err.startswith(f"stoker: {disk / 'job.yaml'}: no space left")
    assert files_of(disk) == []


def test_init_keeps_the_file_that_it_cannot_overwrite(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)
    (disk / FILLER).replace(disk / "job.yaml")
    size = (disk / "job.yaml").stat().st_size
    assert stoker("init", "job.yaml", "--force") == 5
    assert (disk / "job.yaml").stat().st_size == size


def test_run_folder_that_cannot_be_completed_is_removed(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(disk / "home"))
    (tmp_path / "job.yaml").write_text("name: ok\ntopology: single\nprogram: {command: ['true']}\n")
    assert stoker("job", "run", tmp_path / "job.yaml") == 5
    assert capsys.readouterr().err.startswith(f"stoker: {disk / 'home/runs/ok-'}")
    assert files_of(disk / "home/runs") == []


def test_run_without_a_handle_is_removed(disk: Path) -> None:
    run = RunFolder(disk / "ok-20300101-000000-abcd")
    run.folder.mkdir()
    with pytest.raises(OSError, match=f"{run.folder}/handle"):
        run.write_handle("local://x")
    assert files_of(disk) == []


def test_scratch_directory_is_named(disk: Path) -> None:
    with (
        pytest.raises(OSError, match=f"{disk}/stoker-scratch-"),
        scratch_directory(disk) as folder,
        open(folder / "list", "wb") as file,
    ):
        file.write(b"x")
