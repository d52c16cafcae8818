"""Slots that local processes represent."""

from __future__ import annotations

from pathlib import Path

from stoker.launchers.supervise.proxy_slots import LOST_MARK, OOM_NOTICE, PENDING_MARK, Placement, explain_exit
from stoker.launchers.supervise.slot_handle import Exited, Running
from stoker.telemetry.events import Recorder


def test_slots_are_pending_until_placement_is_reported(tmp_path: Path) -> None:
    placement = Placement(tmp_path / "driver-0.0.log")
    states = []
    with (tmp_path / "driver-0.0.log").open("ab") as log:
        events = Recorder(slot="driver/0", fd=log.fileno())
        for reason in (None, "no capacity", ""):
            if reason is not None:
                events.mark(PENDING_MARK, reason)
            states.append(placement.poll())
    pending = Running(is_placed=False)
    assert states == [pending, Running(is_placed=False, pending_reason="no capacity"), Running()]


def test_log_explains_an_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.0.log"
    log.write_text(f"--- b: {OOM_NOTICE}\n")
    assert explain_exit(-9, log) == Exited(-9, out_of_memory=True)
    with log.open("ab") as file:
        Recorder(slot="worker/1", fd=file.fileno()).mark(LOST_MARK, "b: no response for 30 s")
    assert explain_exit(255, log) == Exited(255, "b: no response for 30 s", is_lost=True)
    assert explain_exit(0, log) == Exited(0)
