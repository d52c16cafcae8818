"""Faults of runs on Slurm: killed ranks, lost nodes, preemption, time limits, and jobs cancelled by someone else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stoker.core.processes import find_processes_by_env, start
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState, JobStatus
from stoker.launchers.slurm.batch import LIMIT_REASON, REQUEUE_REASON, STEP_TIMEOUT_S
from stoker.launchers.slurm.launcher import SlurmLauncher
from stoker.launchers.slurm.records import CANCELLED_MESSAGE
from stoker.trainers.ledger import effective_samples, session_starts
from tests.launchers.contract import DEAF, LauncherTests, is_ready
from tests.support.slurm import NODES, SlurmTestCluster
from tests.support.training_drill import (
    EPOCHS,
    SAMPLES,
    final_state,
    has_reached_step,
    train_reference,
    write_training_job,
)
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SAVE = "trap 'echo saved >> {file}; exit 143' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reference(tmp_path_factory.mktemp("reference"))


def wait_for_end(run: RunFolder) -> JobStatus:
    launcher = SlurmLauncher()
    wait_until(lambda: launcher.status(run.handle).state.is_final, 240)
    return launcher.status(run.handle)


def kill_rank(run: RunFolder, cluster: SlurmTestCluster) -> None:
    os.kill(find_processes_by_env({"STOKER_RUN": run.id, "RANK": "1"})[0], signal.SIGKILL)


def kill_srun(run: RunFolder, cluster: SlurmTestCluster) -> None:
    """Kill srun, whose tasks may keep running; they must not overlap with the next attempt."""
    for pid in find_processes_by_env({"STOKER_RUN": run.id}):
        if Path(f"/proc/{pid}/comm").read_text() == "srun\n":
            os.kill(pid, signal.SIGKILL)


def requeue(run: RunFolder, cluster: SlurmTestCluster) -> None:
    """Requeue the job as its owner would; Slurm ends it like a preempted one."""
    cluster.run("scontrol", "requeue", (run.folder / "slurm.job").read_text().strip())
    cluster.hasten(run)


def lose_node(run: RunFolder, cluster: SlurmTestCluster) -> None:
    cluster.lose_node(NODES[1], run)
    wait_until(lambda: "PENDING" in cluster.run("squeue", "--noheader", "--format=%T"), 120)
    cluster.up(NODES[1])
    cluster.hasten(run)


@pytest.mark.parametrize("break_run", [kill_rank, kill_srun, requeue, lose_node])
def test_training_resumes_exactly(
    break_run: Callable[[RunFolder, SlurmTestCluster], None],
    reference: Path,
    cluster: SlurmTestCluster,
    workspace: Path,
) -> None:
    job = write_training_job(workspace, reference / "shards", {})
    assert stoker("job", "run", job, "--on", "slurm", "--detach") == 0
    run = find_run(None)
    wait_until(partial(has_reached_step, run, 8), 120)
    break_run(run, cluster)
    status = wait_for_end(run)
    assert status.state is JobState.SUCCEEDED, status.message
    assert len(status.attempts) == 2
    assert len(session_starts(workspace / "ledger")) == 2
    epochs = effective_samples(workspace / "ledger")
    assert [len(samples) for samples in epochs.values()] == [SAMPLES] * EPOCHS
    assert all(len(set(samples)) == SAMPLES for samples in epochs.values())
    expected, actual = final_state(reference), final_state(workspace)
    assert [name for name in expected if not expected[name].equal(actual[name])] == []
    assert find_processes_by_env({"STOKER_RUN": run.id}) == []


class TestSlurmFaults(LauncherTests):
    ON = "slurm"

    @pytest.fixture
    def launcher(self, cluster: SlurmTestCluster) -> SlurmLauncher:
        self.cluster = cluster
        return SlurmLauncher()

    def test_cancelled_by_someone_else(self, launcher: SlurmLauncher, tmp_path: Path) -> None:
        run = self.start(launcher, self.job(SAVE.format(file=tmp_path / "saved"), retries=3))
        wait_until(lambda: is_ready(run))
        self.cluster.run("scancel", (run.folder / "slurm.job").read_text().strip())
        status = wait_for_end(run)
        assert status.state is JobState.STOPPED
        assert CANCELLED_MESSAGE in status.message
        assert stoker("job", "run", "--resume", run.id, "--detach") == 0
        wait_until(lambda: is_ready(run, 1))

    def test_killed_batch_script_fails_the_run(self, launcher: SlurmLauncher) -> None:
        run = self.start(launcher, self.job("echo ready; sleep 100", retries=3))
        wait_until(lambda: is_ready(run))
        (script,) = [
            pid
            for pid in find_processes_by_env({"SLURM_JOB_ID": (run.folder / "slurm.job").read_text().strip()})
            if str(run.folder).encode() in (line := Path(f"/proc/{pid}/cmdline").read_bytes())
            and b"slurm_script" in line
        ]
        os.kill(script, signal.SIGKILL)
        status = wait_for_end(run)
        assert status.state is JobState.FAILED
        assert f"--resume {run.id}" in status.message
        wait_until(lambda: not find_processes_by_env({"STOKER_RUN": run.id}))

    def test_preempted_job_is_requeued(self, launcher: SlurmLauncher, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        script = f"echo $STOKER_ATTEMPT; test -e {second} && exit 0; {SAVE.format(file=first)}"
        keys = {"topology": "tf-mirrored", "workers": 2, "resources": {"cpu": 4}}
        run = self.start(launcher, self.job(script, **keys))
        wait_until(lambda: is_ready(run))
        second.touch()
        urgent = self.start(launcher, self.job("true", **keys, slurm={"partition": "urgent"}))
        assert wait_for_end(urgent).state is JobState.SUCCEEDED
        self.cluster.hasten(run)
        status = wait_for_end(run)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [(attempt.lost, attempt.cause) for attempt in status.attempts] == [(True, REQUEUE_REASON), (False, "")]
        assert first.read_text().splitlines() == ["saved", "saved"]

    def test_checkpoint_before_the_time_limit(self, launcher: SlurmLauncher, tmp_path: Path) -> None:
        """Slow slots finish their checkpoint although the others have exited."""
        saved = tmp_path / "saved"
        slow = f"test $STOKER_INDEX = 0 && sleep 3; echo saved $STOKER_INDEX >> {saved}; exit 143"
        script = f"test -e {saved} && exit 0; trap '{slow}' TERM; echo ready; while :; do sleep 0.05; done"
        keys = {"topology": "tf-mirrored", "workers": 2, "slurm": {"time": 60}}
        run = self.start(launcher, self.job(script, **keys))
        wait_until(saved.exists, 120)
        self.cluster.hasten(run)
        status = wait_for_end(run)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [attempt.cause for attempt in status.attempts] == [LIMIT_REASON, ""]
        assert sorted(saved.read_text().splitlines()) == ["saved 0", "saved 1"]

    def test_deaf_program_is_killed_after_the_grace_period(self, launcher: SlurmLauncher) -> None:
        run = self.start(launcher, self.job("trap '' TERM; echo ready; while :; do sleep 0.1; done", grace=1))
        wait_until(lambda: is_ready(run))
        launcher.stop(run.handle)
        status = launcher.status(run.handle)
        assert (status.state, status.slots[0].code) == (JobState.STOPPED, -signal.SIGKILL)
        assert find_processes_by_env({"STOKER_RUN": run.id}) == []

    @pytest.mark.parametrize("index", [0, 1])
    def test_leftovers_of_an_attempt_are_killed(self, launcher: SlurmLauncher, index: int) -> None:
        """Of the slot that fails, and of the one that srun kills."""
        script = f"""{DEAF.partition("echo")[0]} echo ready; sleep 1; test $STOKER_INDEX = 1 || sleep 100; exit 5"""
        run, status = self.run_to_end(launcher, self.job(script, topology="tf-mirrored", workers=2))
        assert status.slots[1].code == 5
        assert find_processes_by_env({"STOKER_RUN": run.id, "STOKER_SLOT": f"worker/{index}"}) == []

    @pytest.mark.parametrize("topology", ["tf-mirrored", "mpi"])
    def test_job_whose_nodes_stay_busy_is_requeued(
        self, launcher: SlurmLauncher, tmp_path: Path, topology: str
    ) -> None:
        """A step of someone else takes the CPUs of the job between two attempts, and does not end."""
        mark = tmp_path / "go"
        script = f"test $STOKER_ATTEMPT = 0 || exit 0; echo ready; until test -e {mark}; do sleep 0.1; done; exit 5"
        run = self.start(launcher, self.job(script, topology=topology, workers=2, retries=3))
        job_id = (run.folder / "slurm.job").read_text().strip()
        wait_until(lambda: is_ready(run))
        holder = start(["srun", f"--jobid={job_id}", "--nodes=2", "--ntasks=2", "sleep", "1000"])
        try:
            wait_until(lambda: "State=PENDING" in self.cluster.run("scontrol", "show", "step"))
            mark.touch()
            wait_until(lambda: launcher.status(run.handle).state is JobState.PENDING, 3 * STEP_TIMEOUT_S)
        finally:
            holder.stop(0)
        self.cluster.hasten(run)
        status = wait_for_end(run)
        assert status.state is JobState.SUCCEEDED, status.message
        assert [(attempt.code, attempt.is_retried) for attempt in status.attempts] == [(5, True), (1, True), (0, False)]

    def test_controller_restart_does_not_end_the_run(self, launcher: SlurmLauncher, tmp_path: Path) -> None:
        mark = tmp_path / "go"
        run = self.start(launcher, self.job(f"echo ready; until test -e {mark}; do sleep 0.1; done; echo end"))
        wait_until(lambda: is_ready(run))
        self.cluster.down("slurmctld")
        mark.touch()
        wait_until((run.folder / "exit.0.worker-0").exists)
        self.cluster.up("slurmctld")
        lines = [line.text for line in launcher.logs(run.handle, None, follow=True)]
        assert lines == ["ready", "end"]
        assert launcher.status(run.handle).state is JobState.SUCCEEDED
