"""Jobs on ssh hosts: real sshd on hosts of their own, real cables that are pulled, nothing left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hosts import Network, network
from launchers.contract import LauncherSuite, job_of, until
from stoker.core.processes import marked
from stoker.core.spec import decode
from stoker.jobs.runs import Run
from stoker.jobs.spec import Job, Ssh
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


def keys_of(net: Network, workdir: Path, *hosts: str, **more: Any) -> dict[str, Any]:
    """The ssh section of a job on these hosts."""
    names = hosts or tuple(host.name for host in net.hosts)
    return {
        "hosts": list(names),
        "config": str(net.config),
        "workdir": str(workdir),
        "python": sys.executable,
        "lost_after": 6,
        **more,
    }


class TestSsh(LauncherSuite):
    ON = "ssh"

    @pytest.fixture(autouse=True)
    def _net(self, net: Network, tmp_path: Path) -> None:
        self.net, self.workdir = net, tmp_path / "there"

    def start(self, launcher: Any, job: Job) -> Run:
        if not job.ssh.hosts:
            job = msgspec.structs.replace(job, ssh=decode(keys_of(self.net, self.workdir), Ssh))
        return super().start(launcher, job)
