"""mpirun across hosts that know nothing of each other: real sshd in namespaces, and nothing left on any of them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import marked
from stoker.errors import InputError
from stoker.jobs.run_folder import Run, create, find
from stoker.jobs.spec import Job
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.ssh.launcher import Look, _check_even
from stoker.launchers.supervisor import watcher
from stoker.telemetry.reader import gaps, read_log
from tests.launchers.contract import LauncherSuite, Launching, job_of, until
from tests.launchers.ssh.test_launcher import keys_of, there
from tests.support.hosts import Network, network
from tests.support.trees import stoker
from tests.trainers.trainings import weights

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")]
READY = "echo ready; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network(tmp_path_factory.mktemp("net")) as found:
        yield found


class OnSsh(Launching):
    ON = "ssh"
    TOPOLOGY = "mpi"
    WHO = "worker/0 (rank 0)"

    @pytest.fixture(autouse=True)
    def _hosts(self, net: Network, tmp_path: Path) -> None:
        self.net, self.folder = net, tmp_path

    def job(self, command: str | None = None, **keys: Any) -> Job:
        ssh = keys_of(self.net, self.folder / "there", lost_after=5)
        return job_of(command, **{"topology": "mpi", "ssh": ssh, **keys})

    def ready(self, launcher: Any, script: str = READY, **keys: Any) -> Run:
        run = self.start(launcher, self.job(script, workers=2, **keys))
        until(lambda: self.text(launcher, run).count("ready") == 2)
        return run


@pytest.mark.slow
class TestContract(OnSsh, LauncherSuite):
    pass


class TestMpiOnSsh(OnSsh):
    def test_ranks_on_two_hosts(self, launcher: Any) -> None:
        names = "RANK WORLD_SIZE LOCAL_RANK STOKER_SLOT STOKER_HOST MASTER_ADDR GLOO_SOCKET_IFNAME"
        script = " ".join(f"${name}" for name in names.split())
        run, status = self.end(launcher, self.job(f"echo {script}", workers=2, processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED, status.message
        for worker, host in enumerate(self.net.hosts):
            said = sorted(self.text(launcher, run, Slot("worker", worker)))
            meeting = f"{self.net.hosts[0].address} {host.interface}"
            assert said == [
                f"[rank{rank}]: {rank} 4 {rank % 2} worker/{worker} {host.name} {meeting}"
                for rank in (2 * worker, 2 * worker + 1)
            ]
        assert there(run) == []

    def test_a_killed_rank_is_named_and_nothing_is_left(self, launcher: Any) -> None:
        run = self.ready(launcher, f"trap '' TERM; {READY}", grace=1)
        (program,) = (pid for pid in marked({"STOKER_RUN": run.id, "RANK": "1"}) if is_program(pid))
        os.kill(program, signal.SIGKILL)
        until(lambda: launcher.status(run.handle).state.is_final)
        log = run.log(Slot("worker", 1), 0)
        assert launcher.status(run.handle).message == f"worker/1 (rank 1) was killed by SIGKILL; its log: {log}"
        assert there(run) == []

    def test_stop_gives_every_rank_its_time(self, launcher: Any) -> None:
        """Rank 1 ends at once and badly, for which mpirun would end rank 0 within two seconds."""
        wait = "test $RANK = 0 && sleep 3"
        run = self.ready(launcher, f"trap '{wait}; echo saved $RANK; exit 143' TERM; {READY}", grace=15)
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert [line for line in self.text(launcher, run) if line.startswith("saved")] == ["saved 0", "saved 1"]
        assert there(run) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("who", ["mpirun", "orted"])
    def test_nothing_is_left_when_a_part_of_mpi_is_killed(self, launcher: Any, who: str) -> None:
        run = self.ready(launcher, f"trap '' TERM; {READY}", grace=1)
        found = [pid for pid in marked({"STOKER_RUN": run.id}) if program_of(pid) == who]
        os.kill(found[-1], signal.SIGKILL)
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert launcher.status(run.handle).state is JobState.FAILED
        until(lambda: there(run) == [], 20)

    @pytest.mark.slow
    def test_nothing_is_left_when_the_supervisor_is_killed(self, launcher: Any) -> None:
        run = self.ready(launcher, f"trap '' TERM; {READY}", grace=1)
        os.kill(watcher(run) or 0, signal.SIGKILL)
        until(lambda: there(run) == [], 40)

    @pytest.mark.slow
    def test_a_cable_that_is_cut_for_good(self, launcher: Any) -> None:
        run = self.ready(launcher, f"trap '' TERM; {READY}", grace=1)
        self.net["node2"].cut()
        try:
            until(lambda: launcher.status(run.handle).state.is_final, 60)
            until(lambda: there(run) == [], 40)
        finally:
            self.net["node2"].mend()
        assert "worker/1 was lost: node2 has not answered for 5 s" in launcher.status(run.handle).message

    @pytest.mark.slow
    def test_a_pause_of_the_network_is_waited_out(self, launcher: Any) -> None:
        script = "echo ready; while ! test -e go; do sleep 0.05; done; echo over $RANK"
        run = self.ready(launcher, script, ssh=keys_of(self.net, self.folder / "there", lost_after=30))
        self.net["node2"].cut()
        time.sleep(10)
        self.net["node2"].mend()
        (self.folder / "there" / "go").touch()
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        status = launcher.status(run.handle)
        assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1), status.message
        assert sorted(line for line in self.text(launcher, run) if "over" in line) == ["over 0", "over 1"]
        assert there(run) == []

    @pytest.mark.slow
    def test_two_workers_on_one_host(self, launcher: Any) -> None:
        ssh = keys_of(self.net, self.folder / "there", "node1", "node2:2")
        run, status = self.end(launcher, self.job("echo $RANK $LOCAL_RANK $STOKER_HOST", workers=3, ssh=ssh))
        assert status.state is JobState.SUCCEEDED, status.message
        assert sorted(self.text(launcher, run)) == ["0 0 node1", "1 0 node2", "2 0 node2"]

    @pytest.mark.slow
    def test_a_detached_job_goes_on_without_this_machine(self, launcher: Any) -> None:
        job = self.job("echo ready; while ! test -e go; do sleep 0.05; done; echo over $RANK", workers=2)
        rendered = launcher.render(job)
        run = create(job, rendered)
        launcher.start(rendered, run, detach=True)
        self.started.append((launcher, run))
        until(lambda: self.text(launcher, run).count("ready") == 2)
        os.kill(watcher(run) or 0, signal.SIGKILL)
        time.sleep(1)
        (self.folder / "there" / "go").touch()
        until(lambda: launcher.status(run.handle).state.is_final, 60)
        assert launcher.status(run.handle).state is JobState.SUCCEEDED, launcher.status(run.handle).message
        assert sorted(line for line in self.text(launcher, run) if "over" in line) == ["over 0", "over 1"]
        assert there(run) == []

    @pytest.mark.slow
    def test_events_come_whole(self, launcher: Any) -> None:
        Path("train.py").write_text(
            "from stoker.telemetry import recorder\nrecord = recorder()\n"
            "for step in range(1000):\n    record.emit('scalar', name='x' * 3800, step=step, value=1.0)\n"
            "    print('line', step)\n"
        )
        keys: dict[str, Any] = {"program": {"script": "train.py"}, "workers": 2, "processes_per_worker": 2}
        run, status = self.end(launcher, self.job(**keys))
        assert status.state is JobState.SUCCEEDED, status.message
        for worker in (0, 1):
            log = read_log(run.log(Slot("worker", worker), 0))
            assert gaps(log.events) == []
            for rank in (2 * worker, 2 * worker + 1):
                lines = [line for line in log.lines if line.startswith(f"[rank{rank}]: ")]
                assert lines == [f"[rank{rank}]: line {step}" for step in range(1000)]
            assert len(log.lines) == 2000
            assert sum(event.kind == "scalar" for event in log.events) == 2000

    def test_a_flag_of_mpirun_that_is_wrong(self, launcher: Any) -> None:
        _, status = self.end(launcher, self.job("true", mpi={"args": ["--nosuch"]}, workers=2, retries=3))
        assert status.message.startswith('launcher/0 refused to start: mpirun: unknown option "--nosuch"; its log: ')
        assert len(status.attempts) == 1

    def test_what_hosts_lack_is_told(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stoker.launchers.ssh.preflight.MPI_PROGRAMS", ("mpirun-that-is-not-there",))
        with pytest.raises(InputError, match="each of node1, node2 has no mpirun on its PATH"):
            launcher.render(self.job("true", workers=2))


def test_paths_must_be_the_same_on_all_hosts() -> None:
    found = {host: Look(host, {"workdir": f"/home/{host}/train", "python": "/usr/bin/python3"}) for host in "ab"}
    _check_even(job_of("true"), found)
    with pytest.raises(
        InputError, match=r"the folder must have the same path .* is /home/a/train on a, .* ssh.workdir"
    ):
        _check_even(job_of("true", topology="mpi"), found)


def program_of(pid: int) -> str:
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
def test_the_weights_are_those_of_this_machine(net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    source = "synthetic:samples=300,classes=5,size=40x32,val=20"
    assert stoker("data", "convert", source, tmp_path / "shards", "--shard-samples", "50") == 0
    words = "--model small --size 32 --global-batch-size 24 --epochs 2 --deterministic --seed 3 --threads 1"
    keys = ["name: same", f"program: {{module: stoker.trainers.torch_image, args: [{', '.join(words.split())}]}}"]
    keys += ["workers: 2", "env: {OMP_NUM_THREADS: '1'}", "retries: 0"]
    keys += [f"data: {{train: {tmp_path}/shards/train, val: {tmp_path}/shards/val}}", f"ssh: {keys_of(net, tmp_path)}"]
    Path("job.yaml").write_text("\n".join(keys))
    for on, topology in (("local", "torchrun"), ("ssh", "mpi")):
        sets = [f"topology={topology}", f"checkpoint.dir={tmp_path / on}", f"ssh.workdir={tmp_path / 'there'}"]
        code = stoker("job", "run", "job.yaml", "--on", on, *(word for one in sets for word in ("--set", one)))
        assert code == 0, find(None).read_status().message
    one, other = (weights(tmp_path / on) for on in ("local", "ssh"))
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []
