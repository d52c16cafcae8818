"""The README's walk from a folder of images to two machines, on hosts in network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stoker.core.processes import start
from stoker.jobs.launcher import RUN_PLACEHOLDER
from stoker.jobs.run_folder import find_run
from tests.support.hosts import Network, network
from tests.support.paths import ROOT
from tests.support.servers import free_port
from tests.support.trees import make_tree
from tests.support.waiting import eventually

HEADING = "## Train on two machines, starting from a folder of images\n"
SECTION = (ROOT / "README.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^ *\$ (stoker .*)$", SECTION, re.MULTILINE)
JOB_KEYS = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)[0])
SMALL_MODEL = "program.args=[--model, small, --size, 32, --epochs, 2, --global-batch-size, 32]"


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as hosts:
        yield hosts


@pytest.mark.slow
def test_commands_train_on_two_hosts(workspace: Path, net: Network) -> None:
    make_tree(Path("photos"), {"cat": 150, "dog": 150, "fox": 100})
    convert, init, train_here, serve, doctor, train_there = map(shlex.split, COMMANDS)
    run_stoker(convert)
    run_stoker(init)
    # The model that fits the dataset takes too long on a CPU.
    run_stoker(train_here, "--set", SMALL_MODEL)

    address, port = net.hosts[0].address.rpartition(".")[0] + ".1", free_port()
    serve[serve.index("--port") + 1] = str(port)
    server = start([sys.executable, "-m", *serve])
    try:
        job = Path("job.yaml").read_text()
        keys = yaml.safe_load(job) | JOB_KEYS
        keys["data"] = {key: replace_server(url, f"{address}:{port}") for key, url in JOB_KEYS["data"].items()}
        keys["data"]["cache"] = {"dir": str(workspace / "cache"), "size": "20Gi"}
        # The hosts have this machine's files, with Stoker and torch, and no package index.
        keys["ssh"] = {"python": sys.executable, "config": str(net.config), "workdir": str(workspace / "hosts")}
        Path("job.yaml").write_text(yaml.safe_dump(keys))
        assert eventually(lambda: is_up(f"http://{address}:{port}/train/manifest.json"))
        run_stoker(doctor, "--set", SMALL_MODEL)
        output = run_stoker(train_there, "--set", SMALL_MODEL)
    finally:
        server.stop(5)
    assert "on 2 ranks" in output
    assert "[worker/1]" in output
    assert "succeeded" in output
    run_id = find_run(None).id
    assert f"; checkpoints: {net.hosts[0].name}:{workspace}/hosts/.stoker/{run_id}/checkpoints;" in output
    assert RUN_PLACEHOLDER not in output


def run_stoker(command: list[str], *more: str) -> str:
    """Run a command of the README and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", *command, *more], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout + done.stderr


def replace_server(url: object, server: str) -> object:
    return re.sub("//[^/]+/", f"//{server}/", url) if isinstance(url, str) else url


def is_up(url: str) -> bool:
    return subprocess.run(["curl", "-sf", "-o", "/dev/null", url], check=False).returncode == 0
