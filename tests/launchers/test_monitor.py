"""What is heard of slots elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from stoker.core.units import Seconds
from stoker.jobs.run_folder import Run, create
from stoker.jobs.topology import Command, Slot
from stoker.launchers.monitor import WAITING, Hearing
from stoker.launchers.plan import LocalPlan
from stoker.launchers.process_group import Gang
from stoker.telemetry.events import Recorder
from stoker.telemetry.mpi_rank import EXIT as RANK_EXIT
from tests.launchers.contract import job_of

PLAN = LocalPlan(slots={f"worker/{index}": Command(("true",)) for index in range(2)}, hosts={"worker/0": "a"})
FIRST, SECOND = Slot("worker", 0), Slot("worker", 1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    return create(job_of("true"), PLAN)


def heard(run: Run, *slots: Slot) -> Hearing:
    """Ranks of these slots that were heard of, and not since."""
    job = msgspec.structs.replace(run.job, hang_after=Seconds("0.01s"))
    hearing = Hearing(run, 0, PLAN, job)
    for slot in slots:
        with telling(run, slot) as events:
            events.heartbeat(5)
    hearing.listen()
    time.sleep(0.05)
    return hearing


@contextmanager
def telling(run: Run, slot: Slot) -> Iterator[Recorder]:
    with run.log(slot, 0).open("ab") as log:
        yield Recorder(slot=str(slot), rank=slot.index, fd=log.fileno())


def test_slots_that_are_placed_later_wait_until_that_is_told(run: Run) -> None:
    carrier = {"driver/0": Command(("true",))}
    plan = LocalPlan(slots=carrier, hosts={"worker/0": "ray"}, carried=("worker/0",))
    assert not LocalPlan(slots=carrier, carried=("worker/0",)).is_placed_later  # mpirun's, here
    hearing = Hearing(run, 0, plan, run.job)
    found = []
    with telling(run, Slot("driver", 0)) as events:
        for words in (None, "no room", ""):
            if words is not None:
                events.mark(WAITING, words)
            hearing.listen()
            found.append((hearing.is_placed, hearing.waiting))
    assert found == [(False, ""), (False, "no room"), (True, "")]


def test_a_slot_elsewhere_that_has_ended_does_not_hang(run: Run) -> None:
    gang = Gang(run, 0, {})
    hearing = heard(run, FIRST)
    assert "worker/0 (rank 0) hung at step 5" in hearing.hung(gang, {FIRST: None, SECOND: None})
    assert hearing.hung(gang, {FIRST: 0, SECOND: None}) == ""
    assert hearing.steps == 5


def test_a_rank_that_told_its_end_does_not_hang(run: Run) -> None:
    hearing = heard(run, FIRST, SECOND)
    with telling(run, FIRST) as events:
        events.mark(RANK_EXIT, code=0)
    hearing.listen()
    assert "worker/1" in hearing.hung(Gang(run, 0, {}), {FIRST: None, SECOND: None})
