"""Hosts with different numbers of GPUs: each runs as many ranks as it has, unless the job says otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.core.spec import decode
from stoker.jobs.run_folder import create_run
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ssh import launcher as ssh_launcher
from stoker.launchers.ssh.gpus import count_needed_gpus, describe_ranks, share_gpus
from stoker.launchers.ssh.launcher import SshLauncher
from stoker.launchers.ssh.preflight import probe_hosts
from tests.launchers.contract import job_of
from tests.launchers.ssh.test_plan import plan_on
from tests.support.hosts import Network
from tests.support.ssh_runs import ssh_section
from tests.support.unequal_training import UNEQUAL, check_training, train_equal, training_keys
from tests.support.waiting import wait_until


def make_job(**keys: Any) -> JobSpec:
    return job_of(program={"script": "a.py"}, **{"topology": "torchrun", "workers": 3, **keys})


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({"a": 8, "b": 2}, (8, 1, 1)),
        ({"a": 8, "b": 3}, (8, 2, 1)),
        ({"a": 1, "b": 5}, (1, 3, 2)),
        ({"a": 2, "b": 1}, (2, 1, 1)),
    ],
)
def test_workers_share_the_gpus_of_their_host(gpus: dict[str, int], expected: tuple[int, ...]) -> None:
    for topology in ("torchrun", "mpi"):
        job = share_gpus(make_job(topology=topology), ["a", "b", "b"], gpus)
        assert job.ranks == expected
    needed = count_needed_gpus(job, ["a", "b", "b"])
    assert all(needed[host] in (0, gpus[host]) for host in gpus)  # 0: fewer GPUs than workers, which see all of them


@pytest.mark.parametrize(
    "keys",
    [
        {"resources": {"gpu": 0}},
        {"resources": {"gpu": 2}},
        {"processes_per_worker": 1},
        {"workers": [{"count": 2}, {"count": 1}]},
        {"workers": {"min": 1, "max": 3}},
        {"topology": "tf-mirrored"},
    ],
)
def test_gpus_that_the_job_sets_are_kept(keys: dict[str, Any]) -> None:
    job = make_job(**keys)
    assert share_gpus(job, ["a", "b", "b"], {"a": 8, "b": 4}) is job


def test_hosts_without_gpus_run_one_rank_per_worker() -> None:
    job = make_job()
    assert share_gpus(job, ["a", "b", "b"], {"a": 0}) is job
    assert describe_ranks(job, ["a", "b", "c"]) == ""
    assert describe_ranks(job, ["a", "b", "b"]) == "1 on a, 2 on b"


@pytest.mark.usefixtures("stoker_home")
def test_plan_of_unequal_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_on(["node0", "node1", "node1"], workers=[{"resources": {"gpu": 4}}, {"resources": {"gpu": 2}}, {}])
    commands = [plan.slots[f"worker/{index}"] for index in range(3)]
    ranks = [command.argv[command.argv.index("--nproc-per-node") + 1] for command in commands]
    assert ranks == ["4", "2", "1"]
    assert [command.env.get("CUDA_VISIBLE_DEVICES") for command in commands] == [None, "0,1", None]
    assert [command.env["OMP_NUM_THREADS"] for command in commands] == ["2", "2", "2"]  # of 8 cores per host
    assert any("4 on node0, 3 on node1" in note for note in plan.notes)


# --- Real hosts


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_equal(tmp_path_factory.mktemp("equal"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        ("torchrun", "auto"),
        pytest.param("mpi", "auto", marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")),
        ("torchrun", UNEQUAL),
    ],
)
@pytest.mark.usefixtures("stoker_home")
def test_training_uses_the_gpus_of_unequal_hosts(
    topology: str, workers: Any, net: Network, tmp_path: Path, equal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe_with_gpus(*args: Any) -> Any:
        gpus = {"node1": 2, "node2": 1} if workers == "auto" else {}
        facts = probe_hosts(*args)
        return {host: each._replace(facts={**each.facts, "gpus": gpus.get(host, 0)}) for host, each in facts.items()}

    monkeypatch.setattr(ssh_launcher, "probe_hosts", probe_with_gpus)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    section = ssh_section(net, tmp_path / "there")
    keys = training_keys(tmp_path, equal / "shards", topology=topology, workers=workers, ssh=section)
    launcher = SshLauncher()
    job = launcher.resolve_paths(decode(keys, JobSpec))
    plan = launcher.render(job)
    assert any("2 on node1, 1 on node2" in note for note in plan.notes)
    run = create_run(job, plan)
    handle = launcher.start(plan, run)
    try:
        wait_until(lambda: launcher.status(handle).state.is_final, 200)
    finally:
        launcher.stop(handle)
    status = launcher.status(handle)
    assert status.state is JobState.SUCCEEDED, status.message
    assert run.log_path(Slot("worker", 1), 0).exists()
    check_training(tmp_path, equal)
