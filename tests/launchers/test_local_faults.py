"""Faults of local runs: a killed supervisor, leftovers of an attempt, full disks; and the exact bytes of a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.core.processes import child_pids, read_env
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.supervisor import supervisor_pid
from stoker.remote.guard import GUARD_NAME
from tests.launchers.contract import DEAF, LauncherTests, is_ready, job_of
from tests.launchers.test_local import processes_of
from tests.support.attempts import OVERLAP, with_attempt_lock
from tests.support.disks import small_disk
from tests.support.outputs import write_program
from tests.support.waiting import eventually, wait_until

pytestmark = pytest.mark.timeout(180)

SURVIVORS = {
    "in the background": "sleep 1000 & echo ready; wait",
    "re-parented": "(sleep 1000 &); echo ready; while :; do sleep 0.1; done",
    "in its own session": "setsid sleep 1000 & echo ready; wait",
    "ignoring SIGTERM": "trap '' TERM; echo ready; while :; do sleep 0.1; done",
}
"""Programs of which a process survives the supervisor."""


def kill_supervisor(run: RunFolder) -> None:
    pid = supervisor_pid(run)
    assert pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: supervisor_pid(run) is None)


def guard_pid(run: RunFolder) -> int | None:
    """The guard of the run's supervisor."""
    for pid in child_pids(supervisor_pid(run) or 0):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == GUARD_NAME:
                return pid
    return None


class TestLocalFaults(LauncherTests):
    ON = "local"

    @pytest.mark.parametrize("script", SURVIVORS.values(), ids=SURVIVORS)
    def test_killed_supervisor_leaves_no_process(self, launcher: Any, script: str) -> None:
        run = self.start(launcher, job_of(script, grace=1))
        wait_until(lambda: is_ready(run))
        kill_supervisor(run)
        assert eventually(lambda: not processes_of(run), 15)

    def test_killed_supervisor_leaves_the_grace_period(self, launcher: Any) -> None:
        """A second SIGTERM, or one to its children, would interrupt a program that is writing a checkpoint."""
        script = "trap 'echo term; sleep 0.5; echo saved; exit' TERM; echo ready; while :; do sleep 0.1; done"
        run = self.start(launcher, job_of(script, grace=60))
        wait_until(lambda: is_ready(run))
        kill_supervisor(run)
        wait_until(lambda: not processes_of(run))
        assert run.log_path(Slot("worker", 0), 0).read_text() == "ready\nterm\nsaved\n"

    def test_guard_spares_the_next_attempt(self, launcher: Any) -> None:
        """The guard of a killed supervisor acts only when the run has been resumed, and then terminates nothing."""
        run = self.start(launcher, job_of("echo ready; exec sleep 1000", grace=1))
        wait_until(lambda: is_ready(run))
        guard = guard_pid(run)
        assert guard
        os.kill(guard, signal.SIGSTOP)
        kill_supervisor(run)
        launcher.restart(run)
        wait_until(lambda: is_ready(run, 1))
        running = processes_of(run)
        os.kill(guard, signal.SIGCONT)
        wait_until(lambda: not read_env(guard))
        assert processes_of(run) == running
        assert launcher.status(run.handle).state is JobState.RUNNING

    def test_resumed_run_has_no_process_of_the_last_attempt(self, launcher: Any) -> None:
        """The run is resumed while the guard of its killed supervisor terminates what ignores SIGTERM."""
        run = self.start(launcher, job_of(SURVIVORS["ignoring SIGTERM"], grace=1))
        wait_until(lambda: is_ready(run))
        previous = set(processes_of(run))
        kill_supervisor(run)
        launcher.restart(run)
        wait_until(lambda: is_ready(run, 1))
        assert not previous & set(processes_of(run))
        assert launcher.status(run.handle).state is JobState.RUNNING

    def test_killed_guard_is_replaced(self, launcher: Any) -> None:
        run = self.start(launcher, job_of(SURVIVORS["in its own session"], grace=1))
        wait_until(lambda: is_ready(run))
        guard = guard_pid(run)
        assert guard
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: guard_pid(run) not in (guard, None))
        assert launcher.status(run.handle).state is JobState.RUNNING
        kill_supervisor(run)
        assert eventually(lambda: not processes_of(run), 15)

    @pytest.mark.parametrize("command", ["stop", "resume"])
    def test_leftovers_of_a_killed_supervisor_are_stopped(self, launcher: Any, command: str, tmp_path: Path) -> None:
        script = with_attempt_lock(tmp_path, f"if test $STOKER_ATTEMPT = 1; then exit 0; fi; trap '' TERM; {DEAF}")
        run = self.start(launcher, job_of(script, grace=1))
        wait_until(lambda: is_ready(run) and len(processes_of(run)) >= 3)
        kill_supervisor(run)
        if command == "stop":
            launcher.stop(run.handle)
        else:
            launcher.restart(run)
            wait_until(lambda: launcher.status(run.handle).state.is_final)
        expected = JobState.STOPPED if command == "stop" else JobState.SUCCEEDED
        assert launcher.status(run.handle).state is expected, launcher.status(run.handle).message
        assert OVERLAP not in self.text(launcher, run)
        assert processes_of(run) == []

    def test_retry_starts_after_all_processes_of_the_attempt_are_gone(self, launcher: Any, tmp_path: Path) -> None:
        leave_behind = DEAF.partition("echo ready")[0] + "(trap '' TERM; sleep 1000 &); sleep 0.5; kill -9 $$"
        script = with_attempt_lock(tmp_path, f"test $STOKER_ATTEMPT = 2 && exit 0; {leave_behind}")
        run, status = self.run_to_end(launcher, job_of(script, retries=3, grace=1))
        assert [attempt.code for attempt in status.attempts] == [-9, -9, 0]
        assert OVERLAP not in self.text(launcher, run)

    def test_a_run_has_one_supervisor(self, launcher: Any) -> None:
        run = self.start(launcher, job_of("echo ready; while :; do sleep 0.1; done"))
        wait_until(lambda: is_ready(run))
        pid, status = supervisor_pid(run), run.read_status()
        argv = [sys.executable, "-P", "-m", "stoker.launchers.supervise.supervisor", str(run.folder)]
        second = subprocess.run(argv, stderr=subprocess.PIPE, text=True, check=True)  # waits for the daemon's stderr
        assert str(run.folder) in second.stderr
        assert (supervisor_pid(run), run.read_status()) == (pid, status)

    def test_log_has_the_bytes_that_the_slot_wrote(self, launcher: Any, tmp_path: Path) -> None:
        (tmp_path / "write.py").write_text(write_program(tmp_path / "copy"))
        job = job_of(f"exec {sys.executable} write.py")
        (tmp_path / "go").touch()
        run, status = self.run_to_end(launcher, job)
        assert status.state is JobState.SUCCEEDED, status.message
        assert run.log_path(Slot("worker", 0), 0).read_bytes() == (tmp_path / "copy").read_bytes()

    def test_log_of_a_retry_has_the_bytes_that_the_slot_wrote(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, job_of("test $STOKER_ATTEMPT = 1 || kill -9 $$; echo ran", retries=1))
        assert len(status.attempts) == 2
        assert run.log_path(Slot("worker", 0), 1).read_bytes() == b"ran\n"

    @pytest.mark.parametrize("exit_code", [0, 7])
    def test_full_disk_of_the_run_folder_does_not_stop_the_job(
        self, launcher: Any, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job succeeds after the disk has space again, or fails on the full disk, and its exit code is known."""
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            monkeypatch.setenv("STOKER_HOME", str(disk))
            script = f"while ! test -e {tmp_path}/go; do sleep 0.05; done; test $STOKER_INDEX = 1 && exit 0\n"
            # Long enough for the supervisor to see that the other worker has exited, and to fail to record it.
            script += f"sleep 1; {f'exit {exit_code}' if exit_code else f'rm {disk}/all'}"
            run = self.start(launcher, job_of(script, topology="tf-mirrored", workers=2))
            self.started.clear()  # its folder is unmounted before the runs of a test are stopped
            wait_until((run.folder / "packages.json").exists)  # the last file of the start
            with suppress(OSError):
                (disk / "all").write_bytes(bytes(1 << 20))
            assert launcher.status(run.handle).state is JobState.RUNNING
            (tmp_path / "go").touch()
            wait_until(lambda: supervisor_pid(run) is None)
            (disk / "all").unlink(missing_ok=True)
            status = launcher.status(run.handle)
            assert status.state is (JobState.FAILED if exit_code else JobState.SUCCEEDED), status.message
            assert [attempt.code for attempt in status.attempts] == [exit_code]
