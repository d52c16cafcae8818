"""Jobs on a real cluster: the contract of every launcher, and what only Kubernetes has."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConflictError, NotFoundError
from stoker.jobs.spec import Job
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL, build_claim
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from stoker.launchers.supervisor import supervisor_pid
from tests.e2e.kubernetes.pods import keys
from tests.launchers.contract import LauncherSuite, Launching, until
from tests.support.kubernetes import NO_KUBERNETES, PATH


class OnCluster(Launching):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _there(self, cluster: KubeClient, tmp_path: Path) -> None:
        self.cluster, self.folder = cluster, tmp_path

    def job(self, command: str | None = None, **more: Any) -> Job:
        given = keys(self.cluster.namespace, str(self.folder), **more.pop("kubernetes", {}))
        env = {**given.pop("env"), **more.pop("env", {})}
        return super().job(command, **{**given, "env": env, **more})


class TestContract(OnCluster, LauncherSuite):
    """Every promise of a launcher, kept by real pods."""


class TestJobs(OnCluster):
    def test_one_delete_removes_all(self, launcher: Any) -> None:
        run, status = self.end(launcher, self.job("true"))
        assert status.state is JobState.SUCCEEDED
        self.cluster.delete("Job", "small")
        until(
            lambda: (
                not self.cluster.list_objects("ConfigMap", {RUN_LABEL: run.id}) and not self.cluster.list_objects("Pod")
            )
        )

    def test_another_machine_takes_a_run_up(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.start(launcher, self.job("echo hello; sleep 3; echo bye"))
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
        there = KubernetesLauncher(f"{self.cluster.context}/{self.cluster.namespace}")
        assert [(row["run"], row["job"]) for row in there.runs()] == [(run.id, "small")]
        taken = there.adopt("small")
        assert taken.id == run.id
        assert taken.folder != run.folder
        assert [line.text for line in there.logs(taken.handle, None, follow=True)] == ["hello", "bye"]
        assert there.status(taken.handle).state is JobState.SUCCEEDED

    def test_what_others_deleted(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("sleep 60"))
        until(lambda: launcher.status(run.handle).state is JobState.RUNNING)
        self.cluster.delete("Job", "small")
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        status = launcher.status(run.handle)
        assert (status.state, status.message) == (JobState.STOPPED, "someone has deleted it")

    def test_what_is_long_gone_is_lost(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("sleep 60"))
        os.kill(supervisor_pid(run) or 0, signal.SIGKILL)
        self.cluster.delete("Job", "small", foreground=True)
        until(lambda: self.cluster.get("Job", "small") is None, 60)
        until(lambda: launcher.status(run.handle).state is JobState.LOST)
        assert "gone from the cluster" in launcher.status(run.handle).message

    def test_the_words_so_far_are_there_for_another_machine(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.start(launcher, self.job("echo hello; sleep 60"))
        until(lambda: self.text(launcher, run) == ["hello"])
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
        there = KubernetesLauncher(f"{self.cluster.context}/{self.cluster.namespace}")
        assert self.text(there, there.adopt(run.id)) == ["hello"]
        there.stop(run.handle)
        assert there.status(run.handle).state is JobState.STOPPED

    def test_what_is_there_already_is_in_the_way(self, launcher: Any) -> None:
        self.start(launcher, self.job("sleep 60"))
        with pytest.raises(ConflictError, match="is there already, and is not over; stop it with"):
            self.start(launcher, self.job("true"))

    def test_a_job_that_is_over_makes_room(self, launcher: Any) -> None:
        for _ in range(2):
            assert self.end(launcher, self.job("true"))[1].state is JobState.SUCCEEDED

    def test_a_follower_that_was_killed_loses_and_repeats_no_line(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("for i in $(seq 60); do echo line $i; sleep 0.1; done"))
        for _ in range(3):
            until(lambda: len(self.text(launcher, run)) > 5)
            pid = supervisor_pid(run)
            assert pid
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: supervisor_pid(run) != pid)  # type: ignore[misc]
            launcher.status(run.handle)
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert self.text(launcher, run) == [f"line {number}" for number in range(1, 61)]

    @pytest.mark.parametrize(
        ("keys", "why"),
        [
            ({"resources": {"gpu": 99}}, "nvidia.com/gpu"),
            ({"image": "no-such-image:local"}, "image"),
            ({"secret_env": {"A": {"secret": "no-such-secret", "key": "a"}}}, "no-such-secret"),
        ],
    )
    def test_why_it_waits(self, launcher: Any, keys: dict[str, Any], why: str) -> None:
        run = self.start(launcher, self.job("true", **keys))
        until(lambda: why in launcher.status(run.handle).message, 60)
        assert launcher.status(run.handle).state is JobState.PENDING
        assert launcher.status(run.handle).message.startswith("worker/0: ")

    def test_a_claim_that_is_not_there(self, launcher: Any) -> None:
        with pytest.raises(
            NotFoundError, match="there is no claim nothing; make it with: stoker volume create nothing --size"
        ):
            self.start(launcher, self.job("true", volumes=[{"claim": "nothing", "path": "/data"}]))

    def test_a_claim_that_another_job_has(self, launcher: Any) -> None:
        self.cluster.create(build_claim("data", 1 << 20, "rwo", {}, storage_class="", volume="none-there"))
        volumes = [{"claim": "data", "path": "/data"}]
        self.start(launcher, self.job("sleep 60", volumes=volumes))
        until(lambda: bool(self.cluster.list_objects("Pod")))
        with pytest.raises(
            ConflictError, match=r"claim data is mounted by pod small-0-.* of job small, and one node alone"
        ):
            self.start(launcher, self.job("true", name="second", volumes=volumes))

    def test_out_of_memory(self, launcher: Any) -> None:
        eat = f"{sys.executable} -c 'x = bytearray(400 << 20)'"
        _, status = self.end(launcher, self.job(eat, resources={"memory": "64Mi"}))
        assert status.state is JobState.FAILED
        assert "no memory left" in status.message

    def test_a_script_travels_without_an_image(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("import helper\nprint(helper.WORD)\n")
        (tmp_path / "helper.py").write_text("WORD = 'travelled'\n")
        job = self.job(program={"script": "train.py"}, kubernetes={"copy": ["helper.py"]})
        run, status = self.end(launcher, job)
        assert (status.state, self.text(launcher, run)) == (JobState.SUCCEEDED, ["travelled"])

    def test_no_such_namespace(self, launcher: Any) -> None:
        with pytest.raises(NotFoundError, match="there is no namespace 'nowhere'"):
            self.start(launcher, self.job("true", kubernetes={"namespace": "nowhere"}))

    def test_a_namespace_that_is_made(self, launcher: Any) -> None:
        name = f"{self.cluster.namespace}-made"
        job = self.job("echo there", kubernetes={"namespace": name, "create_namespace": True})
        try:
            run, status = self.end(launcher, job)
            assert (status.state, self.text(launcher, run)) == (JobState.SUCCEEDED, ["there"])
        finally:
            self.cluster.delete("Namespace", name)

    def test_a_deleted_pod_is_made_again(self, launcher: Any) -> None:
        script = "echo attempt $STOKER_ATTEMPT; test $STOKER_ATTEMPT = 0 && sleep 60; exit 0"
        run = self.start(launcher, self.job(script, retries=1))
        until(lambda: "attempt 0" in self.text(launcher, run))
        (pod,) = self.cluster.list_objects("Pod", {RUN_LABEL: run.id})
        self.cluster.delete("Pod", pod["metadata"]["name"], grace_s=1)
        until(lambda: launcher.status(run.handle).state.is_final, 90)
        assert launcher.status(run.handle).state is JobState.SUCCEEDED
        assert "attempt 1" in self.text(launcher, run)

    def test_a_run_goes_on_where_it_was(self, launcher: Any) -> None:
        script = "echo attempt $STOKER_ATTEMPT; test $STOKER_ATTEMPT = 1"
        run, status = self.end(launcher, self.job(script))
        assert status.state is JobState.FAILED
        launcher.restart(run)
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert launcher.status(run.handle).state is JobState.SUCCEEDED
        assert [line for line in self.text(launcher, run) if "because" not in line] == ["attempt 0", "attempt 1"]
        assert [attempt.code for attempt in launcher.status(run.handle).attempts] == [1, 0]

    def test_quota(self, launcher: Any) -> None:
        spec = {"hard": {"pods": "0"}}
        self.cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": spec})
        time.sleep(1)
        run = self.start(launcher, self.job("true"))
        until(lambda: "quota" in launcher.status(run.handle).message, 60)

    def test_a_deadline(self, launcher: Any) -> None:
        _, status = self.end(launcher, self.job("sleep 60", kubernetes={"deadline": "5s"}))
        assert status.state is JobState.FAILED
        assert "kubernetes.deadline" in status.message


class TestPlan(OnCluster):
    def test_kubectl_takes_the_plan(self, launcher: Any) -> None:
        if shutil.which("kubectl", path=PATH) is None:
            pytest.skip(f"{NO_KUBERNETES}: no kubectl")
        job = self.job("echo $STOKER_RUN $STOKER_ATTEMPT $STOKER_SLOT")
        plan = launcher.render(job).to_text()
        subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=plan, text=True, env={**os.environ, "PATH": PATH}, check=True
        )
        until(lambda: any(pod["status"]["phase"] == "Succeeded" for pod in self.cluster.list_objects("Pod")), 60)
        (pod,) = self.cluster.list_objects("Pod")
        (line,) = self.cluster.stream_log(pod["metadata"]["name"], follow=False)
        assert line.split(b" ", 1)[1] == b"small 0 worker/0\n"


TASK = """
import json, os, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task, cluster = config["task"], config["cluster"]
own = cluster[task["type"]][task["index"]]
assert isinstance(task["index"], int)
assert os.environ["POD_NAME"] == f"{task['type']}-{task['index']}"
servers = json.loads(os.environ["CLUSTER_CONFIG"])
assert servers == {role: cluster.get(role, []) for role in ("ps", "worker")}, servers
listener = socket.create_server(("", int(own.rpartition(":")[2])))
is_lead = task["type"] == ("chief" if "chief" in cluster else "worker")
if not is_lead:
    while True:
        listener.accept()[0].sendall(os.environ["POD_NAME"].encode())
if task["index"] > 0:
    listener.accept()[0].sendall(os.environ["POD_NAME"].encode())
    sys.exit()
for role, addresses in cluster.items():
    for index, address in enumerate(addresses):
        if address == own:
            continue
        host, _, port = address.rpartition(":")
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), 2) as sock:
                    print("reached", sock.recv(100).decode(), flush=True)
                    break
            except OSError:
                time.sleep(0.3)
"""


class TestTensorFlow(OnCluster):
    @pytest.mark.parametrize(
        ("topology", "reached", "roles"),
        [
            ("tf-ps", {"worker-0", "worker-1", "ps-0"}, {}),
            ("tf-mirrored", {"worker-1"}, {}),
        ],
    )
    def test_tasks_reach_each_other(
        self, launcher: Any, tmp_path: Path, topology: str, reached: set[str], roles: dict[str, Any]
    ) -> None:
        (tmp_path / "task.py").write_text(TASK)
        job = self.job(topology=topology, workers=2, program={"script": "task.py"}, roles=roles)
        run, status = self.end(launcher, job, 120)
        assert status.state is JobState.SUCCEEDED, status.message
        assert {line.split()[1] for line in self.text(launcher, run)} == reached
        until(lambda: not [pod for pod in self.cluster.list_objects("Pod") if pod["status"]["phase"] == "Running"], 60)
