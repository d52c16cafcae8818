"""Harmless warnings of mpirun are not shown."""

from __future__ import annotations

from stoker.jobs.launcher import SlotLogLine
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.mpirun_output import drop_mpirun_warnings


def test_warning_about_process_groups_is_left_out() -> None:
    warning = "plm:rsh: Warning: setpgid(4013,4013) failed in parent with errno=Permission denied (13)"
    texts = [
        f"[node1:04010] {warning}",
        warning,
        "[1,0]<stdout>:step 1",
        "plm:rsh: no agent",
        f"saw {warning}",
    ]
    lines = [SlotLogLine(Slot("launcher", 0), 0, text) for text in texts]
    assert [line.text for line in drop_mpirun_warnings(lines)] == texts[2:]
