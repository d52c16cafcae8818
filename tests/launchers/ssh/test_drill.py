"""A training on two ssh hosts on which something breaks: the same bits, the same samples, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import marked
from stoker.jobs.run_folder import Run, find
from stoker.jobs.status import JobState
from stoker.launchers.supervisor import watcher
from stoker.telemetry.reader import read_run
from stoker.trainers.checkpoints import unpack
from stoker.trainers.ledger import effective
from tests.launchers.contract import until
from tests.launchers.ssh.test_launcher import agents, keys_of, kill_all, machine, there
from tests.support.hosts import Network, network
from tests.support.trees import stoker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SAMPLES, EPOCHS = 300, 4


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_alone(tmp_path_factory.mktemp("calm"))


def left_alone(folder: Path) -> Path:
    """Fill a folder with shards, and with a training on this machine that nothing happened to."""
    source = f"synthetic:samples={SAMPLES},classes=5,size=40x32,val=20"
    assert stoker("data", "convert", source, folder / "shards", "--shard-samples", "50") == 0
    before = os.environ.get("STOKER_HOME")
    os.environ["STOKER_HOME"] = str(folder / "stoker")
    try:
        assert stoker("job", "run", write_job(folder, folder / "shards", {})) == 0
    finally:
        os.environ.pop("STOKER_HOME") if before is None else os.environ.update(STOKER_HOME=before)
    return folder


def write_job(folder: Path, shards: Path, ssh: dict[str, Any], **keys: Any) -> Path:
    words = f"--model small --size 32 --global-batch-size 12 --epochs {EPOCHS} --deterministic --seed 3 --threads 1"
    words += f" --checkpoint-every-steps 2 --log-every 1s --ledger {folder / 'ledger'}"
    job = {
        "name": "drill",
        "workers": 2,
        "program": {"module": "stoker.trainers.torch_image", "args": words.split()},
        "data": {"train": str(shards / "train"), "val": str(shards / "val")},
        "checkpoint": {"dir": str(folder / "checkpoints")},
        "env": {"OMP_NUM_THREADS": "1"},
        "profile": {"every": 0},
        "retries": 4,
        "grace": 5,
        "ssh": ssh,
        **keys,
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def state(folder: Path) -> dict[str, Any]:
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    found = unpack(newest.read_bytes(), where=str(newest))
    return {**found["model"], **{f"momentum {k}": v["momentum_buffer"] for k, v in found["optimizer"]["state"].items()}}


def ranks(run: Run, host: str) -> list[int]:
    found = []
    for pid in marked({"STOKER_RUN": run.id, "STOKER_HOST": host}):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "stoker.trainers.torch_image" in words and "torch.distributed.run" not in words:
            found.append(pid)
    return found


def has_reached(run: Run, step: int) -> bool:
    return any(event.fields.get("step", 0) >= step for event in read_run(run.logs).events)


def strike(what: str, run: Run, net: Network, give: Any) -> None:
    host = net["node2"]
    match what:
        case "a rank":
            kill_all(*ranks(run, "node2"))
        case "a keeper":
            kill_all(agents(run, keepers=True)[-1])
        case "the sessions of an sshd":
            host.kill_sessions()
        case "an sshd and all below it":
            host.down()
            host.up()
        case "a cable for 10 s":
            host.cut()
            time.sleep(10)
            host.mend()
        case "a cable for good":
            host.cut()
            until(lambda: bool(run.read_status().attempts), 60)
            until(lambda: not marked({"STOKER_RUN": run.id, "STOKER_HOST": "node2"}), 40)
            host.mend()  # and someone puts it back in
        case "the supervisor":
            kill_all(watcher_of(run))
            until(lambda: watcher(run) is None)
            until(lambda: not there(run), 40)
            done: subprocess.CompletedProcess[str] = give("job", "run", "--resume", run.id, "--detach")
            assert done.returncode == 0, done.stderr
        case "the supervisor of a detached job":
            kill_all(watcher_of(run))
            until(lambda: watcher(run) is None)
            assert json.loads(give("job", "status", "--json").stdout)["state"] == "running"


def watcher_of(run: Run) -> int:
    """The supervisor, by the number that it has here."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "stoker.launchers.supervisor" in words and str(run.folder) in words:
                return int(folder.name)
    raise AssertionError("nobody watches")


# How many attempts it takes.
STRIKES = {
    "a rank": 2,
    "a keeper": 2,
    "the sessions of an sshd": 1,
    "an sshd and all below it": 2,
    "a cable for 10 s": 1,
    "a cable for good": 2,
    "the supervisor": 2,
    "the supervisor of a detached job": 1,
}


@pytest.mark.parametrize("what", list(STRIKES))
def test_the_same_bits_whatever_breaks(
    what: str, calm: Path, net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    lost_after = 30 if what == "a cable for 10 s" else 5
    job = write_job(tmp_path, calm / "shards", keys_of(net, tmp_path / "there", lost_after=lost_after))
    with machine() as give:
        is_detached = what.endswith("detached job")
        if is_detached:
            assert give("job", "run", job, "--on", "ssh", "--detach").returncode == 0
        else:  # in the background, and yet attached
            give.start("job", "run", job, "--on", "ssh")
        runs = tmp_path / "stoker" / "runs"
        until(lambda: any(runs.glob("*/handle")), 60)
        run = find(None)
        until(lambda: has_reached(run, 8), 90)
        strike(what, run, net, give)
        until(lambda: run.read_status().state.is_final, 150)
        status = run.read_status()
        assert status.state is JobState.SUCCEEDED, status.message
        until(lambda: not there(run), 20)
    assert len(status.attempts) == STRIKES[what], status.attempts
    wanted, found = state(calm), state(tmp_path)
    assert wanted.keys() == found.keys()
    assert [name for name in wanted if not wanted[name].equal(found[name])] == []
    for samples in effective(tmp_path / "ledger").values():
        assert len(samples) == len(set(samples)) == SAMPLES
    assert sorted(effective(tmp_path / "ledger")) == list(range(EPOCHS))
    assert not list((tmp_path / "there").rglob("worker-*"))
