"""Test the examples: every job file is valid, and every program runs with and without stoker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.jobs.run_folder import find_run
from stoker.jobs.spec import load_job
from stoker.telemetry.reader import read_run
from tests.support.paths import EXAMPLES
from tests.support.trees import make_dataset, stoker

JOBS = sorted(EXAMPLES.glob("*.yaml"))
EPOCHS = ["epoch 0 on 2 ranks", "epoch 1 on 2 ranks", "epoch 2 on 2 ranks"]


@pytest.fixture
def workspace(stoker_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a copy of the examples."""
    folder = stoker_home.parent
    monkeypatch.chdir(folder)
    shutil.copytree(EXAMPLES, folder / "examples")
    return folder


def read_output() -> list[str]:
    """Return the output lines of the newest run, without events."""
    return [line.text for line in read_run(find_run(None).logs).lines]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_files_are_valid(path: Path) -> None:
    job = load_job(path)
    assert job.program.script is None or (EXAMPLES.parent / job.program.script).is_file()


def test_every_program_has_a_job_file() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= {path.stem for path in JOBS}


@pytest.mark.parametrize("name", ["ddp.py", "custom_training_mnist.py", "keras_mnist.py", "keras_jax_mnist.py"])
def test_scripts_that_do_not_use_stoker(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert "import stoker" not in text
    assert "from stoker" not in text
    assert "STOKER_" not in text


def test_ddp_script_runs_unmodified_as_a_job(workspace: Path) -> None:
    assert stoker("job", "run", "examples/ddp.yaml") == 0
    assert [line.partition(":")[0] for line in read_output()] == EPOCHS
    assert (workspace / "ddp.pt").is_file()


def test_ddp_script_runs_under_plain_torchrun(workspace: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/ddp.py"]
    process = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert process.returncode == 0, process.stderr
    assert [line.partition(":")[0] for line in process.stdout.splitlines()] == EPOCHS


def test_own_loop_reports_heartbeats_and_writes_a_checkpoint(workspace: Path) -> None:
    make_dataset(workspace / "pets", train=40, val=4)
    assert stoker("data", "convert", "pets", "shards", "--shard-samples", "20") == 0
    assert stoker("job", "run", "examples/own_loop.yaml") == 0
    assert read_output() == ["epoch 1 of 2 finished at step 2", "epoch 2 of 2 finished at step 4"]
    run = find_run("own-loop")
    events = read_run(run.logs).events
    assert {event.rank for event in events if event.kind == "heartbeat"} == {0, 1}
    assert [event.fields["step"] for event in events if event.kind == "scalar"] == [2, 4]
    assert (run.folder / "checkpoints" / "own_loop.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needed", "saved"),
    [
        ("custom_training_mnist", "tensorflow", "checkpoint"),
        ("keras_mnist", "tf_keras", "checkpoint"),
        ("keras_jax_mnist", "jax", "epoch-001.weights.h5"),
    ],
)
def test_scripts_with_tf_config_resume_where_a_killed_worker_left_them(
    workspace: Path, name: str, needed: str, saved: str
) -> None:
    """One worker kills itself once, after the first epoch; then all workers start again."""
    pytest.importorskip(needed)
    script = workspace / f"examples/{name}.py"
    trap = f"""
import json as _json, os as _os, pathlib as _pathlib, threading as _threading, time as _time

def _kill_once():
    while not list(_pathlib.Path({name!r}).rglob({saved!r})):
        _time.sleep(0.02)
    if not _os.path.exists("killed"):
        open("killed", "w").close()
        _os.kill(_os.getpid(), 9)

if _json.loads(_os.environ["TF_CONFIG"])["task"]["index"] == 1:
    _threading.Thread(target=_kill_once, daemon=True).start()
"""
    script.write_text(trap + script.read_text())
    assert stoker("job", "run", f"examples/{name}.yaml", "--set", "program.args[2]=--epochs=12") == 0
    run = find_run(None)
    assert (workspace / "killed").exists()
    assert [attempt.number for attempt in run.read_status().attempts] == [0, 1]
    last = [line for line in read_output() if "accuracy" in line][-1]
    assert float(last.rpartition(" ")[2].rstrip("%")) > 90
