"""Ray for tests: a cluster of two nodes, each on a host with its own network and process ids; a fake dashboard."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import Process, child_pids, find_processes_by_env, start
from stoker.jobs.run_folder import RunFolder
from tests.support.hosts import Host, network
from tests.support.waiting import eventually

CPUS = 2
HEAD, ACCELERATOR = '{"accelerator_type:HEAD":1}', '{"accelerator_type:TEST":1}'


@dataclass
class RayNode:
    """One Ray node: its host and its processes."""

    host: Host
    options: list[str]
    process: Process | None = field(default=None)

    @property
    def address(self) -> str:
        """The address of the node in the cluster."""
        return self.host.address

    def up(self) -> None:
        """Start the node."""
        own = self.host.folder / f"ray-{self.host.name}"
        own.mkdir(exist_ok=True)
        ray = f"{Path(sys.executable).with_name('ray')} start --block --disable-usage-stats --num-cpus={CPUS}"
        # With its own /tmp/ray, as on machines that share no disk.
        script = f'mkdir -p /tmp/ray && mount --bind {own} /tmp/ray && exec {ray} --node-ip-address={self.address} "$@"'
        argv = [
            "ip",
            "netns",
            "exec",
            self.host.namespace,
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        with open(self.host.folder / f"ray-{self.host.name}.log", "ab") as log:
            command = [*argv, "sh", "-c", script, "sh", *self.options]
            # Otherwise it would use a token that it finds on this machine, and requests of the tests have none.
            env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
            self.process = start(command, env=env, stdout=log, stderr=log)

    def down(self) -> None:
        """Kill all processes of the node at once, as a power failure does."""
        if self.process is not None:
            for first in child_pids(
                self.process.pid
            ):  # with the first process of a namespace, the kernel kills all others
                os.kill(first, signal.SIGKILL)
            self.process.stop(0)


@dataclass
class RayTestCluster:
    """A cluster for tests: its nodes, the head first."""

    nodes: list[RayNode]

    @property
    def target(self) -> str:
        """The address for `--on ray://target`."""
        return f"{self.nodes[0].address}:8265"

    def wait(self, count: int) -> None:
        """Wait until the cluster has this many nodes."""
        assert eventually(lambda: self._count_alive() == count), (
            self.nodes[0].host.folder / "ray-node1.log"
        ).read_text()

    def processes(self, *parts: str) -> list[int]:
        """The processes on its nodes, and on no other, whose command line contains all of these parts."""
        return host_processes([node.host for node in self.nodes], *parts)

    def jobs(self) -> list[str]:
        """The names of all submitted jobs."""
        with urllib.request.urlopen(f"http://{self.target}/api/jobs/", timeout=10) as response:
            return [job["submission_id"] or "" for job in json.loads(response.read())]

    def has_key(self, key: str) -> bool:
        """Whether the key-value store has a value for a key."""
        try:
            with urllib.request.urlopen(f"http://{self.target}/api/packages/gcs/{key}.zip", timeout=10):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code != 404

    def _count_alive(self) -> int:
        url = f"http://{self.target}/api/v0/nodes?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as response:
            return response.read().count(b'"node_id"')
        return 0


def _accepts_nodes(address: str) -> bool:
    """Whether the head's store accepts connections; the dashboard starts later."""
    with suppress(OSError), socket.create_connection((address, 6379), timeout=1):
        return True
    return False


def processes_matching(*parts: str) -> list[int]:
    """The processes whose command line contains all of these parts."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                text = (folder / "cmdline").read_bytes().decode(errors="replace")
                pids += [int(folder.name)] if all(part in text for part in parts) else []
    return pids


def host_processes(hosts: Iterable[Host], *parts: str) -> list[int]:
    """The processes on these hosts whose command line contains all of these parts."""
    namespaces = {os.stat(f"/run/netns/{host.namespace}").st_ino for host in hosts}
    pids = []
    for pid in processes_matching(*parts):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino in namespaces:
                pids.append(pid)
    return pids


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayTestCluster]:
    """Start a cluster of two nodes with two CPUs each."""
    pytest.importorskip("ray", reason="no package 'ray'")
    with network(folder) as net:
        head, other = net["node1"], net["node2"]
        cluster = RayTestCluster(
            [
                RayNode(head, ["--head", "--dashboard-host=0.0.0.0", f"--resources={HEAD}"]),
                # Ray accepts any number of GPUs without checking.
                RayNode(other, [f"--address={head.address}:6379", "--num-gpus=2", f"--resources={ACCELERATOR}"]),
            ]
        )
        try:
            cluster.nodes[0].up()
            assert eventually(lambda: _accepts_nodes(head.address)), (folder / "ray-node1.log").read_text()
            cluster.nodes[1].up()
            cluster.wait(2)
            yield cluster
        finally:
            for node in cluster.nodes:
                node.down()


def slot_processes(run: RunFolder, slot: str = "worker/0") -> list[int]:
    """The processes of a slot, on any node."""
    return find_processes_by_env({"STOKER_RUN": run.id, "STOKER_SLOT": slot})


def write_job(workspace: Path, command: str, **keys: Any) -> Path:
    """Write a small job file that runs a shell command, with other keys of the job file."""
    job = {
        "name": "small",
        "topology": "single",
        "profile": {"every": 0},
        "retries": 0,
        "grace": "2s",
        "program": {"command": ["bash", "-c", command]},
        **keys,
    }
    path = workspace / "job.yaml"
    path.write_text(json.dumps(job))
    return path


@contextmanager
def fake_dashboard(status: int, body: Mapping[str, Any]) -> Iterator[str]:
    """Serve one JSON response for every path, as a dashboard would; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
