"""MPI jobs on ssh hosts: mpirun across hosts that cannot log in to each other, with faults."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import find_processes_by_env
from stoker.errors import InputError
from stoker.jobs.run_folder import RunFolder, create_run, find_run
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ssh.launcher import check_same_paths
from stoker.launchers.ssh.preflight import HostFacts
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.telemetry.reader import find_gaps, read_log
from tests.launchers.contract import LauncherSuite, LauncherTests, job_of
from tests.support.hosts import Network
from tests.support.ssh_runs import remote_processes, ssh_section
from tests.support.trainings import weights
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")]
READY = "echo ready; while :; do sleep 0.05; done"


class MpiTests(LauncherTests):
    ON = "ssh"
    TOPOLOGY = "mpi"
    FAILED_SLOT = "worker/0 (rank 0)"

    @pytest.fixture(autouse=True)
    def _net(self, net: Network, tmp_path: Path) -> None:
        self.net, self.folder = net, tmp_path

    def job(self, command: str | None = None, **keys: Any) -> JobSpec:
        ssh = ssh_section(self.net, self.folder / "there", lost_after=5)
        return job_of(command, **{"topology": "mpi", "workers": 1, "ssh": ssh, **keys})

    def start_two_workers(self, launcher: Any, script: str = READY, **keys: Any) -> RunFolder:
        """Start a job with two workers, and wait until both are ready."""
        run = self.start(launcher, self.job(script, workers=2, **keys))
        wait_until(lambda: self.text(launcher, run).count("ready") == 2)
        return run


@pytest.mark.slow
class TestContract(MpiTests, LauncherSuite):
    pass


class TestMpiOnSsh(MpiTests):
    def test_ranks_on_two_hosts(self, launcher: Any) -> None:
        names = "RANK WORLD_SIZE LOCAL_RANK STOKER_SLOT STOKER_HOST MASTER_ADDR GLOO_SOCKET_IFNAME"
        script = " ".join(f"${name}" for name in names.split())
        run, status = self.run_to_end(launcher, self.job(f"echo {script}", workers=2, processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED, status.message
        for worker, host in enumerate(self.net.hosts):
            lines = sorted(self.text(launcher, run, Slot("worker", worker)))
            rendezvous = f"{self.net.hosts[0].address} {host.interface}"
            assert lines == [
                f"[rank{rank}]: {rank} 4 {rank % 2} worker/{worker} {host.name} {rendezvous}"
                for rank in (2 * worker, 2 * worker + 1)
            ]
        assert remote_processes(run) == []

    def test_killed_rank_is_named_and_nothing_is_left(self, launcher: Any) -> None:
        run = self.start_two_workers(launcher, f"trap '' TERM; {READY}", grace=1)
        (program,) = (pid for pid in find_processes_by_env({"STOKER_RUN": run.id, "RANK": "1"}) if is_program(pid))
        os.kill(program, signal.SIGKILL)
        wait_until(lambda: launcher.status(run.handle).state.is_final)
        log = run.log_path(Slot("worker", 1), 0)
        message = launcher.status(run.handle).message
        assert all(word in message for word in ("worker/1", "rank 1", "SIGKILL", str(log))), message
        assert remote_processes(run) == []

    def test_stop_waits_for_every_rank(self, launcher: Any) -> None:
        """Rank 1 fails at once, for which mpirun alone would kill rank 0 within two seconds."""
        wait = "test $RANK = 0 && sleep 3"
        run = self.start_two_workers(launcher, f"trap '{wait}; echo saved $RANK; exit 143' TERM; {READY}", grace=15)
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        saved = [line for line in self.text(launcher, run) if line.startswith("saved")]
        assert saved == ["saved 1", "saved 0"]  # in the order of time
        assert remote_processes(run) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("program", ["mpirun", "orted"])
    def test_nothing_is_left_when_mpirun_or_a_daemon_is_killed(self, launcher: Any, program: str) -> None:
        run = self.start_two_workers(launcher, f"trap '' TERM; {READY}", grace=1)
        pids = [pid for pid in find_processes_by_env({"STOKER_RUN": run.id}) if program_name(pid) == program]
        os.kill(pids[-1], signal.SIGKILL)
        wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert launcher.status(run.handle).state is JobState.FAILED
        wait_until(lambda: remote_processes(run) == [])

    @pytest.mark.slow
    def test_nothing_is_left_when_the_supervisor_is_killed(self, launcher: Any) -> None:
        run = self.start_two_workers(launcher, f"trap '' TERM; {READY}", grace=1)
        os.kill(supervisor_pid(run) or 0, signal.SIGKILL)
        wait_until(lambda: remote_processes(run) == [])

    @pytest.mark.slow
    def test_cable_cut_for_good(self, launcher: Any) -> None:
        run = self.start_two_workers(launcher, f"trap '' TERM; {READY}", grace=1)
        self.net["node2"].disconnect()
        try:
            wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
            wait_until(lambda: remote_processes(run) == [])
        finally:
            self.net["node2"].reconnect()
        message = launcher.status(run.handle).message
        assert all(word in message for word in ("worker/1", "lost", "node2", "5 s")), message

    @pytest.mark.slow
    def test_network_outage_is_waited_out(self, launcher: Any) -> None:
        script = "echo ready; while ! test -e go; do sleep 0.05; done; echo over $RANK"
        run = self.start_two_workers(launcher, script, ssh=ssh_section(self.net, self.folder / "there", lost_after=30))
        self.net["node2"].disconnect()
        time.sleep(10)
        self.net["node2"].reconnect()
        (self.folder / "there" / "go").touch()
        wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
        status = launcher.status(run.handle)
        assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1), status.message
        assert sorted(line for line in self.text(launcher, run) if "over" in line) == ["over 0", "over 1"]
        assert remote_processes(run) == []

    @pytest.mark.slow
    def test_two_workers_on_one_host(self, launcher: Any) -> None:
        ssh = ssh_section(self.net, self.folder / "there", "node1", "node2:2")
        run, status = self.run_to_end(launcher, self.job("echo $RANK $LOCAL_RANK $STOKER_HOST", workers=3, ssh=ssh))
        assert status.state is JobState.SUCCEEDED, status.message
        assert sorted(self.text(launcher, run)) == ["0 0 node1", "1 0 node2", "2 0 node2"]

    @pytest.mark.slow
    def test_detached_run_survives_its_supervisor(self, launcher: Any) -> None:
        job = self.job("echo ready; while ! test -e go; do sleep 0.05; done; echo over $RANK", workers=2)
        rendered = launcher.render(job)
        run = create_run(job, rendered)
        launcher.start(rendered, run, detach=True)
        self.started.append((launcher, run))
        wait_until(lambda: self.text(launcher, run).count("ready") == 2)
        os.kill(supervisor_pid(run) or 0, signal.SIGKILL)
        time.sleep(1)
        (self.folder / "there" / "go").touch()
        wait_until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert launcher.status(run.handle).state is JobState.SUCCEEDED, launcher.status(run.handle).message
        assert sorted(line for line in self.text(launcher, run) if "over" in line) == ["over 0", "over 1"]
        assert remote_processes(run) == []

    @pytest.mark.slow
    def test_events_and_lines_arrive_complete(self, launcher: Any) -> None:
        Path("train.py").write_text(
            "from stoker.telemetry import recorder\nrecord = recorder()\n"
            "for step in range(1000):\n    record.emit('scalar', name='x' * 3800, step=step, value=1.0)\n"
            "    print('line', step)\n"
        )
        keys: dict[str, Any] = {"program": {"script": "train.py"}, "workers": 2, "processes_per_worker": 2}
        run, status = self.run_to_end(launcher, self.job(**keys))
        assert status.state is JobState.SUCCEEDED, status.message
        for worker in (0, 1):
            log = read_log(run.log_path(Slot("worker", worker), 0))
            assert find_gaps(log.events) == []
            for rank in (2 * worker, 2 * worker + 1):
                lines = [line for line in log.lines if line.startswith(f"[rank{rank}]: ")]
                assert lines == [f"[rank{rank}]: line {step}" for step in range(1000)]
            assert len(log.lines) == 2000
            assert sum(event.kind == "scalar" for event in log.events) == 2000

    def test_unknown_mpirun_option_is_not_retried(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, self.job("true", mpi={"args": ["--nosuch"]}, workers=2, retries=3))
        assert all(word in status.message for word in ("launcher/0", "mpirun", '"--nosuch"')), status.message
        assert len(status.attempts) == 1

    def test_missing_mpirun_is_reported(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stoker.launchers.ssh.preflight.MPI_PROGRAMS", ("mpirun-that-is-not-there",))
        with pytest.raises(InputError, match=r"node1, node2: .*\bmpirun\b"):
            launcher.render(self.job("true", workers=2))


def test_paths_must_be_equal_on_all_hosts() -> None:
    hosts = {host: HostFacts(host, {"workdir": f"/home/{host}/train", "python": "/usr/bin/python3"}) for host in "ab"}
    check_same_paths(job_of("true"), hosts)
    with pytest.raises(InputError, match=r"/home/a/train on a, /home/b/train on b.*ssh\.workdir"):
        check_same_paths(job_of("true", topology="mpi"), hosts)


def program_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_program(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0] == b"bash"


@pytest.mark.slow  # two trainings
@pytest.mark.usefixtures("stoker_home")
def test_weights_equal_those_of_a_local_run(
    net: Network, tmp_path: Path, training_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    words = "--model small --size 32 --global-batch-size 24 --epochs 2 --deterministic --seed 3 --threads 1"
    keys = ["name: same", f"program: {{module: stoker.trainers.torch_image, args: [{', '.join(words.split())}]}}"]
    keys += ["workers: 2", "env: {OMP_NUM_THREADS: '1'}", "retries: 0"]
    keys += [
        f"data: {{train: {training_shards}/train, val: {training_shards}/val}}",
        f"ssh: {ssh_section(net, tmp_path)}",
    ]
    Path("job.yaml").write_text("\n".join(keys))
    for on, topology in (("local", "torchrun"), ("ssh", "mpi")):
        sets = [f"topology={topology}", f"checkpoint.dir={tmp_path / on}", f"ssh.workdir={tmp_path / 'there'}"]
        code = stoker("job", "run", "job.yaml", "--on", on, *(word for one in sets for word in ("--set", one)))
        assert code == 0, find_run(None).read_status().message
    expected, actual = (weights(tmp_path / on) for on in ("local", "ssh"))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []
