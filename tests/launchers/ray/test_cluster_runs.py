"""Runs of a Ray cluster that others started, followed by the logs of their drivers."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.launchers.followed_runs import FollowedRuns, open_cluster_runs
from stoker.launchers.ray.cluster import SubmittedJob
from stoker.launchers.ray.cluster_runs import SubmissionFollower
from stoker.launchers.ray.launcher import RayLauncher
from tests.launchers.contract import LauncherTests, job_of
from tests.support.ray import RayTestCluster
from tests.support.waiting import wait_until

RUN_ID = "digits-20260101-000000-aaaa"


class FakeRay:
    """A Ray cluster whose jobs are over, with the logs of their drivers."""

    address = "http://127.0.0.1:1"

    def __init__(self, *logs: list[dict[str, Any]], stopped: bool = False) -> None:
        self.names = [f"stoker-{RUN_ID}-{attempt}-abcd" for attempt in range(len(logs))]
        self.logs = dict(zip(self.names, map(list, logs), strict=True))
        self._stopped = stopped

    def jobs(self) -> list[SubmittedJob]:
        times = {"began": 100.0, "ended": 160.0}
        return [SubmittedJob(name, True, self._stopped, "exited", **times) for name in ("other", *self.names)]

    def state(self, name: str) -> tuple[bool, str]:
        return True, "exited"

    async def tail(self, name: str) -> AsyncGenerator[str, None]:
        for number, frame in enumerate(self.logs[name], start=1):
            yield f"@stoker-ray {json.dumps({'n': number, **frame})}\n"
        yield "a line of Ray itself\n@stoker-ray {torn"


@pytest.fixture
def copy(stoker_home: Path) -> Iterator[RunFolder]:
    run = RunFolder(stoker_home / "followed/x" / RUN_ID)
    run.logs.mkdir(parents=True)
    return run


def follow(cluster: FakeRay, run: RunFolder) -> None:
    SubmissionFollower(cluster, run).follow()  # type: ignore[arg-type]


def output(slot: str, text: str) -> dict[str, Any]:
    return {"slot": slot, "data": text}


def test_logs_and_ends_of_all_attempts_are_copied(copy: RunFolder) -> None:
    placed = {"addresses": {"worker/0": "10.0.0.1", "worker/1": "10.0.0.2"}}
    first = [placed, output("worker/0", "one\n"), output("worker/1", "RuntimeError: no\n"),
             {"slot": "worker/1", "code": 1}, {"slot": "worker/0", "code": 143}, {"finished": True}]  # fmt: skip
    second = [placed, output("worker/0", "again\n"), {"slot": "worker/0", "code": 0}, {"slot": "worker/1", "code": 0}]
    follow(FakeRay(first), copy)
    status = copy.read_status()
    assert (status.state, status.began, status.ended) == (JobState.FAILED, 100.0, 160.0)
    assert "worker/1" in status.message
    assert "RuntimeError: no" in status.message
    cluster = FakeRay(first, second)
    for _ in range(2):  # the second time, there is nothing new
        follow(cluster, copy)
        status = copy.read_status()
        assert (status.state, status.attempt) == (JobState.SUCCEEDED, 1)
        assert [attempt.code for attempt in status.attempts] == [1, 0]
        assert (copy.logs / "worker-0.0.log").read_text() == "one\n"
        assert (copy.logs / "worker-0.1.log").read_text() == "again\n"


def test_following_goes_on_without_gap_or_double(copy: RunFolder) -> None:
    frames = [output("worker/0", f"line {number}\n") for number in range(5)]
    follow(FakeRay(frames[:3]), copy)
    positions = copy.folder / "streams.json"
    saved = json.loads(positions.read_text())
    (log,) = saved.values()
    log |= {"frame": 2, "sizes": {"worker/0": 14}, "is_done": False}  # killed before it could save more
    positions.write_text(json.dumps(saved))
    follow(FakeRay([*frames, {"slot": "worker/0", "code": 0}]), copy)
    assert (copy.logs / "worker-0.0.log").read_text() == "".join(f"line {number}\n" for number in range(5))


@pytest.mark.parametrize("name", ["../../x/0", "worker/../0", "/etc/0", "worker", "worker/0/1", "Worker/0", 7])
def test_names_of_slots_are_checked(copy: RunFolder, name: Any) -> None:
    follow(FakeRay([{"addresses": {str(name): "a"}}, output(name, "x"), {"slot": name, "code": 0}]), copy)
    assert list(copy.logs.iterdir()) == []
    assert copy.read_status().slots == ()


def test_stopped_run(copy: RunFolder) -> None:
    follow(FakeRay([output("worker/0", "x\n"), {"slot": "worker/0", "code": 143}]), copy)
    assert copy.read_status().state is JobState.STOPPED
    assert copy.read_status().slots[0].state is JobState.STOPPED


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # in Ray's client
class TestRealCluster(LauncherTests):
    ON = "ray"

    @pytest.fixture
    def launcher(self, cluster: RayTestCluster) -> Any:
        self.cluster = cluster
        return RayLauncher(cluster.target)

    def test_run_of_another_machine_is_followed_live(
        self, launcher: Any, stoker_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = tmp_path / "go-on"
        command = f"echo one; while [ ! -e {go_on} ]; do sleep 0.1; done; [ $STOKER_ATTEMPT = 1 ] && echo two || exit 1"
        owned = self.start(launcher, job_of(command, name="shared", retries=1))
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
        followed = FollowedRuns(open_cluster_runs(f"ray://{self.cluster.target}"))
        followed.start()
        try:
            wait_until(lambda: owned.id in [run.id for run in followed.list_folders()], 60)
            copy = RunFolder(followed.folder / owned.id)
            wait_until(lambda: read(copy, 0) == "one\n", 100)
            wait_until(lambda: copy.read_status().state is JobState.RUNNING)
            go_on.touch()
            wait_until(lambda: read(copy, 1) == "one\ntwo\n", 120)
            wait_until(lambda: copy.read_status().state is JobState.SUCCEEDED, 60)
        finally:
            followed.stop()
        assert [attempt.code for attempt in copy.read_status().attempts] == [1, 0]
        wait_until(lambda: owned.read_status().state is JobState.SUCCEEDED, 60)
        for attempt in (0, 1):
            assert read(copy, attempt) == read(owned, attempt)
        assert os.listdir(tmp_path / "elsewhere") == ["followed"]


def read(run: RunFolder, attempt: int) -> str:
    path = run.logs / f"worker-0.{attempt}.log"
    return path.read_text() if path.exists() else ""
