"""Jobs under a real mpirun on this machine: every line whole, every rank's end told, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import children, marked
from stoker.errors import MissingProgramError, SpecError
from stoker.jobs.run_folder import Run, find
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.local import LocalLauncher
from stoker.launchers.supervisor import watcher
from stoker.telemetry.reader import gaps, read_log
from tests.launchers.contract import LauncherSuite, job_of, until
from tests.support.trees import stoker
from tests.trainers.trainings import weights

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
READY = "echo ready; while :; do sleep 0.05; done"
LOUD = """
import os, sys
from stoker.telemetry import recorder
record = recorder()
for step in range({count}):
    record.emit("scalar", name="x" * 3800, step=step, value=1.0)
    if step % 10 == 0:
        print("line", step, flush=True)
"""
BURST = "import os; print('\\n'.join(map(str, range(20000)))); print('[1,0]<stdout>:fake', end='')"


def mpi_job(command: str | None = None, **keys: Any) -> Any:
    return job_of(command, **{"topology": "mpi", "workers": 2, **keys})


class TestMpi(LauncherSuite):
    ON = "local"
    TOPOLOGY = "mpi"
    WHO = "worker/0 (rank 0)"

    def script(self, text: str, **keys: Any) -> Any:
        Path("train.py").write_text(text)
        return mpi_job(program={"script": "train.py"}, **keys)

    def ready(self, launcher: Any, count: int, script: str = READY, **keys: Any) -> Run:
        run = self.start(launcher, mpi_job(script, **keys))
        until(lambda: self.text(launcher, run).count("ready") == count)
        return run

    def ranks(self, run: Run) -> list[int]:
        """The processes between mpirun and the programs, by rank."""
        (carrier,) = children(watcher(run) or 0)
        (mpirun,) = children(carrier)
        return sorted(children(mpirun))

    def test_ranks_are_those_that_torch_and_mpi_know(self, launcher: Any) -> None:
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMPI_COMM_WORLD_RANK STOKER_SLOT STOKER_INDEX MASTER_ADDR"
        script = " ".join(f"${name}" for name in names.split())
        run, status = self.end(launcher, mpi_job(f"echo {script}", processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED
        for worker in (0, 1):
            said = sorted(self.text(launcher, run, Slot("worker", worker)))
            assert said == [
                f"[rank{rank}]: {rank} 4 {rank % 2} 2 {rank} worker/{worker} {worker} 127.0.0.1"
                for rank in (2 * worker, 2 * worker + 1)
            ]
        assert self.text(launcher, run, Slot("launcher", 0)) == []

    def test_workers_have_gpus_of_their_own(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        job = mpi_job("echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES", processes_per_worker=1, resources={"gpu": 2})
        run, _ = self.end(launcher, job)
        assert [self.text(launcher, run, Slot("worker", worker)) for worker in (0, 1)] == [["0 4,5"], ["0 6,7"]]

    def test_no_event_is_torn_and_no_line_is_lost(self, launcher: Any) -> None:
        run, status = self.end(launcher, self.script(LOUD.format(count=1000), processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED
        for worker in (0, 1):
            log = read_log(run.log(Slot("worker", worker), 0))
            loud = [event for event in log.events if event.kind == "scalar"]
            assert gaps(log.events) == []
            for rank in (2 * worker, 2 * worker + 1):
                assert [event.fields["step"] for event in loud if event.rank == rank] == list(range(1000))
                mark = f"[rank{rank}]: "
                assert [line for line in log.lines if line.startswith(mark)] == [
                    f"{mark}line {step}" for step in range(0, 1000, 10)
                ]
            assert {event.slot for event in loud} == {f"worker/{worker}"}
            assert len(log.lines) == 200

    def test_bursts_of_short_lines_come_whole(self, launcher: Any) -> None:
        """mpirun by itself loses a third of these."""
        run, _ = self.end(launcher, self.script(BURST))
        for worker in (0, 1):
            wanted = [*map(str, range(20000)), "[1,0]<stdout>:fake"]
            assert self.text(launcher, run, Slot("worker", worker)) == wanted

    def test_each_worker_is_profiled_once(self, launcher: Any) -> None:
        run, _ = self.end(launcher, mpi_job("sleep 1.2", processes_per_worker=2, profile={"every": 1}))
        for worker in (0, 1):
            events = read_log(run.log(Slot("worker", worker), 0)).events
            assert {(e.slot, e.rank) for e in events if e.kind == "profile"} == {(f"worker/{worker}", 2 * worker)}

    def test_a_killed_rank_is_named_and_the_others_end(self, launcher: Any) -> None:
        run = self.ready(launcher, 2)
        (program,) = (pid for pid in marked({"STOKER_RUN": run.id, "RANK": "1"}) if b"ready" in cmdline(pid))
        os.kill(program, signal.SIGKILL)
        until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        log = run.log(Slot("worker", 1), 0)
        assert status.message == f"worker/1 (rank 1) was killed by SIGKILL; its log: {log}"
        assert {one.slot: one.code for one in status.slots} == {"launcher/0": -9, "worker/0": -15, "worker/1": -9}
        assert marked({"STOKER_RUN": run.id}) == []

    @pytest.mark.parametrize(
        "who", ["mpirun", pytest.param("rank", marks=pytest.mark.slow), pytest.param("carrier", marks=pytest.mark.slow)]
    )
    def test_whatever_is_killed_nothing_is_left(self, launcher: Any, who: str) -> None:
        run = self.ready(launcher, 2, script=f"trap '' TERM; {READY}", grace=1)
        (carrier,) = children(watcher(run) or 0)
        (mpirun,) = children(carrier)
        victim = {"carrier": carrier, "mpirun": mpirun, "rank": self.ranks(run)[1]}[who]
        os.kill(victim, signal.SIGKILL)
        until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        said = "worker/1 (rank 1)" if who == "rank" else "launcher/0"
        assert status.message.startswith(f"{said} was killed by SIGKILL; its log: ")
        assert marked({"STOKER_RUN": run.id}) == []

    @pytest.mark.slow
    def test_ranks_end_with_the_supervisor(self, launcher: Any) -> None:
        run = self.ready(launcher, 2, grace=1)
        os.kill(watcher(run) or 0, signal.SIGKILL)
        until(lambda: marked({"STOKER_RUN": run.id}) == [])

    def test_ranks_end_even_when_all_that_watch_are_killed_at_once(self, launcher: Any) -> None:
        run = self.ready(launcher, 2, script=f"trap '' TERM; {READY}", grace=1)
        supervisor = watcher(run) or 0
        (carrier,) = children(supervisor)
        (mpirun,) = children(carrier)
        for pid in (supervisor, carrier, mpirun):
            os.kill(pid, signal.SIGKILL)
        until(lambda: marked({"STOKER_RUN": run.id}) == [])

    def test_stop_gives_every_rank_its_time(self, launcher: Any, tmp_path: Path) -> None:
        """Rank 1 ends at once and badly, for which mpirun would end rank 0 within two seconds."""
        wait = "test $RANK = 0 && sleep 3"
        script = f"trap '{wait}; echo saved > {tmp_path}/saved-$RANK; exit 143' TERM; {READY}"
        run = self.ready(launcher, 2, script=script, grace=10)
        launcher.stop(run.handle)
        status = launcher.status(run.handle)
        assert status.state is JobState.STOPPED
        assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
        assert {one.slot: one.code for one in status.slots if one.slot != "launcher/0"} == {
            "worker/0": -15,
            "worker/1": -15,
        }
        assert marked({"STOKER_RUN": run.id}) == []

    @pytest.mark.slow
    def test_the_grace_has_an_end(self, launcher: Any) -> None:
        run = self.ready(launcher, 2, script=f"trap '' TERM; {READY}", grace=1)
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert marked({"STOKER_RUN": run.id}) == []

    @pytest.mark.slow
    def test_hung_ranks_show_their_stacks(self, launcher: Any) -> None:
        text = "import time\nfrom stoker.telemetry import recorder\nrecorder().heartbeat(3)\n"
        text += "def stuck():\n    time.sleep(60)\nstuck()"
        run, status = self.end(launcher, self.script(text, hang_after=1, grace=1))
        assert "hung at step 3: no heartbeat for 1s" in status.message
        assert (run.folder / "stacks.0.txt").read_text().count("in stuck") == 2

    def test_a_flag_of_mpirun_that_is_wrong(self, launcher: Any) -> None:
        _, status = self.end(launcher, mpi_job("true", mpi={"args": ["--nosuch"]}, retries=3))
        assert status.message.startswith('launcher/0 refused to start: mpirun: unknown option "--nosuch"; its log: ')
        assert len(status.attempts) == 1

    def test_a_program_that_is_gone(self, launcher: Any, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        _, status = self.end(launcher, mpi_job(program={"command": [str(program)]}))
        assert f"refused to start: cannot start the program '{program}': no such file" in status.message

    def test_flags_of_the_job_take_the_place_of_ours(self, launcher: Any) -> None:
        keys = {"mpi": {"binding": "core", "args": ["--mca", "btl", "self,vader", "-bind-to", "none", "--quiet"]}}
        run, status = self.end(launcher, mpi_job("true", **keys))
        assert status.state is JobState.SUCCEEDED
        (command,) = launcher.render(run.job).slots.values()
        assert (command.argv.count("btl"), command.argv.count("--bind-to")) == (1, 0)

    def test_secrets_are_on_no_command_line(self, launcher: Any) -> None:
        run = self.ready(launcher, 2, script=f"test $TOKEN = hush-hush && {READY}", env={"TOKEN": "hush-hush"})
        told = [pid for pid in marked({"STOKER_RUN": run.id}) if b"mpirun" in cmdline(pid)]
        assert told
        assert not any(b"TOKEN=" in cmdline(pid) for pid in told)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_machine_without_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = LocalLauncher()
    with pytest.raises(MissingProgramError, match=r"no mpirun here.* apt-get install openmpi-bin"):
        launcher.render(mpi_job(program={"command": [sys.executable]}, env={"PATH": str(tmp_path)}))
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details:\n")
    other.chmod(0o755)
    with pytest.raises(MissingProgramError, match="is HYDRA build details:, and the topology 'mpi' needs Open MPI 4"):
        launcher.render(mpi_job(program={"command": [sys.executable]}, env={"PATH": str(tmp_path)}))


def test_what_the_job_file_says_already_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        mpi_job("true", mpi={"args": ["-np", "3", "--map-by", "node", "--map-by", "slot:PE=2", "--xml"]})
    said = str(caught.value)
    assert "mpi.args[0]: -np follows from workers and processes_per_worker" in said
    assert "mpi.args[2]: --map-by would change the order of the ranks" in said
    assert "mpi.args[6]: --xml would change what is printed" in said
    assert "args[4]" not in said
    others = "--mca orte_tag_output 0 -gmca rmaps_base_ranking_policy node --pernode --ppr 1:node "
    others += "--mca rmaps_base_mapping_policy node"
    with pytest.raises(SpecError) as caught:
        mpi_job("true", mpi={"args": [*others.split(), "--mca", "x", "-n"]})
    said = str(caught.value)
    assert "mpi.args[0]: --mca orte_tag_output would change what is printed" in said
    assert "mpi.args[3]: -gmca rmaps_base_ranking_policy would change the order" in said
    assert "mpi.args[6]: --pernode follows from workers" in said
    assert "mpi.args[7]: --ppr follows from workers" in said
    assert "mpi.args[9]: --mca rmaps_base_mapping_policy would change the order of the ranks" in said
    assert "args[12]" not in said
    assert "args[14]" not in said
    with pytest.raises(SpecError, match="only torchrun can grow and shrink; mpi needs one number"):
        mpi_job("true", workers={"min": 1, "max": 2})


@pytest.mark.slow  # two trainings
def test_the_weights_are_those_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
    monkeypatch.chdir(tmp_path)
    source = "synthetic:samples=300,classes=5,size=40x32,val=20"
    assert stoker("data", "convert", source, tmp_path / "shards", "--shard-samples", "50") == 0
    words = "--model small --size 32 --global-batch-size 24 --epochs 2 --deterministic --seed 3 --threads 1"
    keys = ["name: same", f"program: {{module: stoker.trainers.torch_image, args: [{', '.join(words.split())}]}}"]
    keys += ["workers: 2", "retries: 0", f"data: {{train: {tmp_path}/shards/train, val: {tmp_path}/shards/val}}"]
    (tmp_path / "job.yaml").write_text("\n".join(keys))
    for topology in ("torchrun", "mpi"):
        sets = [f"topology={topology}", f"checkpoint.dir={tmp_path / topology}"]
        assert stoker("job", "run", "job.yaml", *(word for one in sets for word in ("--set", one))) == 0
        assert find(None).read_status().state is JobState.SUCCEEDED
    one, other = (weights(tmp_path / topology) for topology in ("torchrun", "mpi"))
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []
