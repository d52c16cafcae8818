"""Contract suite of launchers: every launcher passes it in a subclass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.core.spec import decode
from stoker.errors import InputError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.retry_policy import INVALID_INPUT, not_retried
from stoker.jobs.run_files import find_run_file
from stoker.jobs.run_folder import RunFolder, create_run, find_run
from stoker.jobs.spec import JobSpec
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import Slot, list_slots
from tests.support.waiting import wait_until

# In its own session and ignoring SIGTERM: what a kill of the process group would miss.
DEAF = "setsid bash -c 'trap \"\" TERM HUP; while :; do sleep 0.2; done' & echo ready; while :; do sleep 0.1; done"


def job_of(command: str | None = None, **keys: Any) -> JobSpec:
    """Return a small job that runs a shell command, with other keys of the job file."""
    base: dict[str, Any] = {"name": "small", "topology": "single", "profile": {"every": 0}, "retries": 0, "grace": 5}
    if command is not None:
        base["program"] = {"command": ["bash", "-c", command]}
    return decode({**base, **keys}, JobSpec)


@contextmanager
def launched(job: Path, on: str) -> Iterator[tuple[RunFolder, subprocess.Popen[str]]]:
    """Run `stoker job run` in a process namespace of its own; killing it kills everything that it started."""
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*namespace, sys.executable, "-m", "stoker", "job", "run", str(job), "--on", on]
    with (
        open(job.parent / "output", "wb") as output,
        subprocess.Popen(argv, stdout=output, stderr=output, text=True) as process,
    ):
        try:
            runs = Path(os.environ["STOKER_HOME"], "runs")
            wait_until(lambda: any(runs.glob("*/handle")) or process.poll() is not None)
            assert process.poll() is None, (job.parent / "output").read_text()
            yield find_run(None), process
        finally:
            process.kill()


def is_ready(run: RunFolder, attempt: int = 0) -> bool:
    log = run.log_path(Slot("worker", 0), attempt)
    return log.exists() and "ready" in log.read_text()


class LauncherTests:
    """Helpers for tests of a launcher; stops what a test has started."""

    ON: ClassVar[str]
    TOPOLOGY: ClassVar[str] = "single"
    FAILED_SLOT: ClassVar[str] = "worker/0"
    """How a diagnosis names the slot that failed."""

    def job(self, command: str | None = None, **keys: Any) -> JobSpec:
        return job_of(command, **{"topology": self.TOPOLOGY, **keys})

    @pytest.fixture
    def launcher(self) -> Any:
        return LAUNCHERS.get(self.ON)()

    @pytest.fixture(autouse=True)
    def _stop_runs(self, tmp_path: Path, stoker_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        self.started: list[tuple[Any, RunFolder]] = []
        yield
        for launcher, run in self.started:
            launcher.stop(run.handle)
            paths = (path for path in run.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
            names = [str(path.relative_to(run.folder)) for path in paths]
            assert [name for name in names if find_run_file(name) is None] == []

    def start(self, launcher: Any, job: JobSpec) -> RunFolder:
        rendered = launcher.render(job)
        run = create_run(job, rendered)
        launcher.start(rendered, run)
        self.started.append((launcher, run))
        return run

    def run_to_end(self, launcher: Any, job: JobSpec, timeout_s: float = 60) -> tuple[RunFolder, JobStatus]:
        run = self.start(launcher, job)
        wait_until(lambda: launcher.status(run.handle).state.is_final, timeout_s)
        return run, launcher.status(run.handle)

    def text(self, launcher: Any, run: RunFolder, slot: Slot | None = None) -> list[str]:
        return [line.text for line in launcher.logs(run.handle, slot, follow=False)]


class LauncherSuite(LauncherTests):
    """The contract; subclasses set `ON` to the name of the launcher."""

    def test_job_succeeds(self, launcher: Any) -> None:
        script = "echo out; echo err >&2; echo $STOKER_JOB $STOKER_SLOT $STOKER_ATTEMPT"
        run, status = self.run_to_end(launcher, self.job(script))
        assert (status.state, status.attempt) == (JobState.SUCCEEDED, 0)
        assert [(slot.slot, slot.code) for slot in status.slots] == [(str(slot), 0) for slot in list_slots(run.job)]
        assert sorted(self.text(launcher, run)) == ["err", "out", "small worker/0 0"]

    def test_slot_environment(self, launcher: Any) -> None:
        keys = {
            "data": {"sampling": "join", "via": "http://cache:3128", "cache": {"dir": "/c", "size": "1Gi"}},
            "checkpoint": {"dir": "s3://bucket/x", "keep": 7},
            "env": {"MINE": "a b $HOME 'q'"},
        }
        run, _ = self.run_to_end(launcher, self.job("env", **keys))
        env = dict(line.split("=", 1) for line in self.text(launcher, run) if "=" in line)
        expected = {
            "STOKER_JOB": "small",
            "STOKER_RUN": run.id,
            "STOKER_ATTEMPT": "0",
            "STOKER_SLOT": "worker/0",
            "STOKER_ROLE": "worker",
            "STOKER_INDEX": "0",
            "STOKER_SAMPLING": "join",
            "STOKER_DATA_VIA": "http://cache:3128",
            "STOKER_CACHE_DIR": "/c",
            "STOKER_CACHE_SIZE": str(2**30),
            "STOKER_CHECKPOINT_DIR": "s3://bucket/x",
            "STOKER_CHECKPOINT_KEEP": "7",
            "STOKER_GRACE_S": "5",
            "PYTHONUNBUFFERED": "1",
            "MINE": "a b $HOME 'q'",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert int(env["OMP_NUM_THREADS"]) >= 1

    def test_failure_names_slot_exit_code_error_and_log(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, self.job("echo 'ValueError: too small' >&2; exit 7"))
        assert status.state is JobState.FAILED
        assert status.message.startswith(f"{self.FAILED_SLOT} ")
        assert re.search(r"\b7: ValueError: too small;", status.message)
        assert [attempt.code for attempt in status.attempts] == [7]
        assert status.message.endswith(f"log: {run.log_path(Slot('worker', 0), 0)}")

    def test_killed_gang_is_retried(self, launcher: Any, tmp_path: Path) -> None:
        mark = tmp_path / "second"
        script = f"echo attempt $STOKER_ATTEMPT; test -e {mark} && exit 0; touch {mark}; kill -9 $$"
        run, status = self.run_to_end(launcher, self.job(script, retries=2))
        assert status.state is JobState.SUCCEEDED
        assert [(attempt.number, attempt.code) for attempt in status.attempts] == [(0, -9), (1, 0)]
        lines = self.text(launcher, run)
        assert [line for line in lines if line.startswith("attempt")] == ["attempt 0", "attempt 1"]
        (reason,) = [line for line in lines if line.startswith("--- attempt 1:")]
        assert f"{self.FAILED_SLOT} was killed by SIGKILL" in reason

    def test_bad_input_is_not_retried(self, launcher: Any) -> None:
        run, status = self.run_to_end(launcher, self.job("exit 2", retries=3))
        assert (status.state, len(status.attempts)) == (JobState.FAILED, 1)
        assert f"; {not_retried(INVALID_INPUT)}; " in status.message
        assert status.message.endswith(f"log: {run.log_path(Slot('worker', 0), 0)}")

    def test_stop_waits_for_a_last_checkpoint(self, launcher: Any, tmp_path: Path) -> None:
        script = f"trap 'echo saved > {tmp_path}/saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
        run = self.start(launcher, self.job(script))
        wait_until(lambda: "ready" in self.text(launcher, run))
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert (tmp_path / "saved").read_text() == "saved\n"
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED

    def test_logs_follow_to_the_end(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("for i in 1 2 3; do echo line $i; sleep 0.3; done; printf unfinished"))
        lines = [line.text for line in launcher.logs(run.handle, None, follow=True)]
        assert lines == ["line 1", "line 2", "line 3", "unfinished"]
        assert launcher.status(run.handle).state is JobState.SUCCEEDED

    def test_unsupported_topology_is_rejected_by_render(self, launcher: Any) -> None:
        with pytest.raises(InputError) as caught:
            launcher.render(self.job("true", topology="no-such-thing"))
        assert "topology" in str(caught.value)
