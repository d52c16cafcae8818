"""The monitor of an attempt: exits and hangs."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from stoker.core.units import Seconds
from stoker.jobs.run_folder import RunFolder, create_run
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.hangs import RankPosition
from stoker.launchers.supervise.monitor import AttemptMonitor
from stoker.launchers.supervise.slot_handle import Exited, Running
from stoker.remote.mpi_rank import RANK_EXIT_MARK
from stoker.telemetry.events import Recorder
from tests.launchers.contract import job_of
from tests.support.fake_slots import FakeSlot

FIRST, SECOND = Slot("worker", 0), Slot("worker", 1)


@pytest.fixture
def run(stoker_home: Path) -> RunFolder:
    return create_run(job_of(program={"module": "this"}, topology="torchrun", workers=2), {})


def monitor_with_silent_ranks(run: RunFolder, *slots: Slot) -> AttemptMonitor:
    """Return a monitor of slots whose ranks sent one heartbeat, longer ago than `hang_after`."""
    job = msgspec.structs.replace(run.job, hang_after=Seconds("0.01s"))
    monitor = AttemptMonitor(run, 0, job)
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


def slots_in(first: Running | Exited, second: Running | Exited) -> dict[Slot, FakeSlot]:
    return {FIRST: FakeSlot(first), SECOND: FakeSlot(second)}


def test_exited_slot_is_not_a_hang(run: RunFolder) -> None:
    monitor = monitor_with_silent_ranks(run, FIRST)
    assert monitor.find_silent_ranks(slots_in(Running(), Running())) == [RankPosition(FIRST, 0, 5)]
    assert monitor.find_silent_ranks(slots_in(Exited(0), Running())) == []
    assert monitor.last_step == 5


def test_rank_with_an_exit_mark_is_not_a_hang(run: RunFolder) -> None:
    monitor = monitor_with_silent_ranks(run, FIRST, SECOND)
    with record_events(run, FIRST) as events:
        events.mark(RANK_EXIT_MARK, code=0)
    monitor.read_events()
    assert monitor.find_silent_ranks(slots_in(Running(), Running())) == [RankPosition(SECOND, 1, 5)]


def test_every_silent_rank_is_found(run: RunFolder) -> None:
    monitor = monitor_with_silent_ranks(run, FIRST, SECOND)
    silent = monitor.find_silent_ranks(slots_in(Running(), Running()))
    assert silent == [RankPosition(FIRST, 0, 5), RankPosition(SECOND, 1, 5)]


def test_hang_is_explained_on_a_full_disk(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stack traces, which are not mentioned then."""
    monitor, slots = monitor_with_silent_ranks(run, FIRST), slots_in(Running(), Running())
    silent = monitor.find_silent_ranks(slots)
    stacks, log = str(run.folder / "stacks.0.txt"), str(run.log_path(FIRST, 0))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(RunFolder, "write", fail_to_write)
        cause = monitor.explain_hang(silent, slots)
    assert (stacks in cause, cause.endswith(log)) == (False, True)
    cause = monitor.explain_hang(silent, slots)
    assert (stacks in cause, cause.endswith(log)) == (True, True)


def fail_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_scalars_are_written_to_tensorboard_once(stoker_home: Path) -> None:
    job = job_of("true", tensorboard=True)
    run = create_run(job, {})
    with record_events(run, FIRST) as events:
        events.scalar("loss", 1.0, step=1)
        monitor = AttemptMonitor(run, 0, job)
        monitor.catch_up()
        assert not list(run.folder.glob("tensorboard/*"))
        events.scalar("loss", 0.5, step=2)
        monitor.read_events()
    (written,) = run.folder.glob("tensorboard/*")
    assert written.read_bytes().count(b"loss") == 1
