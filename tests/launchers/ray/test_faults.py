"""Faults of a run on Ray: killed processes, a cut network and a lost node leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.trainers.checkpoints import decode_checkpoint
from tests.launchers.contract import DEAF, is_ready, launched
from tests.support.open_files import processes_with_open_file
from tests.support.ray import (
    RayTestCluster,
    slot_processes,
    write_job,
)
from tests.support.trees import stoker
from tests.support.waiting import eventually, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def kill_all(*pids: int) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def find_victims(victim: str, run: RunFolder, cluster: RayTestCluster) -> list[int]:
    """The processes of one part of a run, and of no other."""
    match victim:
        case "supervisor":
            return processes_with_open_file(run.folder / "lock")
        case "driver":
            return cluster.processes(".stoker/driver.py", f"gcs://stoker-{run.id}")
        case "actor":
            return cluster.processes("ray::SlotActor")
        case _:
            daemons = cluster.processes("stoker-slot-", "SlotDaemon")
            return [pid for pid in daemons if "guard" not in Path(f"/proc/{pid}/comm").read_text()]


DIAGNOSES = {
    "driver": r"worker/0 was lost: .*driver",
    "actor": r"worker/0 was lost: .*actor on ",
    "slot daemon": r"worker/0 was lost: .*slot daemon",
}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["supervisor", "launching machine", *DIAGNOSES])
def test_kill_leaves_no_process_on_a_node(victim: str, cluster: RayTestCluster, workspace: Path) -> None:
    with launched(write_job(workspace, DEAF, ray={"lost_after": "5s"}), f"ray://{cluster.target}") as (run, process):
        wait_until(lambda: is_ready(run) and len(slot_processes(run)) >= 3)
        if victim == "launching machine":
            process.kill()
        else:
            kill_all(*find_victims(victim, run, cluster))
        wait_until(lambda: not slot_processes(run))
        if victim in DIAGNOSES:
            assert process.wait(60) == 4, (workspace / "output").read_text()
            assert re.search(DIAGNOSES[victim], run.read_status().message)
    wait_until(lambda: not find_victims("slot daemon", run, cluster))


@pytest.mark.slow
def test_kill_of_everything_at_once_leaves_no_process(cluster: RayTestCluster, workspace: Path) -> None:
    with launched(write_job(workspace, DEAF, grace="1s"), f"ray://{cluster.target}") as (run, process):
        wait_until(lambda: is_ready(run) and len(slot_processes(run)) >= 3)
        victims = [find_victims(victim, run, cluster) for victim in ("supervisor", *DIAGNOSES)]
        try:
            kill_all(*(pid for pids in victims for pid in pids))
            assert eventually(lambda: not slot_processes(run), 20)
        finally:
            for pid in slot_processes(run):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("lost_after", [20, 5])
def test_network_cut_of_eight_seconds(lost_after: int, cluster: RayTestCluster, workspace: Path) -> None:
    """Within `lost_after` no line is missing; otherwise the slot is lost and its processes are stopped."""
    script = f"echo ready; i=0; while ! test -e {workspace}/go; do echo $i; i=$((i+1)); sleep 0.1; done; echo over"
    # On the node of the driver: the connection of the head to another node would be cut too.
    job = write_job(workspace, script, ray={"lost_after": lost_after}, resources={"gpu_type": "HEAD"})
    with launched(job, f"ray://{cluster.target}") as (run, process):
        wait_until(lambda: is_ready(run))
        cluster.nodes[0].host.disconnect()
        try:
            time.sleep(8)
            assert lost_after > 5 or eventually(lambda: not slot_processes(run))
        finally:
            cluster.nodes[0].host.reconnect()
        (workspace / "go").touch()
        assert process.wait(60) == (0 if lost_after > 5 else 4), (workspace / "output").read_text()
    if lost_after == 5:
        assert re.search(r"worker/0 was lost: .*Ray cluster at \S+ .*\b5 s", run.read_status().message)
        return
    lines = run.log_path(Slot("worker", 0), 0).read_text().splitlines()
    assert lines == ["ready", *map(str, range(len(lines) - 2)), "over"]


@pytest.mark.slow
def test_slot_on_a_node_that_is_cut_off_stops_by_itself(cluster: RayTestCluster, workspace: Path) -> None:
    """Long before Ray considers the node lost, so that no slot of the next attempt runs beside it."""
    job = write_job(workspace, DEAF, ray={"lost_after": "5s"}, resources={"gpu_type": "TEST"})
    with launched(job, f"ray://{cluster.target}") as (run, process):
        wait_until(lambda: is_ready(run) and len(slot_processes(run)) >= 3)
        cluster.nodes[1].host.disconnect()
        try:
            assert eventually(lambda: not slot_processes(run), 25)
        finally:
            cluster.nodes[1].host.reconnect()
        assert process.wait(120) == 4, (workspace / "output").read_text()
    assert re.search(r"worker/0 was lost: .*Ray node", run.read_status().message)
    cluster.wait(2)


def is_rank(pid: int) -> bool:
    args = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    is_ours = any(arg.endswith(("train.py", "stoker.trainers.torch_image")) for arg in args)
    return is_ours and "torch.distributed.run" not in args and not any("profiler" in arg for arg in args)


@pytest.mark.slow  # two trainings, one of which loses a rank and a node
def test_weights_equal_those_of_a_local_run(cluster: RayTestCluster, workspace: Path, training_shards: Path) -> None:
    options = "--model small --size 32 --global-batch-size 24 --epochs 3 --deterministic --seed 3 --threads 1"
    keys = {
        "program": {
            "module": "stoker.trainers.torch_image",
            "args": [*options.split(), "--checkpoint-every-steps", "2"],
        },
        "topology": "torchrun",
        "workers": 2,
        "data": {"train": str(training_shards / "train"), "val": str(training_shards / "val")},
        "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        "retries": 3,
        "ray": {"strategy": "spread"},
    }
    job = write_job(workspace, "", **keys)
    for on in ("local", f"ray://{cluster.target}"):
        folder = workspace / on.partition(":")[0]
        assert stoker("job", "run", job, "--on", on, "--set", f"checkpoint.dir={folder}", "--detach") == 0
        run = find_run(None)
        if on != "local":
            wait_until(lambda folder=folder: any(folder.glob("step-*")), 90)
            kill_all(*[pid for pid in slot_processes(run, "worker/1") if is_rank(pid)])
            wait_until(lambda run=run: is_training(run, 1), 90)
            cluster.nodes[1].down()
            wait_until(lambda run=run: len(run.read_status().attempts) == 2, 90)
            cluster.nodes[1].up()
        wait_until(lambda run=run: run.read_status().state.is_final, 150)
        assert run.read_status().state is JobState.SUCCEEDED, run.read_status().message
    first, second, _ = run.read_status().attempts
    assert "worker/1 (rank 1) was killed by SIGKILL" in first.cause
    assert re.search(rf"was lost: .*Ray node {cluster.nodes[1].address} ", second.cause)
    expected, actual = (weights(workspace / on) for on in ("local", "ray"))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []


def is_training(run: RunFolder, attempt: int) -> bool:
    log = run.log_path(Slot("worker", 1), attempt)
    return log.exists() and '"heartbeat"' in log.read_text()


def weights(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("step-*.pt"))
    model: dict[str, Any] = decode_checkpoint(newest.read_bytes(), where=str(newest))["model"]
    return model
