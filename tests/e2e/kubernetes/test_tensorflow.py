"""TensorFlow topologies on a real cluster: tasks reach each other, and stop when the lead has finished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.client import KubeClient
from tests.e2e.kubernetes.pods import build_job_keys
from tests.launchers.contract import LauncherTests
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

TASK = ROOT / "tests/support/tf_task.py"
ROLES = {"ps": {"count": 2}, "evaluator": {"count": 1}}
PS = {"topology": "tf-ps", "workers": 2, "roles": ROLES}
NO_CHIEF = {"topology": "tf-ps", "workers": 2, "roles": {"chief": {"count": 0}}}
MIRRORED = {"topology": "tf-mirrored", "workers": 3, "port": 5000}


@pytest.mark.timeout(180)
class TestTasks(LauncherTests):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _setup(self, cluster: KubeClient, tmp_path: Path) -> None:
        self.cluster = cluster
        shutil.copy(TASK, tmp_path / "task.py")  # copied with the job

    def build_job(self, **more: Any) -> JobSpec:
        return self.job(program={"script": "task.py"}, **build_job_keys(self.cluster.namespace), **more)

    @pytest.mark.parametrize("keys", [PS, NO_CHIEF, MIRRORED], ids=["ps", "no chief", "mirrored"])
    def test_tasks_reach_each_other_and_stop_with_the_lead(self, launcher: Any, keys: Any) -> None:
        job = self.build_job(**keys)
        run, status = self.run_to_end(launcher, job, 120)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        plan = json.loads((run.folder / "plan.json").read_text())
        (config,) = [obj for obj in plan["objects"] if obj["kind"] == "ConfigMap"]
        cluster = json.loads(config["data"]["cluster.json"])
        lead_role = "chief" if "chief" in cluster else "worker"
        tasks = {f"{role}-{index}": address for role in cluster for index, address in enumerate(cluster[role])}
        for index in range(len(cluster[lead_role])):
            lines = self.text(launcher, run, Slot(lead_role, index))
            others = {name: address for name, address in tasks.items() if name != f"{lead_role}-{index}"}
            assert {f"reached {name} at {address}" for name, address in others.items()} <= set(lines)
            assert "done" in lines
        assert all(address.startswith("small-") for address in tasks.values())
        wait_until(
            lambda: not [pod for pod in self.cluster.list_objects("Pod") if pod["status"]["phase"] == "Running"], 60
        )
