"""stoker.testing: shards and finished runs for users' tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stoker.testing
from stoker.core.processes import find_processes_by_env
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.launchers.local import LocalLauncher
from stoker.shards.shard_set import find_shard_sets
from stoker.testing import FinishedRun, make_shards, read_events, run_job
from tests.support.trees import digests

RECORDING = """
from stoker.telemetry import recorder
record = recorder()
for step in range(3):
    record.scalar("loss", 1.0 / (step + 1), step)
record.mark("done")
print("trained")
"""


def job(command: str, **keys: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "topology": "single",
        "program": {"command": ["bash", "-c", command]},
        "profile": {"every": 0},
        "retries": 0,
        **keys,
    }


def test_public_names() -> None:
    assert stoker.testing.__all__ == ["FinishedRun", "make_shards", "read_events", "run_job"]


def test_pytest_is_not_needed() -> None:
    program = "import sys; sys.modules['pytest'] = None; import stoker.testing"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_shards_depend_only_on_the_arguments(tmp_path: Path) -> None:
    first = make_shards(tmp_path / "a", samples=60, val=20, classes=3, size=(16, 12), shard_samples=20)
    assert first == tmp_path / "a"
    counts = {each.manifest.split: (each.manifest.samples, len(each.shards)) for each in find_shard_sets(str(first))}
    assert counts == {"train": (60, 3), "val": (20, 1)}
    content = digests(first)
    assert (
        digests(make_shards(tmp_path / "b", samples=60, val=20, classes=3, size=(16, 12), shard_samples=20)) == content
    )
    assert digests(make_shards(first, samples=60, val=20, classes=3, size=(16, 12), shard_samples=20)) == content
    other = make_shards(tmp_path / "c", samples=60, val=0, classes=3, size=(16, 12), shard_samples=20, seed=1)
    assert not (other / "val").exists()
    assert digests(other / "train") != digests(first / "train")


def test_successful_run_has_log_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(RECORDING)
    Path("job.yaml").write_text(json.dumps(job("", program={"script": "train.py"})))
    run = run_job("job.yaml", home=tmp_path / "home", overrides=["name=other"])
    assert (run.succeeded, run.exit_code, run.message) == (True, 0, "")
    assert run.folder.parent == tmp_path / "home" / "runs"
    assert run.run.job.name == "other"
    assert run.log() == run.log("worker/0") == "trained\n"
    assert run.log("worker/1") == ""
    assert [event.fields["value"] for event in run.events("scalar", "loss")] == [1.0, 1 / 2, 1 / 3]
    assert read_events(run) == read_events(run.run) == read_events(run.folder) == run.events()
    assert [event.kind for event in run.events(name="done")] == ["mark"]


def test_failed_run_is_returned(tmp_path: Path) -> None:
    run = run_job(job("echo 'ValueError: bad' >&2; exit 7"), home=tmp_path)
    assert (run.succeeded, run.exit_code, run.status.state) == (False, 7, JobState.FAILED)
    assert "ValueError: bad" in run.message
    killed = run_job(job("kill -9 $$"), home=tmp_path)
    assert killed.exit_code == -signal.SIGKILL


def test_timeout_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="'small'"):
        run_job(job("sleep 1000", grace=1), home=tmp_path, timeout_s=1)
    (folder,) = (tmp_path / "runs").iterdir()
    run = RunFolder(folder)
    assert LocalLauncher().status(run.handle).state is JobState.STOPPED
    assert find_processes_by_env({"STOKER_RUN": run.id}) == []


def test_job_value_takes_no_overrides(tmp_path: Path) -> None:
    finished = run_job(job("true"), home=tmp_path)
    assert run_job(finished.run.job, home=tmp_path).succeeded
    with pytest.raises(TypeError, match="overrides"):
        run_job(finished.run.job, home=tmp_path, overrides=["retries=1"])
    assert isinstance(finished, FinishedRun)
