"""Commands that write to a full disk: the error names the path, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.core.scratch import scratch_directory
from stoker.jobs.run_folder import RunFolder
from tests.support.disks import small_disk
from tests.support.trees import stoker

FILLER = "filler"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can create files, but has no space for their content."""
    with small_disk(tmp_path / "tiny", 1 << 20) as folder:
        with suppress(OSError), open(folder / FILLER, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        yield folder


def files_of(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name != FILLER]


def test_init_names_the_job_file(
    full_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(full_disk)
    assert stoker("init", full_disk / "job.yaml") == 5
    assert capsys.readouterr().err.startswith(f"stoker: {full_disk / 'job.yaml'}: no space left")
    assert files_of(full_disk) == []


def test_init_keeps_the_file_that_it_cannot_overwrite(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(full_disk)
    (full_disk / FILLER).replace(full_disk / "job.yaml")
    size = (full_disk / "job.yaml").stat().st_size
    assert stoker("init", "job.yaml", "--force") == 5
    assert (full_disk / "job.yaml").stat().st_size == size


def test_run_folder_that_cannot_be_completed_is_removed(
    full_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(full_disk / "home"))
    (tmp_path / "job.yaml").write_text("name: ok\ntopology: single\nprogram: {command: ['true']}\n")
    assert stoker("job", "run", tmp_path / "job.yaml") == 5
    assert capsys.readouterr().err.startswith(f"stoker: {full_disk / 'home/runs/ok-'}")
    assert files_of(full_disk / "home/runs") == []


def test_run_without_a_handle_is_removed(full_disk: Path) -> None:
    run = RunFolder(full_disk / "ok-20300101-000000-abcd")
    run.folder.mkdir()
    with pytest.raises(OSError, match=f"{run.folder}/handle"):
        run.write_handle("local://x")
    assert files_of(full_disk) == []


def test_scratch_directory_is_named(full_disk: Path) -> None:
    with (
        pytest.raises(OSError, match=f"{full_disk}/stoker-scratch-"),
        scratch_directory(full_disk) as folder,
        open(folder / "list", "wb") as file,
    ):
        file.write(b"x")
