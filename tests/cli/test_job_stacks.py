"""`stoker job stacks`: the stacks of ranks that can print them; others are not signalled."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.jobs.run_files import STACKS_REQUEST_FILE
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from tests.support.runs import SLEEP, Runs
from tests.support.trees import stoker
from tests.support.waiting import is_alive, wait_until

PROGRAM = """
import subprocess, sys, time
from stoker.telemetry import recorder

record = recorder()
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)

def wait_for_ever():
    while True:
        record.heartbeat(3)
        time.sleep(0.1)

wait_for_ever()
"""


def test_every_rank_prints_its_stacks_and_goes_on(
    workspace: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "work" / "program.py").write_text(PROGRAM)
    run = runs.start(program={"script": "program.py"}, topology="torchrun", processes_per_worker=2)
    log = run.log_path(Slot("worker", 0), 0)
    wait_until(lambda: log.exists() and log.read_text().count('"heartbeat"') > 20)
    children = [int(line.split()[-1]) for line in log.read_text().splitlines() if line.startswith("child ")]
    assert stoker("job", "stacks", run.id) == 0
    text = capsys.readouterr().out
    assert text.count("in wait_for_ever") == 2
    assert "rank 0" in text
    assert "rank 1" in text
    assert len(children) == 2
    assert all(is_alive(pid) for pid in children)  # SIGUSR1 would have killed them
    assert run.read_status().state is JobState.RUNNING
    assert not (run.folder / STACKS_REQUEST_FILE).exists()


def test_program_without_stacks_is_not_signalled(
    workspace: Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.start(SLEEP)
    wait_until(lambda: run.read_status().state is JobState.RUNNING)
    assert stoker("job", "stacks", run.id) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "recorder()" in err
    assert run.read_status().state is JobState.RUNNING


def test_finished_run_has_no_stacks(stoker_home: Path, runs: Runs) -> None:
    runs.write(stoker_home, "digits-20260101-000000-abcd", JobState.SUCCEEDED)
    assert stoker("job", "stacks", "digits") == 2
