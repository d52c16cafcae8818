"""Jobs on Ray: a real cluster of two nodes, of which one is killed; nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launchers.contract import LauncherSuite, job_of, until
from launchers.test_local import HEARTBEAT
from rays import CPUS, RayCluster, ray_cluster
from stoker.core.processes import marked
from stoker.errors import InputError, SpecError, UnavailableError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.runs import Run, find
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ray.cluster import address_of
from stoker.launchers.ray.launcher import RayLauncher
from stoker.trainers.checkpoints import unpack
from trees import stoker

pytestmark = pytest.mark.timeout(240)
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"], os.path.basename(__file__)
print("sum", total.item(), "of", dist.get_world_size(), *names)
dist.destroy_process_group()
"""
# In a session of its own, deaf to TERM: all that a process group would miss.
DEAF = "setsid bash -c 'trap \"\" TERM HUP; while :; do sleep 0.2; done' & echo ready; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as found:
        yield found


def there(run: Run, slot: str = "worker/0") -> list[int]:
    """What runs of a slot, on any node."""
    return marked({"STOKER_RUN": run.id, "STOKER_SLOT": slot})


class TestRay(LauncherSuite):
    ON = "ray"

    @pytest.fixture
    def launcher(self, cluster: RayCluster) -> Any:
        self.cluster = cluster
        return RayLauncher(cluster.place)

    @pytest.mark.slow
    def test_the_environment_of_the_contract(self, launcher: Any) -> None:
        super().test_the_environment_of_the_contract(launcher)

    @pytest.mark.slow
    def test_a_killed_gang_is_tried_again(self, launcher: Any, tmp_path: Path) -> None:
        super().test_a_killed_gang_is_tried_again(launcher, tmp_path)

    @pytest.mark.slow
    def test_bad_input_is_not_tried_again(self, launcher: Any) -> None:
        super().test_bad_input_is_not_tried_again(launcher)

    @pytest.mark.slow
    def test_logs_are_followed_to_the_end(self, launcher: Any) -> None:
        super().test_logs_are_followed_to_the_end(launcher)

    def test_two_nodes_reduce_together(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": 2}
        run, status = self.end(launcher, job_of(**keys, ray={"strategy": "strict_spread"}), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        places = json.loads((run.folder / "places.json").read_text())
        assert sorted(places.values()) == sorted(node.address for node in self.cluster.nodes)
        interfaces = {node.address: node.host.interface for node in self.cluster.nodes}
        for name, address in places.items():
            wanted = f"sum 3.0 of 2 {places['worker/0']} {interfaces[address]} reduce.py"
            assert wanted in self.text(launcher, run, Slot.parse(name))
            assert there(run, name) == []

    def test_no_room_is_told_until_it_is_stopped(self, launcher: Any) -> None:
        run = self.start(launcher, job_of("true", resources={"cpu": CPUS + 1}))
        until(lambda: "no node is large enough for one worker" in launcher.status(run.handle).message, 60)
        status = launcher.status(run.handle)
        assert status.message.startswith("waiting for Ray to place 1 × (3 CPU): ")
        assert f"3 CPU wanted, {2 * CPUS} CPU free of {2 * CPUS} CPU" in status.message
        assert [one.state for one in status.slots] == [JobState.PENDING]
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED

    @pytest.mark.slow
    def test_a_hang_is_ended_with_the_stacks_of_every_rank(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "hang.py").write_text(HEARTBEAT)
        run, status = self.end(launcher, job_of(program={"script": "hang.py"}, hang_after=2))
        assert "hung at step 2 in train-00001.tar: no heartbeat for 2 s" in status.message
        assert "in stuck" in (run.folder / "stacks.0.txt").read_text()

    @pytest.mark.slow
    def test_a_program_that_is_not_there(self, launcher: Any) -> None:
        _, status = self.end(launcher, job_of(program={"command": ["./no-such-program"]}, retries=2))
        assert status.message.startswith("worker/0 refused to start: cannot start './no-such-program': No such file")

    @pytest.mark.slow
    def test_files_and_secrets_get_there(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("keep.txt", "skip.bin", "deep/a.txt", ".git/config"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "run.sh").write_text("#!/bin/sh\necho ${#TOKEN}; printf '\\377\\r\\n'; find . -type f | sort\n")
        (tmp_path / "run.sh").chmod(0o755)
        (tmp_path / ".stokerignore").write_text("*.bin\n")
        monkeypatch.setenv("TOKEN", "hush-hush-hush")
        job = job_of(program={"command": ["./run.sh"]}, secret_env={"TOKEN": {"secret": "s", "key": "k"}})
        run, status = self.end(launcher, job)
        assert status.state is JobState.SUCCEEDED, status.message
        sent = ["./.stoker/driver.py", "./.stoker/keeper.py", "./.stoker/profiler.py", "./.stokerignore"]
        wanted = [*sent, "./deep/a.txt", "./keep.txt", "./run.sh"]
        said = run.log(Slot("worker", 0), 0).read_bytes()
        assert said.startswith(b"14\n\377\r\n")
        assert [line for line in said.decode(errors="replace").splitlines() if line.startswith("./")] == wanted
        nodes = self.cluster.nodes[0].host.folder
        places = [path for folder in (run.folder, nodes) for path in folder.rglob("*") if path.is_file()]
        assert not any(b"hush-hush-hush" in path.read_bytes() for path in places)

    @pytest.mark.slow
    def test_all_takes_what_is_free(self, launcher: Any) -> None:
        (Path.cwd() / "reduce.py").write_text(ALL_REDUCE)
        keys = {"program": {"script": "reduce.py"}, "topology": "torchrun", "workers": "all", "resources": {"cpu": 2}}
        until(lambda: launcher.anchored(job_of(**keys)).workers == len(self.cluster.nodes), 30)
        with pytest.raises(InputError, match=r"workers: all: 0 GPUs are free there, and a worker has 1; give a number"):
            launcher.anchored(job_of(**{**keys, "resources": {"gpu": 1}}))

    def test_what_is_wrong_here_is_told_at_once(self, launcher: Any) -> None:
        keys = {"program": {"script": "no.py"}, "topology": "torchrun", "workers": {"min": 1, "max": 2}}
        with pytest.raises(SpecError) as caught:
            launcher.render(job_of(**keys, checkpoint={"dir": "here"}, data={"train": "none"}))
        found = [fault.path for fault in caught.value.faults]
        assert found == ["workers", "data.train", "program.script", "checkpoint.dir"]
        with pytest.raises(SpecError, match="'mpi' does not run on ray"):
            launcher.render(job_of("true", topology="mpi"))
