"""An MPIJob whose ranks really run: sshd in two pods, mpirun in a third, on two nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.jobs.spec import Job
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.kube.client import KubeClient
from tests.e2e.kubernetes.mpi_operator import Operator
from tests.e2e.kubernetes.pods import keys, mounted
from tests.launchers.contract import Launching, until
from tests.support.kubernetes import SHARED, has_mpi_operator

CRD = SHARED / "crds" / "mpi-operator" / "kubeflow.org_mpijobs.yaml"
TELL = """
import os, socket, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "STOKER_SLOT", "MASTER_ADDR", "TOKEN", "WORDS")
print("I am", *(os.environ[name] for name in names), "on", socket.gethostname(), flush=True)
socket.getaddrinfo(os.environ["MASTER_ADDR"], 1)
sys.exit(int(os.environ["RANK"] == sys.argv[1]) * 7)
"""


@pytest.mark.timeout(240)
class TestMpi(Launching):
    ON = "k8s"

    @pytest.fixture(autouse=True)
    def _operator(self, cluster: KubeClient, tmp_path: Path) -> Iterator[None]:
        for program in ("sshd", "mpirun"):
            if shutil.which(program, path="/usr/bin:/usr/sbin") is None:
                pytest.skip(f"no program {program!r}")
        if not has_mpi_operator(cluster):
            if not CRD.exists():
                pytest.skip(f"there is no {CRD}")
            cluster.apply(yaml.safe_load(CRD.read_text()))
            until(lambda: has_mpi_operator(cluster))
        self.cluster, self.folder = cluster, tmp_path
        data = {"token": "hush"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": data}
        cluster.create(secret)
        operator = Operator(cluster, tmp_path)
        operator.start()
        yield
        operator.end()

    def job_of_ranks(self, *args: str, **more: Any) -> Job:
        given = keys(self.cluster.namespace)
        here = mounted("/etc/passwd", "/etc/openmpi")
        here["volumes"] += [{"name": "etc-ssh", "emptyDir": {}}]
        here["containers"][0]["volumeMounts"] += [{"name": "etc-ssh", "mountPath": "/etc/ssh"}]
        replicas = {name: {"template": {"spec": here}} for name in ("Launcher", "Worker")}
        given["kubernetes"]["patch"] = [{"kind": "MPIJob", "spec": {"mpiReplicaSpecs": replicas}}]
        env = {**given.pop("env"), "WORDS": "it's $(odd)", "HOME": "/root"}
        program = {"command": ["python3", "-c", TELL, *args]}
        secret = {"TOKEN": {"secret": "s", "key": "token"}}
        sshd = ["/usr/sbin/sshd", "-De", "-f", "/dev/null", "-o", "StrictModes=no", "-o", "LogLevel=FATAL"]
        mpi = {"sshd": sshd, "sshd_port": 2200}
        more = {"workers": 2, "processes_per_worker": 2, "secret_env": secret, "mpi": mpi, **more}
        return self.job(program=program, topology="mpi", env=env, **given, **more)

    def test_ranks_find_each_other_and_print_into_their_own_logs(self, launcher: Any) -> None:
        run, status = self.end(launcher, self.job_of_ranks("none"), 180)
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

    def test_a_rank_that_fails_fails_the_job(self, launcher: Any) -> None:
        run, status = self.end(launcher, self.job_of_ranks("3"), 180)
        assert status.state is JobState.FAILED, (status.message, self.text(launcher, run))
        assert "exit code 7" in status.message
