"""An MPIJob on a real cluster: sshd in two worker pods, mpirun in the launcher pod."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.client import KubeClient
from tests.e2e.kubernetes.mpi_operator import MpiOperator
from tests.e2e.kubernetes.pods import build_host_mounts, build_job_keys
from tests.launchers.contract import LauncherTests
from tests.support.kubernetes import has_mpi_operator
from tests.support.paths import SHARED
from tests.support.waiting import wait_until

CRD = SHARED / "crds" / "mpi-operator" / "kubeflow.org_mpijobs.yaml"
SCRIPT = """
import os, socket, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "STOKER_SLOT", "MASTER_ADDR", "TOKEN", "WORDS")
print("I am", *(os.environ[name] for name in names), "on", socket.gethostname(), flush=True)
socket.getaddrinfo(os.environ["MASTER_ADDR"], 1)
sys.exit(int(os.environ["RANK"] == sys.argv[1]) * 7)
"""


@pytest.mark.timeout(240)
class TestMpi(LauncherTests):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _operator(self, cluster: KubeClient, tmp_path: Path) -> Iterator[None]:
        for program in ("sshd", "mpirun"):
            if shutil.which(program, path="/usr/bin:/usr/sbin") is None:
                pytest.skip(f"no program {program!r}")
        if not has_mpi_operator(cluster):
            if not CRD.exists():
                pytest.skip(f"{CRD} not found")
            cluster.apply(yaml.safe_load(CRD.read_text()))
            wait_until(lambda: has_mpi_operator(cluster))
        self.cluster, self.folder = cluster, tmp_path
        data = {"token": "hush"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": data}
        cluster.create(secret)
        operator = MpiOperator(cluster, tmp_path)
        operator.start()
        yield
        operator.stop()

    def build_job(self, *args: str, **more: Any) -> JobSpec:
        keys = build_job_keys(self.cluster.namespace)
        mounts = build_host_mounts("/etc/passwd", "/etc/openmpi")
        mounts["volumes"] += [{"name": "etc-ssh", "emptyDir": {}}]
        mounts["containers"][0]["volumeMounts"] += [{"name": "etc-ssh", "mountPath": "/etc/ssh"}]
        replicas = {name: {"template": {"spec": mounts}} for name in ("Launcher", "Worker")}
        keys["kubernetes"]["patch"] = [{"kind": "MPIJob", "spec": {"mpiReplicaSpecs": replicas}}]
        env = {**keys.pop("env"), "WORDS": "it's $(odd)", "HOME": "/root"}
        program = {"command": ["python3", "-c", SCRIPT, *args]}
        secret = {"TOKEN": {"secret": "s", "key": "token"}}
        sshd = ["/usr/sbin/sshd", "-De", "-f", "/dev/null", "-o", "StrictModes=no", "-o", "LogLevel=FATAL"]
        mpi = {"sshd": sshd, "sshd_port": 2200}
        more = {"workers": 2, "processes_per_worker": 2, "secret_env": secret, "mpi": mpi, **more}
        return self.job(program=program, topology="mpi", env=env, **keys, **more)

    def test_ranks_print_to_the_log_of_their_own_pod(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, self.build_job("none"), 180)
        assert status.state is JobState.SUCCEEDED, (status.message, self.text(launcher, run))
        for index in (0, 1):
            lines = [line for line in self.text(launcher, run, Slot("worker", index)) if "I am" in line]
            assert sorted(lines) == [
                f"[rank{rank}]: I am {rank} 4 {rank % 2} worker/{index} small-worker-0.small hush it's $(odd) "
                f"on small-worker-{index}"
                for rank in (2 * index, 2 * index + 1)
            ]
        assert not [line for line in self.text(launcher, run, Slot("launcher", 0)) if "I am" in line]
        launcher.stop(run.handle)

    def test_failed_rank_fails_the_job(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, self.build_job("3"), 180)
        assert status.state is JobState.FAILED, (status.message, self.text(launcher, run))
        assert "launcher/0" in status.message
        assert re.search(r"\b7\b", status.message)
