"""The Slurm launcher on a real controller with two nodes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from stoker.jobs.run_folder import find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.slurm.launcher import SlurmLauncher
from tests.launchers.contract import LauncherSuite, job_of
from tests.support.paths import ROOT
from tests.support.slurm import CPUS, NODES, SlurmTestCluster
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
TASK = ROOT / "tests/support/tf_task.py"
LOOPBACK = ["--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]
"""The nodes of the cluster are addresses of the loopback interface, which mpirun does not use by default."""
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), os.environ["MASTER_ADDR"], os.environ["SLURMD_NODENAME"])
dist.destroy_process_group()
"""


class TestSlurm(LauncherSuite):
    ON = "slurm"

    @pytest.fixture
    def launcher(self, cluster: SlurmTestCluster) -> Any:
        self.cluster = cluster
        return SlurmLauncher()

    def test_all_reduce_over_two_nodes(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        run, status = self.run_to_end(
            launcher, job_of(program={"script": "reduce.py"}, topology="torchrun", workers=2), 100
        )
        assert status.state is JobState.SUCCEEDED, status.message
        for index, node in enumerate(NODES):
            assert f"sum 3.0 of 2 {NODES[0]} {node}" in self.text(launcher, run, Slot("worker", index))

    def test_mpirun_starts_ranks_on_two_nodes(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "reduce.py").write_text(ALL_REDUCE)
        keys = {"topology": "mpi", "workers": 2, "processes_per_worker": 2, "mpi": {"args": LOOPBACK}}
        run, status = self.run_to_end(launcher, job_of(program={"script": "reduce.py"}, **keys), 100)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [slot.code for slot in status.slots] == [0, 0, 0]
        for index, node in enumerate(NODES):
            lines = self.text(launcher, run, Slot("worker", index))
            ranks = [f"[rank{rank}]: sum 10.0 of 4 {NODES[0]} {node}" for rank in (2 * index, 2 * index + 1)]
            assert sorted(lines) == ranks

    @pytest.mark.slow
    def test_failed_rank_of_mpirun_is_named_and_retried(self, launcher: Any) -> None:
        script = "test $RANK$STOKER_ATTEMPT = 10 && kill -9 $$; sleep 1; echo $RANK"
        _, status = self.run_to_end(
            launcher, job_of(script, topology="mpi", workers=2, retries=1, mpi={"args": LOOPBACK})
        )
        assert status.state is JobState.SUCCEEDED, status.message
        assert status.attempts[0].cause.startswith("worker/1 (rank 1) was killed by SIGKILL; ")

    @pytest.mark.slow
    def test_ranks_of_mpirun_have_a_grace_period(self, launcher: Any, tmp_path: Path) -> None:
        saved = tmp_path / "saved"
        script = f"trap 'sleep 3; echo $RANK >> {saved}; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
        keys = {"topology": "mpi", "workers": 2, "mpi": {"args": LOOPBACK}}
        run = self.start(launcher, job_of(script, **keys))
        wait_until(lambda: self.text(launcher, run).count("ready") == 2)
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert sorted(saved.read_text().split()) == ["0", "1"]

    def test_lead_role_ends_the_job(self, launcher: Any) -> None:
        roles = {"ps": {"count": 1}, "evaluator": {"count": 1}}
        job = job_of(program={"script": str(TASK)}, topology="tf-ps", workers=2, roles=roles, slurm={"nodes": 2})
        _, status = self.run_to_end(launcher, job, 100)
        assert status.state is JobState.SUCCEEDED, status.message
        states = {slot.slot: slot.state for slot in status.slots}
        assert states["chief/0"] is JobState.SUCCEEDED
        assert states["ps/0"] is states["evaluator/0"] is JobState.STOPPED

    def test_failed_observer_does_not_end_the_job(self, launcher: Any) -> None:
        wait = 'until test -e "$(dirname "$STOKER_CHECKPOINT_DIR")"/exit.0.evaluator-0; do sleep 0.1; done'
        job = job_of(
            f"test $STOKER_ROLE = worker || exit 5; {wait}",
            topology="tf-mirrored",
            roles={"evaluator": {"count": 1}},
        )
        _, status = self.run_to_end(launcher, job)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [slot.code for slot in status.slots] == [0, 5]

    def test_tasks_have_their_own_gpus(self, launcher: Any) -> None:
        keys = {"topology": "tf-mirrored", "workers": 2, "slurm": {"nodes": 1}, "resources": {"gpu": 1, "cpu": 2}}
        run, status = self.run_to_end(
            launcher, job_of("echo gpu $CUDA_VISIBLE_DEVICES of $SLURM_CPUS_PER_TASK", **keys)
        )
        assert status.state is JobState.SUCCEEDED, status.message
        assert sorted(self.text(launcher, run)) == ["gpu 0 of 2", "gpu 1 of 2"]

    def test_missing_program_is_not_retried(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, job_of(program={"command": ["./no-such-program"]}, retries=2))
        assert status.state is JobState.FAILED
        assert "no-such-program" in status.message
        assert [attempt.code for attempt in status.attempts] == [3]

    def test_retries_are_counted(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, job_of("exit 7", retries=1))
        assert status.state is JobState.FAILED
        assert [attempt.code for attempt in status.attempts] == [7, 7]

    def test_setup_and_secrets_reach_the_program(
        self, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKEN", "hush-hush-hush")
        setup = "export FROM_SETUP=yes\nmodule() { :; }\nmodule load cuda"
        job = job_of(
            "echo $FROM_SETUP ${#TOKEN}; pwd",
            secret_env={"TOKEN": {"secret": "s", "key": "k"}},
            slurm={"setup": setup},
        )
        run, _ = self.run_to_end(launcher, job)
        assert self.text(launcher, run) == ["yes 14", str(tmp_path)]
        assert not any(b"hush-hush" in path.read_bytes() for path in run.folder.rglob("*") if path.is_file())

    def test_pending_job_says_why_and_can_be_stopped(self, launcher: Any) -> None:
        other = self.start(launcher, job_of("sleep 100", resources={"cpu": CPUS}, slurm={"options": ["--exclusive"]}))
        wait_until(lambda: launcher.status(other.handle).state is JobState.RUNNING)
        keys = {"topology": "tf-mirrored", "workers": 2, "resources": {"cpu": CPUS}}
        run = self.start(launcher, job_of("sleep 100", **keys))
        wait_until(lambda: "Resources" in launcher.status(run.handle).message)
        status = launcher.status(run.handle)
        assert [status.state, *(slot.state for slot in status.slots)] == [JobState.PENDING] * 3
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED

    def test_resume_continues_the_attempts(self, launcher: Any, tmp_path: Path) -> None:
        run, status = self.run_to_end(launcher, job_of(f"echo $STOKER_ATTEMPT; test -e {tmp_path}/good"))
        assert status.state is JobState.FAILED
        (tmp_path / "good").touch()
        assert stoker("job", "run", "--resume", run.id) == 0
        status = launcher.status(run.handle)
        assert (status.state, [attempt.code for attempt in status.attempts]) == (JobState.SUCCEEDED, [1, 0])
        assert self.text(launcher, run) == ["0", "1"]

    @pytest.mark.parametrize(
        ("slurm", "key"),
        [({"partition": "none"}, "slurm.partition"), ({"options": ["--no-such-option"]}, "slurm.options")],
    )
    def test_rejected_job_names_the_key(
        self, launcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], slurm: Any, key: str
    ) -> None:
        (tmp_path / "job.yaml").write_text(_job_file(slurm=slurm))
        assert stoker("job", "run", "job.yaml", "--on", "slurm") == 2
        assert f"{key}: " in capsys.readouterr().err
        assert stoker("job", "list") == 0

    def test_commands_find_the_run(self, launcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "job.yaml").write_text(_job_file())
        assert stoker("job", "run", "job.yaml", "--on", "slurm") == 0
        run = find_run(None)
        assert run.handle == f"slurm://{run.folder}"
        for command in (("status",), ("list",), ("logs",), ("stop",), ("delete",)):
            assert stoker("job", *command, *((run.id,) if command != ("list",) else ())) == 0, command
        assert not run.folder.exists()
        assert "hello" in capsys.readouterr().out

    def test_doctor_probes_the_nodes(self, launcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "job.yaml").write_text(_job_file(topology="tf-mirrored", workers=2))
        assert stoker("doctor", "job.yaml", "--on", "slurm", "--json") == 0
        hosts = {check["host"] for check in json.loads(capsys.readouterr().out)}
        assert socket.gethostname() in hosts
        assert not list((tmp_path / "stoker").glob("stoker-doctor-*"))


def _job_file(**keys: Any) -> str:
    job = {"name": "small", "topology": "single", "program": {"command": ["echo", "hello"]}, "profile": {"every": 0}}
    return json.dumps({**job, **keys})


def test_unreachable_controller_exits_5(
    cluster: SlurmTestCluster, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = "SlurmctldPort="
    lines = cluster.config.read_text().splitlines()
    other = workspace / "slurm.conf"
    settings = [f"{port}1" if line.startswith(port) else line for line in lines]
    other.write_text("\n".join([*settings, "MessageTimeout=1", ""]))
    (workspace / "work/job.yaml").write_text(_job_file())
    monkeypatch.setenv("SLURM_CONF", str(other))
    assert stoker("job", "run", "job.yaml", "--on", "slurm") == 5
    assert "scontrol ping" in capsys.readouterr().err


def test_missing_slurm_exits_3(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "work/job.yaml").write_text(_job_file())
    monkeypatch.setenv("PATH", str(workspace))
    assert stoker("job", "plan", "job.yaml", "--on", "slurm") == 0
    assert stoker("job", "run", "job.yaml", "--on", "slurm") == 3
