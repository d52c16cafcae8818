"""MPI jobs with a real mpirun on this machine: complete logs, exit codes of every rank, no leftovers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import child_pids, find_processes_by_env
from stoker.errors import MissingProgramError, SpecError
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.local import LocalLauncher
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.telemetry.reader import find_gaps, read_log
from tests.launchers.contract import LauncherSuite, job_of
from tests.support.trainings import weights
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
READY = "echo ready; while :; do sleep 0.05; done"
MANY_EVENTS = """
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


def slot_pid(run: RunFolder) -> int:
    """The process of the slot that runs mpirun; the supervisor's other child is the guard."""
    (pid,) = set(child_pids(supervisor_pid(run) or 0)) & set(find_processes_by_env({"STOKER_RUN": run.id}))
    return pid


class TestMpi(LauncherSuite):
    ON = "local"
    TOPOLOGY = "mpi"
    FAILED_SLOT = "worker/0 (rank 0)"

    def python_job(self, text: str, **keys: Any) -> Any:
        Path("train.py").write_text(text)
        return mpi_job(program={"script": "train.py"}, **keys)

    def start_ready(self, launcher: Any, count: int, script: str = READY, **keys: Any) -> RunFolder:
        run = self.start(launcher, mpi_job(script, **keys))
        wait_until(lambda: self.text(launcher, run).count("ready") == count)
        return run

    def ranks(self, run: RunFolder) -> list[int]:
        """The processes between mpirun and the programs, by rank."""
        slot = slot_pid(run)
        (mpirun,) = child_pids(slot)
        return sorted(child_pids(mpirun))

    def test_rank_variables_of_torch_and_mpi(self, launcher: Any) -> None:
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE OMPI_COMM_WORLD_RANK STOKER_SLOT STOKER_INDEX MASTER_ADDR"
        script = " ".join(f"${name}" for name in names.split())
        run, status = self.run_to_end(launcher, mpi_job(f"echo {script}", processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED
        for worker in (0, 1):
            lines = sorted(self.text(launcher, run, Slot("worker", worker)))
            assert lines == [
                f"[rank{rank}]: {rank} 4 {rank % 2} 2 {rank} worker/{worker} {worker} 127.0.0.1"
                for rank in (2 * worker, 2 * worker + 1)
            ]
        assert self.text(launcher, run, Slot("launcher", 0)) == []

    def test_workers_do_not_share_gpus(self, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        job = mpi_job("echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES", processes_per_worker=1, resources={"gpu": 2})
        run, _ = self.run_to_end(launcher, job)
        assert [self.text(launcher, run, Slot("worker", worker)) for worker in (0, 1)] == [["0 4,5"], ["0 6,7"]]

    def test_events_and_lines_are_complete(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, self.python_job(MANY_EVENTS.format(count=1000), processes_per_worker=2))
        assert status.state is JobState.SUCCEEDED
        for worker in (0, 1):
            log = read_log(run.log_path(Slot("worker", worker), 0))
            scalars = [event for event in log.events if event.kind == "scalar"]
            assert find_gaps(log.events) == []
            for rank in (2 * worker, 2 * worker + 1):
                assert [event.fields["step"] for event in scalars if event.rank == rank] == list(range(1000))
                prefix = f"[rank{rank}]: "
                assert [line for line in log.lines if line.startswith(prefix)] == [
                    f"{prefix}line {step}" for step in range(0, 1000, 10)
                ]
            assert {event.slot for event in scalars} == {f"worker/{worker}"}
            assert len(log.lines) == 200

    def test_bursts_of_short_lines_are_complete(self, launcher: Any) -> None:
        """mpirun without the rank wrapper loses a third of these."""
        run, _ = self.run_to_end(launcher, self.python_job(BURST))
        for worker in (0, 1):
            expected = [*map(str, range(20000)), "[1,0]<stdout>:fake"]
            assert self.text(launcher, run, Slot("worker", worker)) == expected

    def test_one_profiler_per_worker(self, launcher: Any) -> None:
        run, _ = self.run_to_end(launcher, mpi_job("sleep 1.2", processes_per_worker=2, profile={"every": 1}))
        for worker in (0, 1):
            events = read_log(run.log_path(Slot("worker", worker), 0)).events
            assert {(e.slot, e.rank) for e in events if e.kind == "profile"} == {(f"worker/{worker}", 2 * worker)}

    def test_profiler_counts_all_ranks_of_its_worker(self, launcher: Any) -> None:
        """Without the others, the CPU time of the job cannot be told from that of other processes."""
        burn = f"test $((RANK % 2)) = 0 && exec sleep 3; exec {sys.executable} -c 'while True: pass' & sleep 3; kill $!"
        run, _ = self.run_to_end(launcher, mpi_job(burn, processes_per_worker=2, profile={"every": 1}))
        for worker in (0, 1):
            events = read_log(run.log_path(Slot("worker", worker), 0)).events
            samples = [event.fields for event in events if event.kind == "profile"]
            assert all("machine" in sample for sample in samples)
            assert max(sample["tree_cpu_pct"] for sample in samples) > 0
            # The program of the first rank; of the other, the two processes of its wrapper, and its three processes.
            assert max(sample["tree_processes"] for sample in samples) == 6

    def test_killed_rank_is_diagnosed_and_the_others_stop(self, launcher: Any) -> None:
        run = self.start_ready(launcher, 2)
        (program,) = (
            pid for pid in find_processes_by_env({"STOKER_RUN": run.id, "RANK": "1"}) if b"ready" in cmdline(pid)
        )
        os.kill(program, signal.SIGKILL)
        wait_until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        log = run.log_path(Slot("worker", 1), 0)
        assert status.message == f"worker/1 (rank 1) was killed by SIGKILL; log: {log}"
        assert {slot.slot: slot.code for slot in status.slots} == {"launcher/0": -9, "worker/0": -15, "worker/1": -9}
        assert find_processes_by_env({"STOKER_RUN": run.id}) == []

    @pytest.mark.parametrize(
        "victim", ["mpirun", pytest.param("rank", marks=pytest.mark.slow), pytest.param("slot", marks=pytest.mark.slow)]
    )
    def test_kill_of_any_process_leaves_none(self, launcher: Any, victim: str) -> None:
        run = self.start_ready(launcher, 2, script=f"trap '' TERM; {READY}", grace=1)
        slot = slot_pid(run)
        (mpirun,) = child_pids(slot)
        os.kill({"slot": slot, "mpirun": mpirun, "rank": self.ranks(run)[1]}[victim], signal.SIGKILL)
        wait_until(lambda: launcher.status(run.handle).state.is_final)
        status = launcher.status(run.handle)
        failed = "worker/1 (rank 1)" if victim == "rank" else "launcher/0"
        assert status.message.startswith(f"{failed} was killed by SIGKILL; ")
        assert find_processes_by_env({"STOKER_RUN": run.id}) == []

    @pytest.mark.slow
    def test_ranks_stop_with_the_supervisor(self, launcher: Any) -> None:
        run = self.start_ready(launcher, 2, grace=1)
        os.kill(supervisor_pid(run) or 0, signal.SIGKILL)
        wait_until(lambda: find_processes_by_env({"STOKER_RUN": run.id}) == [])

    def test_ranks_stop_when_supervisor_slot_and_mpirun_are_killed_together(self, launcher: Any) -> None:
        run = self.start_ready(launcher, 2, script=f"trap '' TERM; {READY}", grace=1)
        supervisor = supervisor_pid(run) or 0
        slot = slot_pid(run)
        (mpirun,) = child_pids(slot)
        for pid in (supervisor, slot, mpirun):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: find_processes_by_env({"STOKER_RUN": run.id}) == [])

    def test_every_rank_has_the_grace_period(self, launcher: Any, tmp_path: Path) -> None:
        """Rank 1 fails at once, for which mpirun by itself would kill rank 0 within two seconds."""
        wait = "test $RANK = 0 && sleep 3"
        script = f"trap '{wait}; echo saved > {tmp_path}/saved-$RANK; exit 143' TERM; {READY}"
        run = self.start_ready(launcher, 2, script=script, grace=10)
        launcher.stop(run.handle)
        status = launcher.status(run.handle)
        assert status.state is JobState.STOPPED
        assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
        assert {slot.slot: slot.code for slot in status.slots if slot.slot != "launcher/0"} == {
            "worker/0": -15,
            "worker/1": -15,
        }
        assert find_processes_by_env({"STOKER_RUN": run.id}) == []

    @pytest.mark.slow
    def test_ranks_are_killed_after_the_grace_period(self, launcher: Any) -> None:
        run = self.start_ready(launcher, 2, script=f"trap '' TERM; {READY}", grace=1)
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert find_processes_by_env({"STOKER_RUN": run.id}) == []

    @pytest.mark.slow
    def test_hang_dumps_the_stacks_of_all_ranks(self, launcher: Any) -> None:
        text = "import time\nfrom stoker.telemetry import recorder\nrecorder().heartbeat(3)\n"
        text += "def stuck():\n    time.sleep(60)\nstuck()"
        run, status = self.run_to_end(launcher, self.python_job(text, hang_after=1, grace=1))
        assert re.search(r"\bhung at step 3: .*\b1s\b", status.message)
        assert (run.folder / "stacks.0.txt").read_text().count("in stuck") == 2

    def test_unknown_mpirun_option_is_not_retried(self, launcher: Any) -> None:
        _, status = self.run_to_end(launcher, mpi_job("true", mpi={"args": ["--nosuch"]}, retries=3))
        assert status.message.startswith("launcher/0 ")
        assert 'mpirun: unknown option "--nosuch";' in status.message
        assert len(status.attempts) == 1

    def test_program_that_cannot_be_started(self, launcher: Any, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        _, status = self.run_to_end(launcher, mpi_job(program={"command": [str(program)]}))
        assert re.search(rf"cannot start .*'{program}': no such file", status.message)

    def test_mpirun_options_of_the_job_replace_ours(self, launcher: Any) -> None:
        keys = {"mpi": {"binding": "core", "args": ["--mca", "btl", "self,vader", "-bind-to", "none", "--quiet"]}}
        run, status = self.run_to_end(launcher, mpi_job("true", **keys))
        assert status.state is JobState.SUCCEEDED
        (command,) = launcher.render(run.job).slots.values()
        assert (command.argv.count("btl"), command.argv.count("--bind-to")) == (1, 0)

    def test_secrets_are_not_on_command_lines(self, launcher: Any) -> None:
        run = self.start_ready(launcher, 2, script=f"test $TOKEN = hush-hush && {READY}", env={"TOKEN": "hush-hush"})
        mpiruns = [pid for pid in find_processes_by_env({"STOKER_RUN": run.id}) if b"mpirun" in cmdline(pid)]
        assert mpiruns
        assert not any(b"TOKEN=" in cmdline(pid) for pid in mpiruns)


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_missing_or_other_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = LocalLauncher()
    with pytest.raises(MissingProgramError, match=r"mpirun not found.* apt-get install openmpi-bin"):
        launcher.render(mpi_job(program={"command": [sys.executable]}, env={"PATH": str(tmp_path)}))
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details:\n")
    other.chmod(0o755)
    with pytest.raises(MissingProgramError, match=r"HYDRA build details:.*Open MPI 4"):
        launcher.render(mpi_job(program={"command": [sys.executable]}, env={"PATH": str(tmp_path)}))


def test_mpirun_options_set_by_stoker_are_rejected() -> None:
    assert rejected_args("-np", "3", "--map-by", "node", "--map-by", "slot:PE=2", "--xml") == {
        "mpi.args[0]": ("-np", "workers"),
        "mpi.args[2]": ("--map-by", "order"),
        "mpi.args[6]": ("--xml", "output"),
    }
    others = "--mca orte_tag_output 0 -gmca rmaps_base_ranking_policy node --pernode --ppr 1:node "
    others += "--mca rmaps_base_mapping_policy node --mca x -n"
    assert rejected_args(*others.split()) == {
        "mpi.args[0]": ("--mca orte_tag_output", "output"),
        "mpi.args[3]": ("-gmca rmaps_base_ranking_policy", "order"),
        "mpi.args[6]": ("--pernode", "workers"),
        "mpi.args[7]": ("--ppr", "workers"),
        "mpi.args[9]": ("--mca rmaps_base_mapping_policy", "order"),
    }
    with pytest.raises(SpecError, match=r"\bworkers\b.*torchrun"):
        mpi_job("true", workers={"min": 1, "max": 2})


def rejected_args(*args: str) -> dict[str, tuple[str, ...]]:
    """Return the options of mpirun that a job file may not set and what they would change, by their key."""
    with pytest.raises(SpecError) as caught:
        mpi_job("true", mpi={"args": list(args)})
    pattern = r"(-\S+(?: orte_\S+| rmaps_\S+)?) (?:is set from .*?\b(workers)|would change .*?\b(?:(order)|(output)))\b"
    matches = {fault.path: re.match(pattern, fault.what) for fault in caught.value.faults}
    return {path: tuple(filter(None, match.groups())) if match else () for path, match in matches.items()}


@pytest.mark.slow  # two trainings
@pytest.mark.usefixtures("stoker_home")
def test_weights_equal_those_of_torchrun(
    tmp_path: Path, training_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--model small --size 32 --global-batch-size 24 --epochs 2 --deterministic --seed 3 --threads 1"
    keys = ["name: same", f"program: {{module: stoker.trainers.torch_image, args: [{', '.join(options.split())}]}}"]
    keys += ["workers: 2", "retries: 0", f"data: {{train: {training_shards}/train, val: {training_shards}/val}}"]
    (tmp_path / "job.yaml").write_text("\n".join(keys))
    for topology in ("torchrun", "mpi"):
        sets = [f"topology={topology}", f"checkpoint.dir={tmp_path / topology}"]
        assert stoker("job", "run", "job.yaml", *(arg for value in sets for arg in ("--set", value))) == 0
        assert find_run(None).read_status().state is JobState.SUCCEEDED
    torchrun, mpi = (weights(tmp_path / topology) for topology in ("torchrun", "mpi"))
    assert torchrun.keys() == mpi.keys()
    assert [name for name in torchrun if not torchrun[name].equal(mpi[name])] == []
