"""Runs of a namespace that others started, followed without changing anything, against a fake API server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import InputError, UnavailableError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.launchers.followed_runs import GONE_MESSAGE, ClusterRuns, FollowedRuns, open_cluster_runs
from stoker.launchers.kubernetes import follower
from tests.launchers.contract import job_of
from tests.support.kube_api import KubeApi, running_kube_api
from tests.support.runs import Runs
from tests.support.waiting import wait_until

pytest.importorskip("lightkube")
RUN_ID = "digits-20260101-000000-aaaa"
LOG, POD = "worker-0.0.log", f"{RUN_ID}-worker"
Follow = Callable[..., FollowedRuns]


@pytest.fixture
def kube(stoker_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with running_kube_api(tmp_path) as (server, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield server
    assert {method for method, _ in server.requests} <= {"GET"}, "the cluster was changed"


@pytest.fixture
def follow(kube: KubeApi) -> Iterator[Follow]:
    """Return a function that starts to follow the runs of the namespace."""
    started: list[FollowedRuns] = []

    def start(*names: str) -> FollowedRuns:
        started.append(FollowedRuns(open_cluster_runs("k8s://ctx/team"), names))
        started[-1].start()
        return started[-1]

    yield start
    for followed in started:
        followed.stop()
    for run_id in {obj["metadata"]["labels"]["stoker.dev/run"] for obj in kube.objects if obj["kind"] == "Job"}:
        kube.finish(run_id)  # ends the threads that follow them
    wait_until(lambda: not [t for t in threading.enumerate() if t.name in ("Pod", "Job", *kube.logs)])


def job(**keys: Any) -> Any:
    return job_of("true", **{"name": "digits", "image": "registry.example/x:1", **keys})


def read_log(run: RunFolder) -> list[str]:
    path = run.logs / LOG
    return path.read_text().splitlines() if path.exists() else []


def test_run_is_copied_live_and_to_its_end(kube: KubeApi, follow: Follow, stoker_home: Path) -> None:
    kube.add_run(job(), RUN_ID)
    kube.write_log(POD, "one")
    followed = follow()
    wait_until(lambda: [run.id for run in followed.list_folders()] == [RUN_ID])
    (run,) = followed.list_folders()
    assert run.folder == stoker_home / "followed/k8s-ctx-team" / RUN_ID
    wait_until(lambda: read_log(run) == ["one"])
    wait_until(lambda: run.read_status().state is JobState.RUNNING)
    assert run.job.name == "digits"
    kube.write_log(POD, "two", "two")
    wait_until(lambda: read_log(run) == ["one", "two", "two"])
    kube.finish(RUN_ID)
    wait_until(lambda: run.read_status().state is JobState.SUCCEEDED)
    assert read_log(run) == ["one", "two", "two"]
    assert not (stoker_home / "runs" / RUN_ID).exists()


def test_following_goes_on_after_a_restart_without_gap_or_double(kube: KubeApi, follow: Follow) -> None:
    kube.add_run(job(), RUN_ID)
    kube.write_log(POD, "one", "two")
    copy = FollowedRuns(open_cluster_runs("k8s://ctx/team")).folder / RUN_ID
    argv = [sys.executable, "-m", "stoker", "dash", "--on", "k8s://ctx/team", "--port", "0"]
    with subprocess.Popen(argv) as dashboard:
        try:
            wait_until(lambda: read_log(RunFolder(copy)) == ["one", "two"])
        finally:
            dashboard.kill()
    kube.write_log(POD, "three")
    (run,) = (followed := follow()).list_folders()
    wait_until(lambda: read_log(run) == ["one", "two", "three"])
    kube.finish(RUN_ID, code=1)
    wait_until(lambda: run.read_status().state is JobState.FAILED)
    followed.refresh()
    assert read_log(run) == ["one", "two", "three"]


def test_other_jobs_of_a_finished_run_are_left_alone(
    kube: KubeApi, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ordinary follower stops parameter servers when the chief has finished; they are not ours to stop."""
    monkeypatch.setattr(follower, "READ_ONLY_TIMEOUT_S", 0.5)
    keys = {"program": {"script": "/image/train.py"}, "topology": "tf-ps", "workers": 1}
    kube.add_run(job_of(**keys, name="digits", image="x", roles={"ps": {"count": 1}}), RUN_ID)
    kube.write_log(f"{RUN_ID}-chief", "trained")
    kube.finish(RUN_ID, except_role="ps")
    followed = follow()
    wait_until(lambda: [run.read_status().state for run in followed.list_folders()] == [JobState.SUCCEEDED])
    (run,) = followed.list_folders()
    assert (run.logs / "chief-0.0.log").read_text() == "trained\n"
    states = {slot.slot: slot.state for slot in run.read_status().slots}
    assert states["ps/0"] is JobState.STOPPED


def test_only_named_runs_are_followed(kube: KubeApi, follow: Follow) -> None:
    other = "pets-20260101-000000-bbbb"
    kube.add_run(job(), RUN_ID)
    kube.add_run(job(name="pets"), other)
    by_name, by_id = follow("pets"), follow(RUN_ID)
    wait_until(lambda: [run.id for run in by_name.list_folders()] == [other])
    wait_until(lambda: [run.id for run in by_id.list_folders()] == [RUN_ID])


def test_run_of_this_machine_is_not_copied(kube: KubeApi, follow: Follow, stoker_home: Path) -> None:
    own = Runs().write(stoker_home, RUN_ID, JobState.SUCCEEDED)
    kube.add_run(job(), RUN_ID)
    followed = follow()
    assert followed.list_folders() == [own]
    assert list(followed.folder.iterdir()) == []


def test_run_that_is_gone_is_recorded_as_lost(kube: KubeApi, follow: Follow) -> None:
    kube.add_run(job(), RUN_ID)
    first = FollowedRuns(open_cluster_runs("k8s://ctx/team"))
    folder = first.folder / RUN_ID
    (folder / "logs").mkdir(parents=True)
    (folder / "handle").write_text("k8s://ctx/team/x\n")
    (folder / "state.json").write_text('{"state": "running"}')
    kube.objects.clear()
    (run,) = follow().list_folders()
    assert (run.read_status().state, run.read_status().message) == (JobState.LOST, GONE_MESSAGE)


def test_invalid_job_file_is_reported_in_the_status(kube: KubeApi, follow: Follow) -> None:
    kube.add_run(job(), RUN_ID)
    (config_map,) = [obj for obj in kube.objects if obj["kind"] == "ConfigMap"]
    config_map["data"]["job.yaml"] = "name: 7"
    followed = follow()
    wait_until(lambda: [run.read_status().state for run in followed.list_folders()] == [JobState.LOST])
    (run,) = followed.list_folders()
    assert "job.yaml" in run.read_status().message


def test_targets_that_cannot_be_followed(stoker_home: Path, kube: KubeApi) -> None:
    with pytest.raises(InputError, match="cannot be followed"):
        open_cluster_runs("local")
    kube.server_close()
    runs: ClusterRuns = open_cluster_runs("k8s://ctx/team")
    with pytest.raises(UnavailableError):
        FollowedRuns(runs).start()
