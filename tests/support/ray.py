"""A Ray cluster for tests: two nodes, each on a host of its own with its own network and process numbers."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.core.processes import Process, child_pids, start
from tests.support.hosts import Host, network
from tests.support.waiting import eventually

CPUS = 2
HEAD, ACCELERATOR = '{"accelerator_type:HEAD":1}', '{"accelerator_type:TEST":1}'


@dataclass
class RayNode:
    """One node: the host it is on, and its processes."""

    host: Host
    options: list[str]
    process: Process | None = field(default=None)

    @property
    def address(self) -> str:
        """By which the others know it."""
        return self.host.address

    def up(self) -> None:
        """Start it."""
        own = self.host.folder / f"ray-{self.host.name}"
        own.mkdir(exist_ok=True)
        ray = f"{Path(sys.executable).with_name('ray')} start --block --disable-usage-stats --num-cpus={CPUS}"
        # What Ray writes is kept apart, as it is on machines that do not share a disk.
        script = f'mkdir -p /tmp/ray && mount --bind {own} /tmp/ray && exec {ray} --node-ip-address={self.address} "$@"'
        argv = ["ip", "netns", "exec", self.host.space, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.host.folder / f"ray-{self.host.name}.log", "ab") as log:
            words = [*argv, "sh", "-c", script, "sh", *self.options]
            # Else it takes a token where it finds one, and what the tests ask has none.
            env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
            self.process = start(words, env=env, stdout=log, stderr=log)

    def down(self) -> None:
        """Kill all that runs on it, as a machine that loses its power does."""
        if self.process is not None:
            for first in child_pids(self.process.pid):  # with the first of a namespace, the kernel ends all at once
                os.kill(first, signal.SIGKILL)
            self.process.stop(0)


@dataclass
class RayTestCluster:
    """The nodes, the head first."""

    nodes: list[RayNode]

    @property
    def place(self) -> str:
        """As in `--on ray://place`."""
        return f"{self.nodes[0].address}:8265"

    def wait(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many nodes are there."""
        deadline = time.monotonic() + timeout_s
        while self._alive() != count:
            assert time.monotonic() < deadline, (self.nodes[0].host.folder / "ray-node1.log").read_text()
            time.sleep(0.2)

    def processes(self, *words: str) -> list[int]:
        """Those on its nodes, and on no other, that have all of these words on their command line."""
        spaces = {os.stat(f"/run/netns/{node.host.space}").st_ino for node in self.nodes}
        found = []
        for pid in processes_matching(*words):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}/ns/net").st_ino in spaces:
                    found.append(pid)
        return found

    def jobs(self) -> list[str]:
        """The names of all jobs that it was given."""
        with urllib.request.urlopen(f"http://{self.place}/api/jobs/", timeout=10) as answer:
            return [job["submission_id"] or "" for job in json.loads(answer.read())]

    def has_key(self, key: str) -> bool:
        """Whether there is something in its store."""
        try:
            with urllib.request.urlopen(f"http://{self.place}/api/packages/gcs/{key}.zip", timeout=10):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code != 404

    def _alive(self) -> int:
        url = f"http://{self.place}/api/v0/nodes?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().count(b'"node_id"')
        return 0


def _answers(address: str) -> bool:
    """Whether the head's store takes nodes in; its dashboard comes later."""
    with suppress(OSError), socket.create_connection((address, 6379), timeout=1):
        return True
    return False


def processes_matching(*words: str) -> list[int]:
    """Processes that have all of these words on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                text = (folder / "cmdline").read_bytes().decode(errors="replace")
                found += [int(folder.name)] if all(word in text for word in words) else []
    return found


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayTestCluster]:
    """Two nodes of two CPUs each."""
    pytest.importorskip("ray", reason="no package 'ray'")
    with network(folder) as net:
        head, other = net["node1"], net["node2"]
        cluster = RayTestCluster(
            [
                RayNode(head, ["--head", "--dashboard-host=0.0.0.0", f"--resources={HEAD}"]),
                # GPUs in name alone; Ray believes it.
                RayNode(other, [f"--address={head.address}:6379", "--num-gpus=2", f"--resources={ACCELERATOR}"]),
            ]
        )
        try:
            cluster.nodes[0].up()
            assert eventually(lambda: _answers(head.address), 60), (folder / "ray-node1.log").read_text()
            cluster.nodes[1].up()
            cluster.wait(2)
            yield cluster
        finally:
            for node in cluster.nodes:
                node.down()
