"""mpirun across hosts that know nothing of each other: real sshd in namespaces, and nothing left on any of them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Network, network
from launchers.contract import LauncherSuite, job_of, until
from launchers.test_ssh import keys_of, there
from stoker.core.processes import marked
from stoker.errors import InputError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.runs import Run, find
from stoker.jobs.spec import Job
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.supervisor import watcher
from stoker.telemetry.reader import gaps, read_log
from trainers.trainings import weights
from trees import stoker

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
READY = "echo ready; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


class TestMpiOnSsh(LauncherSuite):
    ON = "ssh"
    TOPOLOGY = "mpi"
    WHO = "worker/0 (rank 0)"

    @pytest.fixture(autouse=True)
    def _hosts(self, net: Network, tmp_path: Path) -> None:
        self.net, self.folder = net, tmp_path

    def job(self, command: str | None = None, **keys: Any) -> Job:
        ssh = keys_of(self.net, self.folder / "there", lost_after=5)
        return job_of(command, **{"topology": "mpi", "ssh": ssh, **keys})

    def ready(self, launcher: Any, script: str = READY, **keys: Any) -> Run:
        run = self.start(launcher, self.job(script, workers=2, **keys))
        until(lambda: self.text(launcher, run).count("ready") == 2)
        return run

    def test_ranks_on_two_hosts(self, launcher: Any) -> None:
        names = "RANK WORLD_SIZE LOCAL_RANK STOKER_SLOT STOKER_HOST MASTER_ADDR GLOO_SOCKET_IFNAME"
        script = " ".join(f"${name}" for name in names.split())
        run, status = self.end(launcher, self.job(f"echo {script}", workers=2, processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED, status.message
        for worker, host in enumerate(self.net.hosts):
            said = sorted(self.text(launcher, run, Slot("worker", worker)))
            meeting = f"{self.net.hosts[0].address} {host.interface}"
            assert said == [
                f"{2 * worker + local} 4 {local} worker/{worker} {host.name} {meeting}" for local in (0, 1)
            ]
        assert there(run) == []
