"""The examples: every job file is valid, and the programs run, with stoker and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.jobs.run_folder import find
from stoker.jobs.spec import load_job
from stoker.telemetry.reader import read_run
from tests.support.paths import EXAMPLES
from tests.support.trees import make_dataset, stoker

JOBS = sorted(EXAMPLES.glob("*.yaml"))
EPOCHS = ["epoch 0 on 2 ranks", "epoch 1 on 2 ranks", "epoch 2 on 2 ranks"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path


def said() -> list[str]:
    """What the newest run printed, without its events."""
    return [line.text for line in read_run(find(None).logs).lines]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_files_are_valid(path: Path) -> None:
    job = load_job(path)
    assert job.program.script is None or (EXAMPLES.parent / job.program.script).is_file()


def test_every_program_has_a_job() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= {path.stem for path in JOBS}


def test_a_ddp_script_knows_nothing_of_stoker() -> None:
    text = (EXAMPLES / "ddp.py").read_text()
    assert "import stoker" not in text
    assert "from stoker" not in text
    assert "STOKER_" not in text


def test_a_ddp_script_runs_as_it_is(here: Path) -> None:
    assert stoker("job", "run", "examples/ddp.yaml") == 0
    assert [line.partition(":")[0] for line in said()] == EPOCHS
    assert (here / "ddp.pt").is_file()


def test_the_same_script_under_bare_torchrun(here: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/ddp.py"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == EPOCHS


def test_a_loop_of_ones_own(here: Path) -> None:
    make_dataset(here / "pets", train=40, val=4)
    assert stoker("data", "convert", "pets", "shards", "--shard-samples", "20") == 0
    assert stoker("job", "run", "examples/own_loop.yaml") == 0
    assert said() == ["epoch 1 of 2 is done, step 2", "epoch 2 of 2 is done, step 4"]
    run = find("own-loop")
    events = read_run(run.logs).events
    assert {event.rank for event in events if event.kind == "heartbeat"} == {0, 1}
    assert [event.fields["step"] for event in events if event.kind == "scalar"] == [2, 4]
    assert (run.folder / "checkpoints" / "own_loop.pt").is_file()
