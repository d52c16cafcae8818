"""`stoker job delete` and `list --state`: which runs are deleted, what of them is kept, and what is refused."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.core.spec import to_json
from stoker.errors import ConflictError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import RunFolder, list_runs
from stoker.jobs.status import JobState, SlotStatus
from stoker.launchers.plan import LocalPlan
from stoker.launchers.run_deletion import delete_run, plan_deletion
from stoker.launchers.ssh.client import SshClient
from stoker.launchers.ssh.plan import SshPlan, set_detached
from stoker.launchers.supervise.supervisor import supervisor_lock
from tests.launchers.contract import is_ready
from tests.support.runs import Runs
from tests.support.trees import stoker
from tests.support.waiting import wait_until

DAY = 86400.0
OLD, NEW = "small-20250101-000000-abcd", "small-20260101-000000-abcd"


def delete(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """Return what `job delete --json` prints."""
    capsys.readouterr()
    assert stoker("job", "delete", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def add_checkpoint(run: RunFolder) -> None:
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints/step-0000000001.pt").write_bytes(b"x" * 5000)


def test_deleted_run_is_gone_with_its_checkpoints(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = runs.write(stoker_home, OLD), runs.write(stoker_home, NEW)
    add_checkpoint(old)
    (row,) = delete(capsys, old.id, "--dry-run")
    assert (row["run"], row["deleted"], row["checkpoints"]) == (OLD, False, ["checkpoints/step-0000000001.pt"])
    assert row["bytes"] >= 5000
    assert list_runs() == [new, old]
    assert stoker("job", "delete", old.id) == 0
    out, err = capsys.readouterr()
    assert OLD in out
    assert "1 checkpoint" in err
    assert list_runs() == [new]
    assert [path.name for path in (stoker_home / "runs").iterdir()] == [NEW]


def test_age_selects_finished_runs(runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(stoker_home, OLD, JobState.FAILED, ended=time.time() - 40 * DAY)
    new = runs.write(stoker_home, NEW, ended=time.time() - 20 * DAY)
    lost = runs.write(stoker_home, "other-20250101-000000-abcd", JobState.RUNNING, ended=time.time() - 50 * DAY)
    running = runs.start()
    assert [row["run"] for row in delete(capsys, "--older-than", "30d")] == [OLD]
    assert {run.id for run in list_runs()} == {new.id, lost.id, running.id}
    assert [row["run"] for row in delete(capsys, "--older-than", "0s")] == [NEW]
    assert {run.id for run in list_runs()} == {lost.id, running.id}
    assert delete(capsys, "--older-than", "30d") == []


def test_running_and_lost_runs_are_refused(runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished, lost = runs.write(stoker_home, OLD), runs.write(stoker_home, NEW, JobState.RUNNING)
    running = runs.start()
    before = list_runs()
    assert stoker("job", "delete", finished.id, running.id, lost.id) == 2
    sentence = capsys.readouterr().err
    assert all(f"stoker job stop {run.id}" in sentence for run in (running, lost))
    assert list_runs() == before
    wait_until(lambda: is_ready(running))


def test_name_of_several_runs_is_refused(runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [runs.write(stoker_home, NEW), runs.write(stoker_home, OLD)]
    assert stoker("job", "delete", "small") == 2
    sentence = capsys.readouterr().err
    assert all(run.id in sentence for run in both)
    assert list_runs() == both
    delete(capsys, OLD)
    assert [row["run"] for row in delete(capsys, "small")] == [NEW]


@pytest.mark.parametrize(
    "words",
    [
        [],
        [OLD, "--older-than", "30d"],
        ["--older-than", "long"],
        ["nothing"],
        ["--all"],
        ["small", "--all", "--older-than", "30d"],
        [OLD, "--all"],
    ],
)
def test_unclear_selection_is_refused(
    runs: Runs, stoker_home: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, OLD)
    assert stoker("job", "delete", *words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list_runs() == [run]


@pytest.mark.parametrize("age", ["5", "0", " 2.5", "1e2"])
def test_age_without_a_unit_is_refused_before_anything_is_deleted(
    runs: Runs, stoker_home: Path, age: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, OLD, ended=time.time() - 40 * DAY)
    assert stoker("job", "delete", "--older-than", age) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert all(part in sentence for part in ("--older-than", "30d", "12h", repr(age)))
    assert list_runs() == [run]


def test_prefix_of_a_job_name_deletes_nothing(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write(stoker_home, "small-big-20250101-000000-abcd")
    for name in ("small", "small-", "small-bi"):
        assert stoker("job", "delete", name) == 2
        sentence = capsys.readouterr().err
        assert run.id in sentence
        assert sentence.count("\n") == 1
    assert list_runs() == [run]
    assert [row["run"] for row in delete(capsys, "small-big-2")] == [run.id]


def test_all_finished_runs_of_a_job_are_deleted(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = [runs.write(stoker_home, f"small-202501{day:02}-000000-abcd") for day in range(1, 13)]
    kept = [
        runs.write(stoker_home, "small-20240101-000000-abcd", JobState.RUNNING),  # lost
        runs.write(stoker_home, "small-big-20230101-000000-abcd"),
    ]
    assert stoker("job", "delete", "small") == 2
    assert "--all" in capsys.readouterr().err
    assert {row["run"] for row in delete(capsys, "small", "--all")} == {run.id for run in finished}
    assert list_runs() == kept


def test_checkpoints_that_a_running_run_uses_are_not_deleted(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = runs.write(stoker_home, OLD, ended=time.time() - 40 * DAY)
    add_checkpoint(trained)
    evaluation = runs.start(name="eval", checkpoint={"dir": str(trained.folder / "checkpoints")})
    assert stoker("job", "delete", trained.id) == 2
    assert evaluation.id in capsys.readouterr().err
    assert delete(capsys, "--older-than", "30d") == []
    assert trained.folder.exists()


def test_checkpoints_that_a_lost_run_uses_are_not_deleted(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = runs.write(stoker_home, OLD)
    add_checkpoint(trained)
    folder = {"dir": str(trained.folder / "checkpoints")}
    user = runs.write(stoker_home, "eval-20250101-000000-abcd", JobState.LOST, checkpoint=folder)
    assert stoker("job", "delete", trained.id) == 2
    assert user.id in capsys.readouterr().err
    assert trained.folder.exists()


def test_finished_runs_that_use_the_checkpoints_are_listed(
    runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = runs.write(stoker_home, OLD)
    folder = {"dir": str(trained.folder / "checkpoints")}
    user = runs.write(stoker_home, "eval-20250101-000000-abcd", checkpoint=folder)
    (row,) = delete(capsys, trained.id, "--dry-run")
    assert row["users"] == [user.id]
    assert stoker("job", "delete", trained.id) == 0
    assert user.id in capsys.readouterr().err
    assert list_runs() == [user]


@pytest.mark.parametrize("version", [1, 2])
def test_ssh_run_with_a_slot_of_unknown_exit_is_refused_until_it_is_stopped(
    version: int, runs: Runs, stoker_home: Path
) -> None:
    run = runs.write(stoker_home, OLD, JobState.FAILED)
    run.write("handle", f"ssh://{run.folder}\n".encode())
    if version == 1:
        (run.folder / "version").unlink()
        run.write("processes.json", to_json(LocalPlan(slots={}, detached=True)))
    else:
        set_detached(run, is_detached=True)
    slots = (SlotStatus(slot="worker/0", state=JobState.LOST),)
    run.write_status(msgspec.structs.replace(run.read_status(), slots=slots))
    run.write("plan.json", to_json(SshPlan(slots={}, host_configs={}, client=SshClient(), source="")))
    with pytest.raises(ConflictError, match="may still be running"):
        plan_deletion(run)
    LAUNCHERS.get("ssh")().stop(run.handle)
    assert plan_deletion(run).state is JobState.FAILED


@pytest.mark.parametrize(("pods", "code", "state"), [([], 0, "stopped"), (["small-0"], 5, "lost")])
def test_lost_kubernetes_run_can_be_deleted_once_its_pods_are_gone(
    runs: Runs, stoker_home: Path, monkeypatch: pytest.MonkeyPatch, pods: list[str], code: int, state: str
) -> None:
    run = runs.write(stoker_home, OLD, JobState.LOST, grace=0)
    run.write("handle", f"k8s://context/team/{OLD}\n".encode())

    class Cluster(nullcontext[Any]):
        def __enter__(self) -> Any:
            return self

        def list_objects(self, kind: str, labels: object) -> list[Any]:
            return [{"metadata": {"name": name}} for name in pods] if kind == "Pod" else []

    monkeypatch.setattr("stoker.launchers.kubernetes.launcher.KubeClient.for_target", lambda _: Cluster())
    monkeypatch.setattr("stoker.launchers.kubernetes.lifecycle.DELETE_TIMEOUT_S", 0.1)
    assert stoker("job", "stop", run.id) == code
    assert run.read_status().state == state
    assert stoker("job", "delete", run.id) == (2 if pods else 0)
    assert run.folder.exists() == bool(pods)


def test_what_is_elsewhere_is_kept_and_named(
    runs: Runs, stoker_home: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workspace / "ck"
    folder.mkdir()
    (folder / "best.pt").touch()
    run = runs.write(stoker_home, OLD, checkpoint={"dir": str(folder)})
    for handle, part in ((f"ssh://{run.folder}", f".stoker/{OLD}"), (f"k8s://c/team/{OLD}", "k8s://c/team")):
        run.write("handle", f"{handle}\n".encode())
        (row,) = delete(capsys, handle, "--dry-run")
        assert any(str(folder) in text for text in row["kept"])
        assert any(part in text for text in row["kept"])
    delete(capsys, OLD)
    assert (folder / "best.pt").exists()


def test_run_that_was_resumed_meanwhile_is_not_deleted(runs: Runs, stoker_home: Path) -> None:
    run = runs.write(stoker_home, OLD)
    deletion = plan_deletion(run)
    with supervisor_lock(run), pytest.raises(ConflictError):
        delete_run(deletion)
    assert list_runs() == [run]


def test_interrupted_deletion_is_completed_by_the_next(runs: Runs, stoker_home: Path) -> None:
    half, run = runs.write(stoker_home, OLD), runs.write(stoker_home, NEW)
    half.folder.rename(half.folder.with_name(f".{OLD}.deleted"))
    assert list_runs() == [run]
    delete_run(plan_deletion(run))
    assert list((stoker_home / "runs").iterdir()) == []


def test_run_that_another_process_has_deleted_is_no_error(runs: Runs, stoker_home: Path) -> None:
    deletion = plan_deletion(runs.write(stoker_home, OLD))
    delete_run(deletion)
    delete_run(deletion)
    assert list((stoker_home / "runs").iterdir()) == []


def test_concurrent_deletions_do_not_break_each_other(runs: Runs, stoker_home: Path) -> None:
    """Each of them also finds the folder that the other is removing."""
    deletions = []
    for number in range(12):
        run = runs.write(stoker_home, f"small-20250101-0000{number:02}-abcd")
        for name in range(200):
            (run.folder / f"logs/{name}").touch()
        deletions.append(plan_deletion(run))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(delete_run, deletions))
    assert list((stoker_home / "runs").iterdir()) == []


def test_list_filters_by_state(runs: Runs, stoker_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(stoker_home, OLD, JobState.FAILED)
    runs.write(stoker_home, NEW)
    running = runs.start()
    for states, expected in (
        ("running", [running.id]),
        ("running, failed", [running.id, OLD]),
        ("succeeded", [NEW]),
        ("lost", []),
    ):
        assert stoker("job", "list", "--json", "--state", states) == 0
        assert [row["run"] for row in json.loads(capsys.readouterr().out)] == expected
    assert stoker("job", "list", "--state", "running,failed", "--limit", "1") == 0
    out, err = capsys.readouterr()
    assert running.id in out
    assert " 1 older run" in err
    assert stoker("job", "list", "--state", "finished") == 2
    assert "'finished'" in capsys.readouterr().err
