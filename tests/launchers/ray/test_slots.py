"""Slots on Ray and the connection to their driver, with fake clusters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stoker.core.spec import to_json
from stoker.errors import MissingError, UnavailableError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobState, JobStatus
from stoker.jobs.topology import Command, Slot
from stoker.launchers.ray import connection, slots
from stoker.launchers.ray.connection import DriverLog, LineQueue
from stoker.launchers.ray.launcher import RayLauncher
from stoker.launchers.ray.plan import RayPlan
from stoker.launchers.ray.slots import RayAttempt, RayBackend, RaySlot
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotState, Unreachable
from tests.support.waiting import wait_until

WORKER = Slot("worker", 0)
BUSY_CLUSTER = {"nodes": [{"CPU": 2.0}], "free": {"CPU": 0.5}}
BUSY_REASON = "Ray has not placed 1 × (1 CPU): resources are in use by other jobs (needs 1 CPU, 0.5 CPU of 2 CPU free)"


def test_folder_of_a_killed_ray_is_removed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is removed; the folder is in RAY_TMPDIR if that is usable and short enough."""
    run = RunFolder(workspace)
    connection.remove_ray_folder(run)
    for where, parent in (("", "/tmp"), ("/dev/shm", "/dev/shm"), (f"/tmp{'/' * 90}", "/tmp"), ("/none", "/tmp")):
        monkeypatch.setenv("RAY_TMPDIR", where)
        folder = Path(connection.make_ray_folder(run))
        assert str(folder.parent) == parent
        assert len(str(folder)) + connection.RAY_SOCKET_SUFFIX <= connection.MAX_SOCKET_PATH
        (folder / "session_x").mkdir()
        connection.remove_ray_folder(run)
        connection.remove_ray_folder(run)
        assert not folder.exists()
        assert folder.parent.exists()


def take_all(lines: LineQueue) -> list[str | None]:
    """Remove and return what is in a queue."""
    return [lines.get() for _ in range(lines.qsize())]


def test_log_over_broken_connections_has_every_line_once() -> None:
    text = "".join(f"line {number}\n" for number in range(50))

    class Breaking:
        """A cluster whose connections break, each a little later than the previous one, anywhere in a line."""

        reads = 0

        def state(self, name: str) -> tuple[bool, str]:
            return self.reads >= 4, "first line\nlast line"

        async def tail(self, name: str) -> AsyncIterator[str]:
            self.reads += 1
            for at in range(0, len(text) if self.reads > 4 else 90 * self.reads, 7):
                yield text[at : at + 7]
            if self.reads <= 4:
                raise RuntimeError("connection lost")

    lines = LineQueue()
    log = DriverLog(Breaking(), "job", 5)  # type: ignore[arg-type]
    asyncio.run(log.follow(lines))
    assert take_all(lines) == [*text.splitlines(), None]
    assert log.exit_reason.endswith(": last line")


def test_silent_connection_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_S", 0.01)

    class Silent:
        reads = 0

        def state(self, name: str) -> tuple[bool, str]:
            return self.reads > 0, ""

        async def tail(self, name: str) -> AsyncIterator[str]:
            self.reads += 1
            yield "one\n"
            if self.reads == 1:
                await asyncio.sleep(60)
            yield "two\n"

    lines = LineQueue()
    asyncio.run(DriverLog(Silent(), "job", 0.1).follow(lines))  # type: ignore[arg-type]
    assert take_all(lines) == ["one", "two", None]


def test_log_of_a_driver_on_a_dead_node_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_S", 0.01)

    class Gone:
        def state(self, name: str) -> tuple[bool, str]:
            return True, "its node died"

        async def tail(self, name: str) -> AsyncIterator[str]:
            raise RuntimeError("no such node")
            yield ""

    lines = LineQueue()
    log = DriverLog(Gone(), "job", 5)  # type: ignore[arg-type]
    asyncio.run(log.follow(lines))
    assert take_all(lines) == [None]
    assert log.exit_reason.endswith(": its node died")


def test_output_of_slots_is_not_the_reason_why_a_driver_exited() -> None:
    class Killed:
        def state(self, name: str) -> tuple[bool, str]:
            logs = connection.FRAME_PREFIX + '{"n": 1, "slot": "worker/0", "data": "a line"}'
            return True, f"Job entrypoint command failed with exit code -9, last available logs (truncated):\n{logs}\n"

        async def tail(self, name: str) -> AsyncIterator[str]:
            yield ""

    log = DriverLog(Killed(), "job", 5)  # type: ignore[arg-type]
    asyncio.run(log.follow(LineQueue()))
    assert log.exit_reason.endswith("exited early: Job entrypoint command failed with exit code -9")


class FakeCluster:
    """A cluster that records calls; uploads can be slow or fail."""

    calls: ClassVar[list[str]] = []
    log: ClassVar[list[str]] = []
    is_failing = False
    submit_s = 0.0

    def __init__(self, address: str) -> None:
        self.address = address
        self.calls.clear()

    def submit(self, *args: object) -> None:
        time.sleep(self.submit_s)
        self.calls.append("submit")
        if self.is_failing:
            raise UnavailableError("rejected the job", where=self.address)

    def put(self, key: str, value: dict[str, Any]) -> None:
        call = "request" if key.endswith("-request") else "acknowledge" if "acknowledged" in value else "heartbeat"
        self.calls.append(call)

    def state(self, name: str) -> tuple[bool, str]:
        return False, ""

    async def tail(self, name: str) -> AsyncIterator[str]:
        for line in self.log:
            yield line
        await asyncio.sleep(60)


@pytest.fixture
def fake_cluster(monkeypatch: pytest.MonkeyPatch) -> type[FakeCluster]:
    monkeypatch.setattr(connection, "RayCluster", FakeCluster)
    monkeypatch.setattr(FakeCluster, "log", [])
    monkeypatch.setattr(FakeCluster, "calls", [])
    return FakeCluster


def make_attempt(workspace: Path, address: str | None = "http://far") -> RayAttempt:
    """Return an attempt of a run with one worker, on a remote cluster if there is an address."""
    for name in ("run", "run/logs"):
        (workspace / name).mkdir()
    command = Command(("true",), {})
    plan = RayPlan(
        slots={"worker/0": command},
        hosts={"worker/0": "http://far"},
        address=address,
        bundle={"CPU": 1.0},
        strategy="PACK",
        source=str(workspace),
        grace_s=1,
        lost_after_s=0.5,
    )
    return RayAttempt(plan, RunFolder(workspace / "run"), 0)


def run_attempt(attempt: RayAttempt) -> SlotState:
    """Run an attempt to its end and return the state of its worker."""
    attempt.start()
    attempt.join(60)
    return attempt.states["worker/0"]


def to_log(*frames: dict[str, Any]) -> list[str]:
    """Return lines of the driver's log."""
    return [f"{connection.FRAME_PREFIX}{json.dumps({'n': n, **frame})}\n" for n, frame in enumerate(frames, 1)]


def read_worker_log(workspace: Path) -> bytes:
    return RunFolder(workspace / "run").log_path(Slot("worker", 0), 0).read_bytes()


def test_upload_may_take_longer_than_lost_after(
    workspace: Path, fake_cluster: type[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cluster, "submit_s", 1.0)
    fake_cluster.log += to_log({"alive": True}, {"slot": "worker/0", "code": 0}, {"finished": True})
    assert run_attempt(make_attempt(workspace)) == Exited(0)
    # Nothing is stored before the driver is running, and nothing after the connection is closed.
    assert (fake_cluster.calls[0], fake_cluster.calls[-1]) == ("submit", "acknowledge")
    count = len(fake_cluster.calls)
    time.sleep(0.3)
    assert len(fake_cluster.calls) == count
    assert (workspace / "run" / "submissions").read_text() == ""


def test_rejected_job_leaves_no_secret_in_the_store(
    workspace: Path, fake_cluster: type[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cluster, "is_failing", True)
    assert run_attempt(make_attempt(workspace)) == Exited(255, "http://far: rejected the job", is_lost=True)
    assert fake_cluster.calls == ["submit"]


def test_request_is_sent_once_the_driver_is_running(
    workspace: Path, fake_cluster: type[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that does not report its end may keep its slots running until it misses our heartbeats."""
    monkeypatch.setattr(slots, "EXIT_TIMEOUT_S", 0.2)
    fake_cluster.log += to_log({"alive": True})
    attempt = make_attempt(workspace)
    attempt.start()
    wait_until(lambda: fake_cluster.calls.count("heartbeat") >= 2)
    assert fake_cluster.calls[:3] == ["submit", "request", "heartbeat"]
    assert fake_cluster.calls.count("request") == 1
    attempt.stop(1)
    attempt.stop(2)
    attempt.join(60)
    state = attempt.states["worker/0"]
    assert isinstance(state, Unreachable)
    assert state.is_lost
    assert state.reason == "the Ray driver did not report its end in time"
    assert state.gone_by is not None
    assert state.gone_by > time.monotonic() + 0.5


def test_stop_before_the_upload(workspace: Path, fake_cluster: type[FakeCluster]) -> None:
    attempt = make_attempt(workspace)
    attempt.stop(1)
    assert run_attempt(attempt) == Exited(-signal.SIGTERM)
    assert fake_cluster.calls == []


def test_bug_of_the_connection_is_reported_as_such(
    workspace: Path,
    fake_cluster: type[FakeCluster],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fake_cluster, "submit", None)
    state = run_attempt(make_attempt(workspace))
    assert isinstance(state, Exited)
    assert state.is_lost
    assert "the connection to Ray failed: TypeError: " in state.reason
    assert "Traceback" in capsys.readouterr().out


def test_slots_are_pending_until_placement_is_reported(workspace: Path, fake_cluster: type[FakeCluster]) -> None:
    attempt = make_attempt(workspace)
    assert attempt.states["worker/0"] == Running(is_placed=False)
    for frame, state in (
        ({"capacity": BUSY_CLUSTER}, Running(is_placed=False, pending_reason=BUSY_REASON)),
        ({"capacity": None}, Running()),
        ({"capacity": BUSY_CLUSTER}, Running(is_placed=False, pending_reason=BUSY_REASON)),
        ({"addresses": {"worker/0": "10.0.0.1"}}, Running()),
    ):
        fake_cluster.log[:] = to_log({"alive": True}, frame)
        for line in fake_cluster.log:
            attempt._last_frame = 0
            attempt._process_line(line)
        assert attempt.states["worker/0"] == state


def test_job_is_rejected_by_a_small_cluster_that_cannot_grow(workspace: Path) -> None:
    """One that has an address may have an autoscaler: there, the job waits."""
    for address, state in (("http://far", Running), (None, Exited)):
        folder = workspace / str(address is None)
        folder.mkdir()
        attempt = make_attempt(folder, address)
        (line,) = to_log({"capacity": {"nodes": [{"CPU": 0.5}], "free": {"CPU": 0.5}}})
        attempt._process_line(line)
        assert isinstance(attempt.states["worker/0"], state)
        assert bool(attempt._desired_state()["stop_level"]) is (address is None)
    assert attempt.states["worker/0"] == Exited(
        MissingError.exit_code,
        "Ray cannot place 1 × (1 CPU): no node is large enough for one worker (needs 1 CPU, 0.5 CPU of 0.5 CPU free)",
    )


def test_log_is_a_copy_of_the_output_and_remarks_are_not_in_it(
    workspace: Path, fake_cluster: type[FakeCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    output = {"slot": "worker/0", "data": b"\xff a line without an end".decode("latin-1")}
    lost = {"slot": "worker/0", "code": 255, "error": "its Ray node was lost"}
    fake_cluster.log += to_log({"alive": True}, {"capacity": BUSY_CLUSTER}, output, lost, {"finished": True})
    assert run_attempt(make_attempt(workspace)) == Exited(255, "its Ray node was lost", is_lost=True)
    assert read_worker_log(workspace) == b"\xff a line without an end"
    assert BUSY_REASON in capsys.readouterr().out


def seconds_left(state: SlotState) -> float:
    """Return for how long a lost slot may be running."""
    assert isinstance(state, Unreachable)
    assert state.is_lost
    assert state.gone_by is not None
    return state.gone_by - time.monotonic()


def test_lost_slot_counts_as_running_until_it_is_surely_gone(workspace: Path, fake_cluster: type[FakeCluster]) -> None:
    """Also if the driver has reported its end; not if the slot was stopped before the loss was reported."""
    for lease_s, folder in ((0, "actor"), (100, "node")):
        (workspace / folder).mkdir()
        lost = {"slot": "worker/0", "code": 255, "error": "lost", "lease_s": lease_s}
        fake_cluster.log[:] = to_log({"alive": True}, lost, {"finished": True})
        attempt = make_attempt(workspace / folder)
        assert seconds_left(run_attempt(attempt)) > lease_s + 1
    (workspace / "here").mkdir()
    attempt = make_attempt(workspace / "here", address=None)  # its processes are stopped with the attempt
    (line,) = to_log({**lost, "lease_s": attempt._make_request()["lost_after_s"]})
    attempt._has_begun = True
    attempt._process_line(line)
    assert attempt.states["worker/0"] == Exited(255, "lost", is_lost=True)


def test_slot_that_has_exited_can_be_started_again(workspace: Path) -> None:
    """Not one that was lost, nor after the driver has ended, because nobody would start it."""
    attempt = make_attempt(workspace)
    backend = RayBackend.__new__(RayBackend)
    backend._attempt, backend._handles = (
        attempt,
        {WORKER: RaySlot(attempt, "worker/0", is_first=True, reads_local_sources=False)},
    )
    assert not backend.can_restart(WORKER)
    attempt._process_line(*to_log({"slot": "worker/0", "code": 7}))
    assert backend.can_restart(WORKER)
    handle = backend.restart_slot(WORKER)
    assert handle.poll() == Running()
    assert attempt._desired_state()["restarts"] == {"worker/0": 1}
    attempt._last_frame = 0
    attempt._process_line(*to_log({"slot": "worker/0", "code": 255, "error": "its Ray node was lost"}))
    assert not backend.can_restart(WORKER)
    attempt._lose_all("the driver has ended")
    before = handle.poll()
    backend.restart_slot(WORKER)
    assert handle.poll() == before


def test_slots_of_a_failed_driver_count_as_running(workspace: Path, fake_cluster: type[FakeCluster]) -> None:
    fake_cluster.log += to_log({"alive": True}, {"failed": "out of memory"})
    state = run_attempt(make_attempt(workspace))
    assert seconds_left(state) > 1
    assert isinstance(state, Unreachable)
    assert "out of memory" in state.reason


def test_slots_count_as_running_when_their_output_cannot_be_written(
    workspace: Path, fake_cluster: type[FakeCluster], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_cluster.log += to_log({"alive": True}, {"slot": "worker/0", "data": "text"})
    attempt = make_attempt(workspace)
    attempt._logs["worker/0"] = os.open("/dev/full", os.O_WRONLY)
    state = run_attempt(attempt)
    assert seconds_left(state) > 1
    assert "No space left" in capsys.readouterr().out


class StuckCluster(FakeCluster):
    """A cluster whose jobs do not stop."""

    def stop(self, name: str) -> None:
        self.calls.append(f"stop {name}")


@pytest.fixture
def stuck_run(workspace: Path, fake_cluster: type[FakeCluster], monkeypatch: pytest.MonkeyPatch) -> RayAttempt:
    """An attempt of a run with a driver of an earlier attempt, which cannot be stopped."""
    monkeypatch.setattr(connection, "RayCluster", StuckCluster)
    monkeypatch.setattr(connection, "EXIT_TIMEOUT_S", 0.1)
    attempt = make_attempt(workspace)
    (workspace / "run" / "submissions").write_text("earlier\n")
    return attempt


def test_attempt_does_not_start_beside_a_driver_that_cannot_be_stopped(stuck_run: RayAttempt) -> None:
    state = run_attempt(stuck_run)
    assert isinstance(state, Exited)  # nothing of this attempt was started
    assert state.is_lost
    assert "earlier" in state.reason
    assert FakeCluster.calls == ["stop earlier"]


def test_stop_reports_a_driver_that_cannot_be_stopped(stuck_run: RayAttempt) -> None:
    run = stuck_run._run
    run.write("plan.json", to_json(stuck_run._plan))
    run.write("job.yaml", b"{name: a, topology: single, grace: 1s, program: {command: ['true']}}")
    run.write_status(JobStatus(state=JobState.FAILED))
    with pytest.raises(UnavailableError, match="earlier") as caught:
        RayLauncher().stop(f"ray://{run.folder}")
    assert caught.value.exit_code == 5
    assert (run.folder / "submissions").read_text() == "earlier\n"  # for the next try


def test_end_of_an_attempt_is_not_assumed(
    workspace: Path, fake_cluster: type[FakeCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_uploading, upload = threading.Event(), threading.Event()
    monkeypatch.setattr(fake_cluster, "submit", lambda *_: (is_uploading.set(), upload.wait(60)))
    monkeypatch.setattr(slots, "CLOSE_TIMEOUT_S", 0.1)
    attempt = make_attempt(workspace)
    attempt._run.write("plan.json", to_json(attempt._plan))
    backend = RayBackend(attempt._run)
    backend.start(0)
    assert is_uploading.wait(60)
    with pytest.raises(UnavailableError, match=r"not closed within 0\.1 s"):
        backend.close(0)
    monkeypatch.setattr(slots, "CLOSE_TIMEOUT_S", 60.0)
    upload.set()
    fake_cluster.log += to_log({"alive": True}, {"finished": True})
    backend.close(0)


def test_daemon_files_are_complete(tmp_path: Path) -> None:
    """The slot daemon is imported from them alone, by an interpreter without stoker."""
    for name, text in slots.read_daemon_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import stoker.remote.slot_daemon"
    subprocess.run([sys.executable, "-IS", "-c", program], check=True)
