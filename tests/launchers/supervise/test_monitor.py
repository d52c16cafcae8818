"""The monitor of an attempt with remote slots: placement, exits and hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from stoker.core.units import Seconds
from stoker.jobs.run_folder import RunFolder, create_run
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import LocalPlan
from stoker.launchers.supervise.hangs import RankPosition
from stoker.launchers.supervise.monitor import PENDING_MARK, AttemptMonitor
from stoker.launchers.supervise.process_group import ProcessGroup
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.events import Recorder
from tests.launchers.contract import job_of

PLAN = LocalPlan(slots={f"worker/{index}": Command(("true",)) for index in range(2)}, hosts={"worker/0": "a"})
FIRST, SECOND = Slot("worker", 0), Slot("worker", 1)


@pytest.fixture
def run(stoker_home: Path) -> RunFolder:
    return create_run(job_of("true"), PLAN)


def monitor_with_silent_ranks(run: RunFolder, *slots: Slot) -> AttemptMonitor:
    """Return a monitor of slots whose ranks sent one heartbeat, longer ago than `hang_after`."""
    job = msgspec.structs.replace(run.job, hang_after=Seconds("0.01s"))
    monitor = AttemptMonitor(run, 0, PLAN, job)
    for slot in slots:
        with record_events(run, slot) as events:
            events.heartbeat(5)
    monitor.read_events()
    time.sleep(0.05)
    return monitor


@contextmanager
def record_events(run: RunFolder, slot: Slot) -> Iterator[Recorder]:
    with run.log_path(slot, 0).open("ab") as log:
        yield Recorder(slot=str(slot), rank=slot.index, fd=log.fileno())


def test_slots_are_pending_until_placement_is_reported(run: RunFolder) -> None:
    manager = {"driver/0": Command(("true",))}
    plan = LocalPlan(slots=manager, hosts={"worker/0": "ray"}, delegated=("worker/0",))
    assert not LocalPlan(slots=manager, delegated=("worker/0",)).waits_for_placement  # mpirun's workers start at once
    monitor = AttemptMonitor(run, 0, plan, run.job)
    states = []
    with record_events(run, Slot("driver", 0)) as events:
        for reason in (None, "no capacity", ""):
            if reason is not None:
                events.mark(PENDING_MARK, reason)
            monitor.read_events()
            states.append((monitor.is_placed, monitor.pending_reason))
    assert states == [(False, ""), (False, "no capacity"), (True, "")]


def test_exited_remote_slot_is_not_a_hang(run: RunFolder) -> None:
    processes = ProcessGroup(run, 0, {})
    monitor = monitor_with_silent_ranks(run, FIRST)
    assert monitor.find_silent_ranks(processes, {FIRST: None, SECOND: None}) == [RankPosition(FIRST, 0, 5)]
    assert monitor.find_silent_ranks(processes, {FIRST: 0, SECOND: None}) == []
    assert monitor.last_step == 5


def test_rank_with_an_exit_mark_is_not_a_hang(run: RunFolder) -> None:
    monitor = monitor_with_silent_ranks(run, FIRST, SECOND)
    with record_events(run, FIRST) as events:
        events.mark(RANK_EXIT_MARK, code=0)
    monitor.read_events()
    silent = monitor.find_silent_ranks(ProcessGroup(run, 0, {}), {FIRST: None, SECOND: None})
    assert silent == [RankPosition(SECOND, 1, 5)]


def test_every_silent_rank_is_found(run: RunFolder) -> None:
    monitor = monitor_with_silent_ranks(run, FIRST, SECOND)
    silent = monitor.find_silent_ranks(ProcessGroup(run, 0, {}), {FIRST: None, SECOND: None})
    assert silent == [RankPosition(FIRST, 0, 5), RankPosition(SECOND, 1, 5)]
