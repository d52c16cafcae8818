"""`stoker dash --on`: runs that others started, followed on a real cluster without changing anything in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.launchers.followed_runs import FollowedRuns, open_cluster_runs
from tests.e2e.kubernetes.test_launcher import OnCluster
from tests.support.waiting import wait_until

WRITES = ("apply", "create", "patch", "delete", "delete_all")


def read(run: RunFolder, attempt: int = 0) -> list[str]:
    path = run.logs / f"worker-0.{attempt}.log"
    return path.read_text().splitlines() if path.exists() else []


class TestFollowedRuns(OnCluster):
    def test_run_is_followed_live_and_not_changed(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = tmp_path / "go-on"
        owned = self.start(launcher, self.job(f"echo one; while [ ! -e {go_on} ]; do sleep 0.1; done; echo two"))
        wait_until(lambda: read(owned) == ["one"], 120)
        with monkeypatch.context() as patch:
            patch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
            for name in WRITES:  # in this process, which only follows; the owner's follower is another one
                patch.setattr(KubeClient, name, _refuse)
            followed = FollowedRuns(open_cluster_runs(f"k8s://{self.cluster.context}/{self.cluster.namespace}"))
            followed.start()
            wait_until(lambda: [run.id for run in followed.list_folders()] == [owned.id], 60)
            copy = RunFolder(followed.folder / owned.id)
            wait_until(lambda: read(copy) == ["one"], 60)
            wait_until(lambda: copy.read_status().state is JobState.RUNNING, 60)
            go_on.touch()
            wait_until(lambda: copy.read_status().state is JobState.SUCCEEDED, 120)
            assert read(copy) == ["one", "two"]
            followed.stop()
        wait_until(lambda: owned.read_status().state is JobState.SUCCEEDED, 60)
        assert read(owned) == ["one", "two"]


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a followed run must not be changed")
