"""Execute the notebooks in examples/ on real SSH hosts and on a real Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import stoker
from stoker.jobs.run_folder import list_runs
from stoker.telemetry.metrics import build_table
from stoker.telemetry.reader import read_events
from tests.support.hosts import Network, network
from tests.support.paths import EXAMPLES
from tests.support.ray import ray_cluster
from tests.support.servers import free_port

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
CELL_TIMEOUT_S = 240

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def here(stoker_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a notebook; its kernel finds the `stoker` command."""
    folder = stoker_home.parent / "notebook"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return folder


def execute(name: str, here: Path, settings: Mapping[str, Any]) -> str:
    """Execute a notebook with other settings and return everything that it printed."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    names = {line.partition(" = ")[0] for line in cell.source.splitlines() if " = " in line}
    assert names == set(settings)
    cell.source = "\n".join(f"{key} = {value!r}" for key, value in settings.items())
    try:
        NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(here)}}).execute()
    finally:  # a run survives a kernel whose notebook failed
        for run in stoker.runs():
            if not run.files.read_status().state.is_final:
                run.stop()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def server_settings(net_address: str, here: Path) -> dict[str, Any]:
    return {"ADDRESS": net_address, "PORT": free_port(), "CHECKPOINTS": str(here / "checkpoints")}


def bridge_address(net: Network) -> str:
    """The address of this machine in the network of the hosts."""
    return f"{net.hosts[0].address.rpartition('.')[0]}.1"


def assert_demo(output: str, kind: str) -> None:
    states = {run.id: str(run.read_status().state) for run in list_runs()}
    assert sorted(states.values()) == ["stopped", *["succeeded"] * 4], output
    assert all(run_id.startswith(f"{kind}-demo-") and run_id in output for run_id in states)
    assert all(f"{mode} " in output for mode in ("exact", "join", "resampled"))
    rest, interrupted = (build_table(read_events(run.logs)) for run in list_runs()[:2])
    assert min(row["step"] for row in rest if "loss" in row) > interrupted[-1]["step"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_have_no_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_on_ssh_hosts(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with network(tmp_path_factory.mktemp("net")) as net:
        ssh = {"config": str(net.config), "workdir": str(here.parent / "there"), "python": sys.executable}
        settings = {"HOSTS": ["node1", "node2"], "SSH": ssh, **server_settings(bridge_address(net), here)}
        assert_demo(execute("ssh-demo.ipynb", here, settings), "ssh")


@pytest.mark.slow
def test_on_ray(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ray_cluster(tmp_path_factory.mktemp("net")) as cluster:
        address = f"{cluster.nodes[0].address.rpartition('.')[0]}.1"
        settings = {"ON": f"ray://{cluster.target}", **server_settings(address, here)}
        assert_demo(execute("ray-demo.ipynb", here, settings), "ray")
