"""The supervisor with slots that follow a script: retries, unreachable slots, leases, restarts of single slots."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.jobs.launcher import LAUNCHERS
from stoker.jobs.run_files import STOP_REQUEST_FILE
from stoker.jobs.run_folder import STATUS_FILE, RunFolder, create_run
from stoker.jobs.status import Attempt, JobState, JobStatus, SlotStatus
from stoker.jobs.topology import Slot
from stoker.launchers.run_logs import read_run_logs
from stoker.launchers.supervise.attempt import SETTLE_S
from stoker.launchers.supervise.slot_handle import Exited, Running, SlotState, Unreachable
from stoker.launchers.supervise.supervisor import Supervisor, supervisor_pid
from tests.launchers.contract import job_of
from tests.support.fake_slots import FakeBackend, FakeClock, FakeSlot
from tests.support.waiting import wait_until

FIRST, SECOND = Slot("worker", 0), Slot("worker", 1)
TERMINATED = Exited(-signal.SIGTERM)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[JobStatus]:
    """Every status that was written."""
    written: list[JobStatus] = []
    write = RunFolder.write_status

    def record(run: RunFolder, status: JobStatus) -> None:
        written.append(status)
        write(run, status)

    monkeypatch.setattr(RunFolder, "write_status", record)
    return written


def two_workers(**keys: Any) -> RunFolder:
    keys = {"retries": 2, "hang_after": 0, **keys}
    return create_run(job_of(program={"module": "this"}, topology="torchrun", **{"workers": 2, **keys}), {})


def supervise(run: RunFolder, backend: FakeBackend, should_stop: Callable[[], bool] = lambda: False) -> JobStatus:
    flag: Any = type("Flag", (), {"is_set": property(lambda _: should_stop())})()
    Supervisor(run, backend, flag).run()
    return run.read_status()


def by_time(*states: tuple[float, SlotState]) -> Callable[[], SlotState]:
    """A script: each state from a time on."""
    return lambda: [state for since, state in states if since <= time.monotonic()][-1]


def running(on_terminate: SlotState = TERMINATED) -> FakeSlot:
    return FakeSlot(Running(), on_terminate)


def succeeded(at: float = 0.0) -> FakeSlot:
    return FakeSlot(by_time((0, Running()), (at, Exited(0))))


def unreachable(since: float, gone_by: float | None, *, is_lost: bool = False) -> Unreachable:
    return Unreachable(since, "b: no response", gone_by, is_lost)


def test_unreachable_slot_is_not_an_exit(stoker_home: Path, clock: FakeClock, statuses: list[JobStatus]) -> None:
    away = FakeSlot(by_time((0, Running()), (10, unreachable(10, 90)), (60, Running()), (70, Exited(0))))
    backend = FakeBackend({FIRST: succeeded(70), SECOND: away})
    status = supervise(two_workers(), backend)
    assert (status.state, len(backend.started), len(status.attempts)) == (JobState.SUCCEEDED, 1, 1)
    assert [slot for _, slot in away.stops] == [False]
    messages = list(dict.fromkeys(status.message for status in statuses))
    assert messages == ["", "worker/1: b: no response"]
    seen = {status.slots[1].state for status in statuses if status.slots}
    assert seen == {JobState.RUNNING, JobState.SUCCEEDED}


def test_no_attempt_starts_before_the_lease_of_a_lost_slot_has_expired(stoker_home: Path, clock: FakeClock) -> None:
    lost = FakeSlot(by_time((0, Running()), (10, unreachable(10, 90)), (40, unreachable(10, 90, is_lost=True))))
    peer = running()
    backend = FakeBackend({FIRST: peer, SECOND: lost}, {FIRST: succeeded(), SECOND: succeeded()})
    status = supervise(two_workers(), backend)
    assert status.state is JobState.SUCCEEDED
    assert [round(at) for at in backend.started] == [0, 90]
    assert 40 <= peer.stops[0][0] < 42
    assert [(attempt.lost, attempt.is_retried) for attempt in status.attempts] == [(True, True), (False, False)]
    assert "worker/1 was lost: b: no response" in status.attempts[0].cause


def test_attempt_starts_once_a_lost_slot_has_reported_its_exit(stoker_home: Path, clock: FakeClock) -> None:
    lost = FakeSlot(by_time((0, Running()), (40, unreachable(10, 900, is_lost=True)), (70, Exited(-9))))
    backend = FakeBackend({FIRST: running(), SECOND: lost}, {FIRST: succeeded(), SECOND: succeeded()})
    assert supervise(two_workers(), backend).state is JobState.SUCCEEDED
    assert 70 <= backend.started[1] < 72


def test_lost_slot_without_a_lease_fails_the_run(stoker_home: Path, clock: FakeClock) -> None:
    run = two_workers()
    lost = FakeSlot(by_time((0, Running()), (40, unreachable(10, None, is_lost=True))))
    backend = FakeBackend({FIRST: running(), SECOND: lost})
    status = supervise(run, backend)
    assert (status.state, len(backend.started)) == (JobState.FAILED, 1)
    assert f"stoker job stop {run.id}" in status.message
    assert [(slot.state, slot.code) for slot in status.slots] == [
        (JobState.FAILED, -signal.SIGTERM),
        (JobState.LOST, None),
    ]


def test_lost_slot_stays_failed_although_its_host_has_reconnected(stoker_home: Path, clock: FakeClock) -> None:
    """It comes back between the poll that finds it lost and the diagnosis."""
    states = by_time((0, Running()), (40, unreachable(10, 90, is_lost=True)), (40 + SETTLE_S / 2, Running()))
    lost = FakeSlot(states, on_terminate=TERMINATED)
    backend = FakeBackend({FIRST: running(), SECOND: lost}, {FIRST: succeeded(), SECOND: succeeded()})
    status = supervise(two_workers(), backend)
    assert (status.state, len(backend.started)) == (JobState.SUCCEEDED, 2)
    assert status.attempts[0].lost
    assert "worker/1 was lost: b: no response" in status.attempts[0].cause


def test_slot_without_a_lease_that_is_lost_before_a_retry_fails_the_run(stoker_home: Path, clock: FakeClock) -> None:
    """Its exit was still expected when the attempt was over."""
    run = two_workers(grace=1)
    lost = unreachable(20, None, is_lost=True)
    deaf = FakeSlot(by_time((0, Running()), (100, unreachable(100, None)), (150, lost)))
    status = supervise(run, FakeBackend({FIRST: FakeSlot(Exited(1)), SECOND: deaf}), lambda: clock.now > 900)
    assert (status.state, [attempt.is_retried for attempt in status.attempts]) == (JobState.FAILED, [False])
    assert f"stoker job stop {run.id}" in status.message
    assert 150 <= clock.now < 152


def test_run_is_stopped_while_it_waits_for_a_lease(stoker_home: Path, clock: FakeClock) -> None:
    lost = FakeSlot(by_time((0, Running()), (40, unreachable(10, 900, is_lost=True))))
    backend = FakeBackend({FIRST: running(), SECOND: lost})
    status = supervise(two_workers(), backend, should_stop=lambda: clock.now > 100)
    assert (status.state, len(backend.started)) == (JobState.STOPPED, 1)
    assert clock.now < 102


def test_failure_is_final_at_once_without_retries(stoker_home: Path, clock: FakeClock) -> None:
    lost = FakeSlot(by_time((0, Running()), (40, unreachable(10, 900, is_lost=True))))
    assert supervise(two_workers(retries=0), FakeBackend({FIRST: running(), SECOND: lost})).state is JobState.FAILED
    assert clock.now < 70


def test_slot_that_ignores_sigterm_is_killed_after_the_grace_period(stoker_home: Path, clock: FakeClock) -> None:
    deaf = FakeSlot(by_time((0, Running()), (60, Exited(-9))))
    status = supervise(two_workers(grace=30), FakeBackend({FIRST: deaf, SECOND: deaf}), lambda: clock.now > 20)
    assert status.state is JobState.STOPPED
    (asked, by_force), (killed, forced) = deaf.stops[0], deaf.stops[-1]
    assert (by_force, forced) == (False, True)
    assert 30 <= killed - asked < 31


def test_slots_wait_for_a_machine(stoker_home: Path, clock: FakeClock, statuses: list[JobStatus]) -> None:
    waiting = Running(is_placed=False, pending_reason="no capacity")
    slots = [FakeSlot(by_time((0, waiting), (10, Running()), (20, Exited(0)))) for _ in range(2)]
    assert supervise(two_workers(), FakeBackend(dict(zip((FIRST, SECOND), slots, strict=True)))).ended
    states = [key for key, _ in groupby((status.state, status.message) for status in statuses)]
    assert states[1:] == [(JobState.PENDING, "no capacity"), (JobState.RUNNING, ""), (JobState.SUCCEEDED, "")]


def test_reason_of_a_retry_is_shown_between_the_attempts(stoker_home: Path, clock: FakeClock) -> None:
    run = two_workers()
    run.log_path(FIRST, 0).write_text("first\nValueError: bad\n")
    run.log_path(FIRST, 1).write_text("second\n")
    backend = FakeBackend({FIRST: FakeSlot(Exited(1)), SECOND: running()}, {FIRST: succeeded(), SECOND: succeeded()})
    status = supervise(run, backend)
    lines = [line.text for line in read_run_logs(run, None, is_over=lambda: True)]
    reason = f"--- attempt 1: retrying because {status.attempts[0].cause}"
    assert lines == ["first", "ValueError: bad", reason, "second"]
    assert [line.text for line in read_run_logs(run, SECOND, is_over=lambda: True)] == []
    assert "ValueError: bad" in reason


# --- A full disk


def fail_writes(monkeypatch: pytest.MonkeyPatch, *, of: Callable[[str], bool]) -> None:
    """Fail to write some files of run folders, as on a full disk."""
    write = RunFolder.write

    def write_or_fail(run: RunFolder, name: str, data: bytes) -> None:
        if of(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, name, data)

    monkeypatch.setattr(RunFolder, "write", write_or_fail)


def test_full_disk_does_not_end_the_attempt(
    stoker_home: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = two_workers()
    fail_writes(monkeypatch, of=lambda name: name == "packages.json")
    status = supervise(run, FakeBackend({FIRST: succeeded(10), SECOND: succeeded(10)}))
    assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1)
    assert "packages.json" in capsys.readouterr().out


def test_status_is_written_as_soon_as_the_disk_has_space(
    stoker_home: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = two_workers(), list[JobState]()
    fail_writes(monkeypatch, of=lambda name: name == STATUS_FILE and clock.now < 20)

    def note_state() -> bool:
        if clock.now > 40:
            seen.append(run.read_status().state)
        return False

    supervise(run, FakeBackend({FIRST: succeeded(60), SECOND: succeeded(60)}), note_state)
    assert seen[0] is JobState.RUNNING


# --- Restarts of single slots


def test_elastic_job_backs_off_before_it_replaces_a_worker(
    stoker_home: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the worker as often as `retries` allows; then the worker is left out."""
    monkeypatch.setattr("stoker.jobs.retry_policy.BACKOFF_S", (1.0, 30.0))
    killed = [FakeSlot(Exited(-signal.SIGKILL)) for _ in range(3)]
    backend = FakeBackend({FIRST: succeeded(100), SECOND: killed[0]}, restarted=killed[1:])
    status = supervise(two_workers(workers={"min": 1, "max": 2}), backend)
    assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1)
    (first, at), (second, later) = backend.restarts
    assert (first, second) == (SECOND, SECOND)
    assert 1.0 <= at < 2.0
    assert later - at >= 30.0


def test_elastic_job_replaces_a_lost_worker_only_when_it_is_gone(stoker_home: Path, clock: FakeClock) -> None:
    lost = FakeSlot(by_time((0, Running()), (40, unreachable(10, 90, is_lost=True))))
    backend = FakeBackend({FIRST: succeeded(200), SECOND: lost}, restarted=[running()])
    status = supervise(two_workers(workers={"min": 1, "max": 2}), backend)
    assert (status.state, len(status.attempts)) == (JobState.SUCCEEDED, 1)
    ((slot, at),) = backend.restarts
    assert slot == SECOND
    assert 90 <= at < 92


# --- Supervisors that reattach


@pytest.mark.parametrize("reason", ["failed", STOP_REQUEST_FILE])
def test_finished_or_stopping_run_is_not_reattached(reason: str, workspace: Path) -> None:
    job = job_of("echo ran", retries=3)
    run = create_run(job, LAUNCHERS.get("local")().render(job))
    state = JobState.FAILED if reason == "failed" else JobState.RUNNING
    status = JobStatus(state=state, slots=(SlotStatus(slot="worker/0", state=state),), began=1.0)
    run.write_status(status)
    if reason == STOP_REQUEST_FILE:
        run.write(STOP_REQUEST_FILE, b"")
    argv = [sys.executable, "-P", "-m", "stoker.launchers.supervise.supervisor", str(run.folder), "--continue"]
    subprocess.run(argv, check=True)
    wait_until(lambda: (run.folder / "lock").exists() and supervisor_pid(run) is None)
    assert run.read_status() == status
    assert not list(run.logs.iterdir())


def test_lost_attempt_is_recorded_before_the_next_one_starts(
    stoker_home: Path, clock: FakeClock, statuses: list[JobStatus]
) -> None:
    """Otherwise it would be forgotten if the next supervisor is killed too."""
    run = two_workers()
    failed = Attempt(number=0, began=10, ended=20, code=1, cause="failed")
    slots = (SlotStatus(slot=str(FIRST), state=JobState.RUNNING),)
    run.write_status(JobStatus(state=JobState.RUNNING, attempt=1, slots=slots, attempts=(failed,), began=10))
    statuses.clear()
    supervise(run, FakeBackend({}, {}, {FIRST: succeeded(), SECOND: succeeded()}))
    assert [(attempt.number, attempt.began) for attempt in statuses[0].attempts] == [(0, 10), (1, 20)]
    assert [attempt.number for attempt in run.read_status().attempts] == [0, 1, 2]


def test_reattached_supervisor_counts_only_attempts_since_the_last_start(workspace: Path) -> None:
    job = job_of("true", retries=2)
    run = create_run(job, LAUNCHERS.get("local")().render(job))
    before = [Attempt(number=number, began=10.0 * number, ended=10.0 * number + 5) for number in range(3)]
    status = JobStatus(state=JobState.RUNNING, attempt=3, attempts=tuple(before), began=20.0)
    run.write_status(status)
    supervisor = Supervisor(run, FakeBackend(), SimpleNamespace(is_set=False), reattach=True)  # type: ignore[arg-type]
    assert [attempt.number for attempt in supervisor._attempts] == [2]
    assert [attempt.number for attempt in supervisor._previous_attempts] == [0, 1]
    assert (supervisor._first_number, supervisor._attempt_start()) == (2, 25.0)
