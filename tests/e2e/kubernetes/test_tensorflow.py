"""TensorFlow's topologies on a real cluster: tasks find each other by their environment, and end with the lead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.spec import Job
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.client import KubeClient
from tests.e2e.kubernetes.pods import keys
from tests.launchers.contract import Launching, until
from tests.support.paths import ROOT

TASK = ROOT / "tests/support/tf_task.py"
ROLES = {"ps": {"count": 2}, "evaluator": {"count": 1}}
PS = {"topology": "tf-ps", "workers": 2, "roles": ROLES}
NOBODY_LEADS = {"topology": "tf-ps", "workers": 2, "roles": {"chief": {"count": 0}}}
MIRRORED = {"topology": "tf-mirrored", "workers": 3, "port": 5000}


@pytest.mark.timeout(180)
class TestTasks(Launching):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _there(self, cluster: KubeClient, tmp_path: Path) -> None:
        self.cluster = cluster
        shutil.copy(TASK, tmp_path / "task.py")  # it travels with the job

    def job_of_tasks(self, **more: Any) -> Job:
        return self.job(program={"script": "task.py"}, **keys(self.cluster.namespace), **more)

    @pytest.mark.parametrize("given", [PS, NOBODY_LEADS, MIRRORED], ids=["ps", "no chief", "mirrored"])
    def test_tasks_reach_each_other_and_the_end_of_the_lead_is_the_jobs(self, launcher: Any, given: Any) -> None:
        job = self.job_of_tasks(**given)
        run, status = self.end(launcher, job, 120)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        plan = json.loads((run.folder / "plan.json").read_text())
        (config,) = [one for one in plan["objects"] if one["kind"] == "ConfigMap"]
        cluster = json.loads(config["data"]["cluster.json"])
        leads = "chief" if "chief" in cluster else "worker"
        every = {f"{role}-{index}": one for role in cluster for index, one in enumerate(cluster[role])}
        for index in range(len(cluster[leads])):
            lines = self.text(launcher, run, Slot(leads, index))
            others = {name: address for name, address in every.items() if name != f"{leads}-{index}"}
            assert {f"reached {name} at {address}" for name, address in others.items()} <= set(lines)
            assert "done" in lines
        assert all(address.startswith("small-") for address in every.values())
        until(lambda: not [pod for pod in self.cluster.list_objects("Pod") if pod["status"]["phase"] == "Running"], 60)
