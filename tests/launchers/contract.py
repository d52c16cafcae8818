"""What every launcher promises, as tests: a launcher is done when its subclass of this suite is green."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.core.spec import decode
from stoker.errors import InputError
from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_folder import Run, create, find
from stoker.jobs.spec import Job
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import Slot, slots_of
from tests.support.waiting import eventually

# In a session of its own, deaf to TERM: all that a process group would miss.
DEAF = "setsid bash -c 'trap \"\" TERM HUP; while :; do sleep 0.2; done' & echo ready; while :; do sleep 0.1; done"


def job_of(command: str | None = None, **keys: Any) -> Job:
    """A small job: a shell command, or what the keys say."""
    base: dict[str, Any] = {"name": "small", "topology": "single", "profile": {"every": 0}, "retries": 0, "grace": 5}
    if command is not None:
        base["program"] = {"command": ["bash", "-c", command]}
    return decode({**base, **keys}, Job)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    assert eventually(condition, seconds), "waited too long"


@contextmanager
def launched(job: Path, on: str) -> Iterator[tuple[Run, subprocess.Popen[str]]]:
    """`stoker job run` on a machine of its own, as far as processes go."""
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [*own, sys.executable, "-m", "stoker", "job", "run", str(job), "--on", on]
    with (
        open(job.parent / "said", "wb") as said,
        subprocess.Popen(argv, stdout=said, stderr=said, text=True) as process,
    ):
        try:
            runs = Path(os.environ["STOKER_HOME"], "runs")
            until(lambda: any(runs.glob("*/handle")) or process.poll() is not None, 60)
            assert process.poll() is None, (job.parent / "said").read_text()
            yield find(None), process
        finally:
            process.kill()


def is_ready(run: Run, attempt: int = 0) -> bool:
    log = run.log(Slot("worker", 0), attempt)
    return log.exists() and "ready" in log.read_text()


class Launching:
    """What tests of jobs on a launcher need; what was started is ended behind them."""

    ON: ClassVar[str]
    TOPOLOGY: ClassVar[str] = "single"
    WHO: ClassVar[str] = "worker/0"
    """How a failure names the one that failed."""

    def job(self, command: str | None = None, **keys: Any) -> Job:
        return job_of(command, **{"topology": self.TOPOLOGY, **keys})

    @pytest.fixture
    def launcher(self) -> Any:
        return LAUNCHERS.get(self.ON)()

    @pytest.fixture(autouse=True)
    def _home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("STOKER_HOME", str(tmp_path / "stoker"))
        monkeypatch.chdir(tmp_path)
        self.started: list[tuple[Any, Run]] = []
        yield
        for launcher, run in self.started:
            launcher.stop(run.handle)

    def start(self, launcher: Any, job: Job) -> Run:
        rendered = launcher.render(job)
        run = create(job, rendered)
        launcher.start(rendered, run)
        self.started.append((launcher, run))
        return run

    def end(self, launcher: Any, job: Job, seconds: float = 60) -> tuple[Run, JobStatus]:
        run = self.start(launcher, job)
        until(lambda: launcher.status(run.handle).state.is_final, seconds)
        return run, launcher.status(run.handle)

    def text(self, launcher: Any, run: Run, slot: Slot | None = None) -> list[str]:
        return [line.text for line in launcher.logs(run.handle, slot, follow=False)]


class LauncherSuite(Launching):
    """Subclass it, and name the launcher."""

    def test_a_job_that_succeeds(self, launcher: Any) -> None:
        script = "echo out; echo err >&2; echo $STOKER_JOB $STOKER_SLOT $STOKER_ATTEMPT"
        run, status = self.end(launcher, self.job(script))
        assert (status.state, status.attempt) == (JobState.SUCCEEDED, 0)
        assert [(one.slot, one.code) for one in status.slots] == [(str(slot), 0) for slot in slots_of(run.job)]
        assert sorted(self.text(launcher, run)) == ["err", "out", "small worker/0 0"]

    def test_the_environment_of_the_contract(self, launcher: Any) -> None:
        keys = {
            "data": {"sampling": "join", "via": "http://cache:3128", "cache": {"dir": "/c", "size": "1Gi"}},
            "checkpoint": {"dir": "s3://bucket/x", "keep": 7},
            "env": {"MINE": "a b $HOME 'q'"},
        }
        run, _ = self.end(launcher, self.job("env", **keys))
        found = dict(line.split("=", 1) for line in self.text(launcher, run) if "=" in line)
        wanted = {
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
        assert {name: found.get(name) for name in wanted} == wanted
        assert int(found["OMP_NUM_THREADS"]) >= 1

    def test_a_failure_names_slot_cause_and_log(self, launcher: Any) -> None:
        run, status = self.end(launcher, self.job("echo 'ValueError: too small' >&2; exit 7"))
        assert status.state is JobState.FAILED
        assert status.message.startswith(f"{self.WHO} ended with exit code 7: ValueError: too small; its log: ")
        assert [attempt.code for attempt in status.attempts] == [7]
        assert str(run.log(Slot("worker", 0), 0)) in status.message

    def test_a_killed_gang_is_tried_again(self, launcher: Any, tmp_path: Path) -> None:
        mark = tmp_path / "second"
        script = f"echo attempt $STOKER_ATTEMPT; test -e {mark} && exit 0; touch {mark}; kill -9 $$"
        run, status = self.end(launcher, self.job(script, retries=2))
        assert status.state is JobState.SUCCEEDED
        assert [(attempt.number, attempt.code) for attempt in status.attempts] == [(0, -9), (1, 0)]
        said = self.text(launcher, run)
        assert [line for line in said if line.startswith("attempt")] == ["attempt 0", "attempt 1"]
        assert any(line.startswith(f"--- attempt 1, because {self.WHO} was killed by SIGKILL") for line in said)

    def test_bad_input_is_not_tried_again(self, launcher: Any) -> None:
        _, status = self.end(launcher, self.job("exit 2", retries=3))
        assert (status.state, len(status.attempts)) == (JobState.FAILED, 1)
        assert "the same input would fail again" in status.message

    def test_stop_gives_time_for_a_checkpoint(self, launcher: Any, tmp_path: Path) -> None:
        script = f"trap 'echo saved > {tmp_path}/saved; exit 143' TERM; echo ready; while :; do sleep 0.05; done"
        run = self.start(launcher, self.job(script))
        until(lambda: "ready" in self.text(launcher, run))
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED
        assert (tmp_path / "saved").read_text() == "saved\n"
        launcher.stop(run.handle)
        assert launcher.status(run.handle).state is JobState.STOPPED

    def test_logs_are_followed_to_the_end(self, launcher: Any) -> None:
        run = self.start(launcher, self.job("for i in 1 2 3; do echo line $i; sleep 0.3; done; printf unfinished"))
        lines = [line.text for line in launcher.logs(run.handle, None, follow=True)]
        assert lines == ["line 1", "line 2", "line 3", "unfinished"]
        assert launcher.status(run.handle).state is JobState.SUCCEEDED

    def test_what_it_cannot_do_is_refused_at_once(self, launcher: Any) -> None:
        with pytest.raises(InputError) as caught:
            launcher.render(self.job("true", topology="no-such-thing"))
        assert "topology" in str(caught.value)
