"""`stoker job status`: what it says about the progress of runs that are not running."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from stoker.cli.runs import format_progress
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import STOPPED_MESSAGE, Attempt, JobState, JobStatus
from stoker.jobs.topology import Slot
from stoker.telemetry.analysis import analyze
from stoker.telemetry.events import Event, Recorder
from tests.support.runs import Runs
from tests.support.trees import stoker


def record_steps(run: RunFolder, attempt: int, first: int) -> None:
    """Write the events of an attempt that ran ten steps."""
    fd = os.open(run.log_path(Slot("worker", 0), attempt), os.O_WRONLY | os.O_CREAT)
    recorder = Recorder(slot="worker/0", attempt=attempt, fd=fd)
    recorder.mark("start", total_steps=100)
    for step in range(first, first + 10):
        recorder.heartbeat(step)
    os.close(fd)


def test_stopped_run_has_no_time_left_and_no_cost_of_restarts(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, "small-20250101-000000-abcd", JobState.STOPPED)
    record_steps(run, 0, 0)
    record_steps(run, 1, 9)
    first = Attempt(number=0, began=0, ended=1, cause=STOPPED_MESSAGE)
    run.write_status(msgspec.structs.replace(run.read_status(), attempt=1, attempts=(first,)))
    assert stoker("job", "status", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["progress"]["step"], found["eta_s"], found["restarts"]["count"]) == (18, None, 0)


@pytest.mark.parametrize("state", JobState)
def test_time_left_is_that_of_a_running_run(state: JobState) -> None:
    start = Event(0.0, "worker/0", 0, 0, 0, "mark", {"name": "start", "total_steps": 100})
    steps = [Event(float(step), "worker/0", 0, 0, step, "heartbeat", {"step": step}) for step in range(1, 11)]
    text = format_progress(analyze([start, *steps]), JobStatus(state=state))
    assert text.startswith("step 10 of 100")
    assert ("1m30s" in text) == (state is JobState.RUNNING)


def test_step_0_is_shown_only_for_a_training() -> None:
    """An evaluation of another file than a checkpoint of the run has no step."""
    scalar = Event(1.0, "worker/0", 0, 0, 1, "scalar", {"name": "val_top1", "value": 0.5, "step": 0})
    start = Event(0.0, "worker/0", 0, 0, 0, "mark", {"name": "start", "total_steps": 100})
    status = JobStatus(state=JobState.SUCCEEDED)
    assert format_progress(analyze([scalar]), status) == "validation top-1 50.00%"
    assert format_progress(analyze([start, scalar]), status).startswith("step 0 of 100, ")
