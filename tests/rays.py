"""A Ray cluster for tests: two nodes, each on a host of its own with its own network and process numbers."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hosts import Host, network
from stoker.core.processes import Process, start

CPUS = 2


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
        script = f"mkdir -p /tmp/ray && mount --bind {own} /tmp/ray && exec {ray} --node-ip-address={self.address} $*"
        argv = ["ip", "netns", "exec", self.host.space, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with open(self.host.folder / f"ray-{self.host.name}.log", "ab") as log:
            self.process = start([*argv, "sh", "-c", script, "sh", *self.options], stdout=log, stderr=log)

    def down(self) -> None:
        """Kill all that runs on it, as a machine that loses its power does."""
        if self.process is not None:
            self.process.end(0)


@dataclass
class RayCluster:
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

    def _alive(self) -> int:
        url = f"http://{self.place}/api/v0/nodes?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().count(b'"node_id"')
        return 0


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Two nodes of two CPUs each."""
    pytest.importorskip("ray", reason="no package 'ray'")
    with network(folder) as net:
        head, other = net["node1"], net["node2"]
        cluster = RayCluster(
            [
                RayNode(head, ["--head", "--dashboard-host=0.0.0.0"]),
                RayNode(other, [f"--address={head.address}:6379"]),
            ]
        )
        try:
            for node in cluster.nodes:
                node.up()
                cluster.wait(cluster.nodes.index(node) + 1)
            yield cluster
        finally:
            for node in cluster.nodes:
                node.down()


def processes(word: str) -> list[int]:
    """Processes with this word on their command line, on any node."""
    found = subprocess.run(["pgrep", "-f", "--", word], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split()]
