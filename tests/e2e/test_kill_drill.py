"""Kill drill: a training that is killed repeatedly ends with the same weights, bit for bit, as an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import find_processes_by_env
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.telemetry.reader import read_run
from stoker.testing import make_shards
from stoker.trainers.checkpoints import decode_checkpoint
from stoker.trainers.ledger import effective_samples, session_starts
from tests.support.trees import stoker
from tests.support.waiting import wait_until

SAMPLES = 700
EPOCHS = 6


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("drill") / "shards", samples=SAMPLES, val=60, classes=5, size=(40, 32))


def write_job(folder: Path, name: str, shards: Path, ranks: int, **keys: Any) -> Path:
    ledger = keys.pop("ledger", f"{name}-ledger")
    options = "--model small --size 32 --global-batch-size 24 --lr 0.05 --schedule cosine --deterministic --seed 3"
    options += f" --epochs {EPOCHS} --checkpoint-every-steps 4 --log-every 1s --threads 1 --ledger {folder / ledger}"
    job = {
        "name": name,
        "processes_per_worker": ranks,
        "program": {"module": "stoker.trainers.torch_image", "args": options.split()},
        "data": {"train": str(shards / "train"), "val": str(shards / "val")},
        "checkpoint": {"dir": str(folder / f"{name}-checkpoints")},
        "env": {"OMP_NUM_THREADS": "1"},
        "profile": {"every": 0},
        "retries": 20,
        "grace": 10,
        **keys,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job))
    return path


def weights(folder: Path, name: str) -> dict[str, Any]:
    newest = max((folder / f"{name}-checkpoints").glob("step-*.pt"))
    state = decode_checkpoint(newest.read_bytes(), where=str(newest))
    return {**state["model"], **{f"momentum {k}": v["momentum_buffer"] for k, v in state["optimizer"]["state"].items()}}


def check_ledger(folder: Path, name: str) -> None:
    epochs = effective_samples(folder / f"{name}-ledger")
    assert sorted(epochs) == list(range(EPOCHS))
    for samples in epochs.values():
        assert len(samples) == len(set(samples)) == SAMPLES


def rank_pids(run: RunFolder) -> dict[int, int]:
    """The process id of each rank of the newest attempt."""
    heartbeats = [event for event in read_run(run.logs).events if event.kind == "heartbeat"]
    newest = max((event.attempt for event in heartbeats), default=0)
    return {event.rank: int(event.fields["pid"]) for event in heartbeats if event.attempt == newest}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_kills_do_not_change_the_weights(shards: Path, workspace: Path) -> None:
    assert stoker("job", "run", write_job(workspace, "undisturbed", shards, 3)) == 0
    draw = random.Random(20261116)
    victims = ["rank", "all", "supervisor", "rank", "all", "supervisor", "agent"]
    draw.shuffle(victims)
    assert stoker("job", "run", write_job(workspace, "killed", shards, 3), "--detach") == 0
    run = find_run("killed")
    kills = 0
    for victim in victims:
        sessions = len(session_starts(workspace / "killed-ledger"))
        time.sleep(draw.uniform(0.0, 3.0))
        while not run.read_status().state.is_final and not kill(victim, run, draw):
            time.sleep(0.2)
        if run.read_status().state.is_final:
            break
        kills += 1
        wait_until(partial(has_resumed, run, workspace / "killed-ledger", sessions), 120)
    wait_until(lambda: run.read_status().state.is_final, 300)
    assert run.read_status().state == "succeeded", run.read_status().message
    assert kills >= 5
    expected, actual = weights(workspace, "undisturbed"), weights(workspace, "killed")
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []
    check_ledger(workspace, "undisturbed")
    check_ledger(workspace, "killed")
    assert find_processes_by_env({"STOKER_RUN": run.id}) == []


def kill(victim: str, run: RunFolder, draw: random.Random) -> bool:
    """Kill one rank, all ranks, their torchrun agent or the supervisor; return whether there was such a process."""
    ranks = rank_pids(run)
    if len(ranks) < 3:
        return False
    if victim == "supervisor":
        if not (pid := supervisor_pid(run)):
            return False
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: supervisor_pid(run) is None)
        assert stoker("job", "run", "--resume", run.id, "--detach") == 0
        return True
    pids = {
        "rank": [ranks[draw.randrange(3)]],
        "all": list(ranks.values()),
        "agent": [slot.pid for slot in run.read_status().slots if slot.pid],
    }[victim]
    alive = set(find_processes_by_env({"STOKER_RUN": run.id})) & set(pids)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return bool(alive)


def has_resumed(run: RunFolder, ledger: Path, sessions: int) -> bool:
    return len(session_starts(ledger)) > sessions or run.read_status().state.is_final


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ledger_is_exact_across_changes_of_the_world_size(shards: Path, workspace: Path) -> None:
    """The same global batches, distributed over 3, then 2, then 1 ranks."""
    shared = {"checkpoint": {"dir": str(workspace / "checkpoints")}, "ledger": "changing-ledger"}
    for ranks, steps in ((3, 30), (2, 60), (1, 0)):
        assert stoker("job", "run", write_job(workspace, f"on-{ranks}", shards, ranks, **shared), "--detach") == 0
        run = find_run(f"on-{ranks}")
        if steps:
            wait_until(partial(has_reached, run, steps), 120)
            assert stoker("job", "stop", run.id) == 0
        wait_until(partial(is_over, run), 300)
    assert run.read_status().state == "succeeded"
    check_ledger(workspace, "changing")
    starts = session_starts(workspace / "changing-ledger")
    assert len(starts) == 3
    assert any(consumed for _, consumed in starts)


def has_reached(run: RunFolder, step: int) -> bool:
    return any(event.fields.get("step", 0) >= step for event in read_run(run.logs).events)


def is_over(run: RunFolder) -> bool:
    return run.read_status().state.is_final
