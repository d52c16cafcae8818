"""Which run a command acts on: the running one of a job name, never one of several, else the newest."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from stoker.errors import MissingError, StokerError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.run_lookup import choose_run, resolve_run, resolve_run_to_stop
from stoker.jobs.status import JobState
from tests.launchers.contract import is_ready
from tests.support.runs import Runs
from tests.support.trees import stoker
from tests.support.waiting import wait_until

OLD, NEW, NEWEST = (f"small-{year}0101-000000-abcd" for year in (2020, 2098, 2099))


def state_of(run: RunFolder) -> JobState:
    return LAUNCHERS.get("local")().status(run.handle).state


def test_stop_by_name_stops_the_running_run_and_not_the_newest(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = runs.start()
    finished = runs.write(stoker_home, NEWEST)
    assert stoker("job", "stop", "small") == 0
    assert state_of(running) is JobState.STOPPED
    assert running.id in capsys.readouterr().err
    assert state_of(finished) is JobState.SUCCEEDED


@pytest.mark.parametrize("words", [["stop", "small"], ["stop"], ["status", "small"], ["logs", "small"]])
def test_name_of_several_running_runs_is_refused_with_their_ids(
    runs: Runs, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = [runs.start(), runs.start()]
    assert stoker("job", *words) == 2
    sentence = capsys.readouterr().err
    assert all(run.id in sentence for run in both)
    assert [state_of(run) for run in both] == [JobState.RUNNING] * 2


@pytest.mark.parametrize("words", [["report", "small"], ["exec", "small", "--", "ls"], ["forward", "small", "80"]])
def test_other_commands_refuse_several_running_runs(
    runs: Runs, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = [runs.start(), runs.start()]
    assert stoker("job", *words) == 2
    sentence = capsys.readouterr().err
    assert all(run.id in sentence for run in both)
    assert stoker("job", "run", "--resume", "small") == 2
    assert stoker("job", "eval", "small") == 2


def test_commands_that_read_use_the_running_run_else_the_newest(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.write(stoker_home, OLD)
    newest = runs.write(stoker_home, NEWEST, JobState.FAILED)
    assert stoker("job", "status", "small", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"] == newest.id
    running = runs.start()
    wait_until(lambda: is_ready(running))
    assert stoker("job", "status", "small", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"] == running.id
    assert stoker("job", "logs", "small") == 0
    assert capsys.readouterr().out == "ready\n"


def test_stop_says_that_nothing_is_running(runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(stoker_home, OLD)
    runs.write(stoker_home, NEWEST)
    for words in (["small"], []):
        assert stoker("job", "stop", *words) == 0
        sentence = capsys.readouterr().err
        assert "nothing to stop" in sentence
        assert NEWEST in sentence


def test_resume_by_name_refuses_while_an_older_run_is_running(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = runs.start()
    runs.write(stoker_home, NEWEST, JobState.FAILED)
    assert stoker("job", "run", "--resume", "small") == 2
    assert running.id in capsys.readouterr().err


def test_id_prefix_and_handle_select_a_run_whatever_its_state(runs: Runs, stoker_home: Path) -> None:
    runs.start()
    old = runs.write(stoker_home, OLD)
    assert [resolve_run(name) for name in (old.id, old.id[:10], old.handle)] == [old] * 3
    assert resolve_run_to_stop(old.id) == old


def test_prefix_of_a_job_name_stops_nothing(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.start(name="cat-big")
    for name in ("cat", "cat-", "cat-bi"):
        assert stoker("job", "stop", name) == 2
        sentence = capsys.readouterr().err
        assert run.id in sentence
        assert sentence.count("\n") == 1
    assert state_of(run) is JobState.RUNNING
    assert resolve_run("cat") == run
    assert stoker("job", "stop", run.id[: len("cat-big-20")]) == 0
    assert state_of(run) is JobState.STOPPED


def test_lost_run_is_stopped_if_none_is_running(runs: Runs, stoker_home: Path) -> None:
    lost = runs.write(stoker_home, NEW, JobState.RUNNING)  # without a supervisor
    runs.write(stoker_home, NEWEST)
    assert resolve_run_to_stop("small") == lost
    assert stoker("job", "stop", "small") == 0
    assert lost.read_status().state is JobState.STOPPED


def test_handle_of_a_finished_cluster_run_needs_no_cluster(runs: Runs, stoker_home: Path) -> None:
    run = runs.write(stoker_home, OLD)
    for handle in (f"k8s://context/team/{OLD}", f"ray://{run.folder}", f"ssh://{run.folder}"):
        run.write("handle", f"{handle}\n".encode())
        assert resolve_run(handle) == run


@pytest.mark.parametrize("error", [UnavailableError("unreachable"), MissingError("not installed")])
def test_unreachable_target_counts_by_its_last_known_state(
    runs: Runs, stoker_home: Path, monkeypatch: pytest.MonkeyPatch, error: StokerError
) -> None:
    run = runs.write(stoker_home, OLD, JobState.RUNNING)
    run.write("handle", f"k8s://context/team/{OLD}\n".encode())
    runs.write(stoker_home, NEWEST)
    monkeypatch.setattr(LAUNCHERS.get("k8s"), "status", Mock(side_effect=error))
    assert resolve_run("small") == run
    assert resolve_run_to_stop("small") == run


def test_choice_among_the_runs_of_a_cluster() -> None:
    states = {"b": JobState.SUCCEEDED, "a": JobState.RUNNING}
    assert choose_run(states, "small") == "a"
    assert choose_run(dict.fromkeys(states, JobState.FAILED), "small") == "b"
