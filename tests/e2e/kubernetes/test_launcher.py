"""Jobs on a real cluster: the contract of all launchers, and what is specific to Kubernetes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConflictError, NotFoundError
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.kube.client import KubeClient
from stoker.kube.objects import RUN_LABEL, build_claim
from stoker.launchers.kubernetes.launcher import KubernetesLauncher
from stoker.launchers.kubernetes.status import DELETED_MESSAGE, LOST_MESSAGE
from stoker.launchers.supervise.supervisor import supervisor_pid
from tests.e2e.kubernetes.pods import build_job_keys
from tests.launchers.contract import LauncherSuite, LauncherTests
from tests.support.kubernetes import NO_KUBERNETES, PATH
from tests.support.waiting import wait_until


class OnCluster(LauncherTests):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _setup(self, cluster: KubeClient, tmp_path: Path) -> None:
        self.cluster, self.folder = cluster, tmp_path

    def job(self, command: str | None = None, **more: Any) -> JobSpec:
        keys = build_job_keys(self.cluster.namespace, str(self.folder), **more.pop("kubernetes", {}))
        env = {**keys.pop("env"), **more.pop("env", {})}
        return super().job(command, **{**keys, "env": env, **more})


class TestContract(OnCluster, LauncherSuite):
    """The launcher contract, with real pods."""


class TestJobs(OnCluster):
    def test_deleting_the_lead_deletes_all_objects(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, self.job("true"))
        assert status.state is JobState.SUCCEEDED
        self.cluster.delete("Job", "small")
        wait_until(
            lambda: (
                not self.cluster.list_objects("ConfigMap", {RUN_LABEL: run.id}) and not self.cluster.list_objects("Pod")
            )
        )

    def test_run_can_be_adopted_on_another_machine(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.start(launcher, self.job("echo hello; sleep 3; echo bye"))
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
        other = KubernetesLauncher(f"{self.cluster.context}/{self.cluster.namespace}")
        assert [(row["run"], row["job"]) for row in other.runs()] == [(run.id, "small")]
        adopted = other.adopt("small")
        assert adopted.id == run.id
        assert adopted.folder != run.folder
        assert [line.text for line in other.logs(adopted.handle, None, follow=True)] == ["hello", "bye"]
        assert other.status(adopted.handle).state is JobState.SUCCEEDED

    def test_job_deleted_by_others_is_stopped(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("sleep 60"))
        wait_until(lambda: launcher.status(run.handle).state is JobState.RUNNING)
        self.cluster.delete("Job", "small")
        wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
        status = launcher.status(run.handle)
        assert (status.state, status.message) == (JobState.STOPPED, DELETED_MESSAGE)

    def test_job_deleted_while_nobody_followed_is_lost(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("sleep 60"))
        os.kill(supervisor_pid(run) or 0, signal.SIGKILL)
        self.cluster.delete("Job", "small", foreground=True)
        wait_until(lambda: self.cluster.get("Job", "small") is None, 60)
        wait_until(lambda: launcher.status(run.handle).state is JobState.LOST)
        assert launcher.status(run.handle).message == LOST_MESSAGE

    def test_logs_so_far_are_available_on_another_machine(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = self.start(launcher, self.job("echo hello; sleep 60"))
        wait_until(lambda: self.text(launcher, run) == ["hello"])
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
        other = KubernetesLauncher(f"{self.cluster.context}/{self.cluster.namespace}")
        assert self.text(other, other.adopt(run.id)) == ["hello"]
        other.stop(run.handle)
        assert other.status(run.handle).state is JobState.STOPPED

    def test_unfinished_job_of_the_same_name_is_a_conflict(self, launcher: Any) -> None:
        self.start(launcher, self.job("sleep 60"))
        with pytest.raises(
            ConflictError, match=r"job small already exists and has not finished; .*stoker job stop k8s://"
        ):
            self.start(launcher, self.job("true"))

    def test_finished_job_of_the_same_name_is_replaced(self, launcher: Any) -> None:
        for _ in range(2):
            assert self.run_to_end(launcher, self.job("true"))[1].state is JobState.SUCCEEDED

    def test_killed_follower_loses_and_repeats_no_line(self, launcher: Any) -> None:
        killed = self.folder / "killed"
        program = f"i=0; until [ -e {killed} ]; do i=$((i+1)); echo line $i; sleep 0.1; done; echo $i lines"
        run = self.start(launcher, self.job(program))
        for count in range(3):
            wait_until(lambda count=count: len(self.text(launcher, run)) > 5 * (count + 1))  # type: ignore[misc]
            pid = supervisor_pid(run)
            assert pid
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: supervisor_pid(run) != pid)  # type: ignore[misc]
            launcher.status(run.handle)
        killed.touch()
        wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
        *lines, last = self.text(launcher, run)
        assert last == f"{len(lines)} lines"
        assert lines == [f"line {number}" for number in range(1, len(lines) + 1)]

    @pytest.mark.parametrize(
        ("keys", "fragment"),
        [
            ({"resources": {"gpu": 99}}, "nvidia.com/gpu"),
            ({"image": "no-such-image:local"}, "image"),
            ({"secret_env": {"A": {"secret": "no-such-secret", "key": "a"}}}, "no-such-secret"),
        ],
    )
    def test_message_of_a_pending_job(self, launcher: Any, keys: dict[str, Any], fragment: str) -> None:
        run = self.start(launcher, self.job("true", **keys))
        wait_until(lambda: fragment in launcher.status(run.handle).message, 60)
        assert launcher.status(run.handle).state is JobState.PENDING
        assert launcher.status(run.handle).message.startswith("worker/0: ")

    def test_missing_claim(self, launcher: Any) -> None:
        with pytest.raises(NotFoundError, match=r"claim nothing not found.*stoker volume create nothing --size"):
            self.start(launcher, self.job("true", volumes=[{"claim": "nothing", "path": "/data"}]))

    def test_claim_mounted_by_another_job(self, launcher: Any) -> None:
        self.cluster.create(build_claim("data", 1 << 20, "rwo", {}, storage_class="", volume="none-there"))
        volumes = [{"claim": "data", "path": "/data"}]
        self.start(launcher, self.job("sleep 60", volumes=volumes))
        wait_until(lambda: bool(self.cluster.list_objects("Pod")))
        with pytest.raises(ConflictError, match=r"claim data .*only one node.*pod small-0-.* of job small"):
            self.start(launcher, self.job("true", name="second", volumes=volumes))

    def test_out_of_memory(self, launcher: Any) -> None:
        eat = f"{sys.executable} -c 'x = bytearray(400 << 20)'"
        _, status = self.run_to_end(launcher, self.job(eat, resources={"memory": "64Mi"}))
        assert status.state is JobState.FAILED
        assert "out of memory" in status.message

    def test_copied_script_and_module(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("import helper\nprint(helper.WORD)\n")
        (tmp_path / "helper.py").write_text("WORD = 'copied'\n")
        job = self.job(program={"script": "train.py"}, kubernetes={"copy": ["helper.py"]})
        run, status = self.run_to_end(launcher, job)
        assert (status.state, self.text(launcher, run)) == (JobState.SUCCEEDED, ["copied"])

    def test_missing_namespace(self, launcher: Any) -> None:
        with pytest.raises(NotFoundError, match="namespace 'nowhere' not found"):
            self.start(launcher, self.job("true", kubernetes={"namespace": "nowhere"}))

    def test_namespace_is_created(self, launcher: Any) -> None:
        name = f"{self.cluster.namespace}-made"
        job = self.job("echo there", kubernetes={"namespace": name, "create_namespace": True})
        try:
            run, status = self.run_to_end(launcher, job)
            assert (status.state, self.text(launcher, run)) == (JobState.SUCCEEDED, ["there"])
        finally:
            self.cluster.delete("Namespace", name)

    def test_deleted_pod_is_recreated(self, launcher: Any) -> None:
        script = "echo attempt $STOKER_ATTEMPT; test $STOKER_ATTEMPT = 0 && sleep 60; exit 0"
        run = self.start(launcher, self.job(script, retries=1))
        wait_until(lambda: "attempt 0" in self.text(launcher, run))
        (pod,) = self.cluster.list_objects("Pod", {RUN_LABEL: run.id})
        self.cluster.delete("Pod", pod["metadata"]["name"], grace_s=1)
        wait_until(lambda: launcher.status(run.handle).state.is_final, 90)
        assert launcher.status(run.handle).state is JobState.SUCCEEDED
        assert "attempt 1" in self.text(launcher, run)

    def test_restarted_run_continues_its_attempts(self, launcher: Any) -> None:
        script = "echo attempt $STOKER_ATTEMPT; test $STOKER_ATTEMPT = 1"
        run, status = self.run_to_end(launcher, self.job(script))
        assert status.state is JobState.FAILED
        launcher.restart(run)
        wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert launcher.status(run.handle).state is JobState.SUCCEEDED
        assert [line for line in self.text(launcher, run) if "because" not in line] == ["attempt 0", "attempt 1"]
        assert [attempt.code for attempt in launcher.status(run.handle).attempts] == [1, 0]

    def test_exceeded_quota(self, launcher: Any) -> None:
        spec = {"hard": {"pods": "0"}}
        self.cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": spec})
        wait_until(lambda: "hard" in (self.cluster.get("ResourceQuota", "none") or {}).get("status", {}))
        run = self.start(launcher, self.job("true"))
        wait_until(lambda: "quota" in launcher.status(run.handle).message, 60)

    def test_exceeded_deadline(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, self.job("sleep 60", kubernetes={"deadline": "5s"}))
        assert status.state is JobState.FAILED
        assert "kubernetes.deadline" in status.message


class TestPlan(OnCluster):
    def test_plan_can_be_applied_with_kubectl(self, launcher: Any) -> None:
        if shutil.which("kubectl", path=PATH) is None:
            pytest.skip(f"{NO_KUBERNETES}: no kubectl")
        job = self.job("echo $STOKER_RUN $STOKER_ATTEMPT $STOKER_SLOT")
        plan = launcher.render(job).to_text()
        subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=plan, text=True, env={**os.environ, "PATH": PATH}, check=True
        )
        wait_until(lambda: any(pod["status"]["phase"] == "Succeeded" for pod in self.cluster.list_objects("Pod")), 60)
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
        run, status = self.run_to_end(launcher, job, 120)
        assert status.state is JobState.SUCCEEDED, status.message
        assert {line.split()[1] for line in self.text(launcher, run)} == reached
        wait_until(
            lambda: not [pod for pod in self.cluster.list_objects("Pod") if pod["status"]["phase"] == "Running"], 60
        )
