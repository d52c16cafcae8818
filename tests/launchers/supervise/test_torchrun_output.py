"""Folding of torchrun's own output, as the installed torchrun writes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from stoker.jobs.launcher import SlotLogLine
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.torchrun_output import describe_folded, fold_torchrun_output

FAILING = """
import os
os.write(1, b"starting\\n")
if os.environ["RANK"] == "1":
    raise LookupError("no such thing")
"""
SLEEPING = """
import sys, time
print("starting", flush=True)
time.sleep(60)
"""


def fold(texts: Iterable[str], slot: int = 0) -> list[str]:
    lines = (SlotLogLine(Slot("worker", slot), 0, text) for text in texts)
    return [line.text for line in fold_torchrun_output(lines)]


def start_torchrun(folder: Path, script: str, ranks: int) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*argv, str(folder / "train.py")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_failure_report_is_folded_and_the_program_is_not(tmp_path: Path) -> None:
    written = start_torchrun(tmp_path, FAILING, 2).communicate(timeout=120)[0].splitlines()
    assert any("ChildFailedError" in line for line in written)
    shown = fold(written)
    assert shown.count("starting") == 2
    traceback = shown.index("Traceback (most recent call last):")
    assert shown[traceback + 1].startswith(f'  File "{tmp_path}/train.py"')
    assert "LookupError: no such thing" in shown
    folded = [line for line in shown if line not in written]
    assert shown[-1] == folded[-1]
    assert len(written) - (len(shown) - len(folded)) > 30
    assert not any("torch/distributed" in line or "====" in line for line in shown)


def test_stopped_torchrun_is_folded(tmp_path: Path) -> None:
    with start_torchrun(tmp_path, SLEEPING, 1) as process:
        assert process.stdout is not None
        written = [process.stdout.readline().rstrip("\n")]
        while written[-1] != "starting":
            written.append(process.stdout.readline().rstrip("\n"))
        process.send_signal(signal.SIGTERM)
        written += process.stdout.read().splitlines()
    assert any("SignalException" in line for line in written)
    number = len(written) - 1 - written.index("starting")
    assert fold(written)[-2:] == ["starting", describe_folded(number, "worker-0.0.log")]


def test_tracebacks_of_the_program_are_shown_in_order() -> None:
    entry = '  File "<frozen runpy>", line 198, in _run_module_as_main'
    lines = ["a", "Traceback (most recent call last):", entry, "    exec(code)", "ValueError: mine", "b"]
    assert fold(lines) == lines
    assert fold(lines[:3]) == lines[:3]  # cut off
    twice = [*lines[1:3], *lines[1:5]]
    assert fold(twice) == twice


REPORT = [
    "Traceback (most recent call last):",
    '  File "<frozen runpy>", line 198, in _run_module_as_main',
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "=" * 60,
    "train.py FAILED",
    "-" * 60,
    "Failures:",
    "  <NO_OTHER_FAILURES>",
    "-" * 60,
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-01-01_10:00:00",
    "  rank      : 1 (local_rank: 1)",
]


@pytest.mark.parametrize("length", range(3, len(REPORT) + 1))
def test_report_that_is_cut_short_does_not_hide_what_follows(length: int) -> None:
    assert fold([*REPORT[:length], "resumed", "=" * 60, "done"]) == [
        describe_folded(length, "worker-0.0.log"),
        "resumed",
        "=" * 60,
        "done",
    ]


def test_report_with_a_traceback_is_folded_up_to_a_limit() -> None:
    quoted = [*REPORT, "  traceback : Traceback (most recent call last):", '    File "train.py"', "  ValueError: bad"]
    assert fold([*quoted, "=" * 60, "end"]) == [describe_folded(len(quoted) + 1, "worker-0.0.log"), "end"]
    shown = fold([*quoted, *(f"line {number}" for number in range(1_000))])
    assert shown[-1] == "line 999"
    assert len(shown) > 700


def test_lines_of_slots_are_folded_separately() -> None:
    logged = "W1116 10:00:08.935000 1 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5"
    lines = [SlotLogLine(Slot("worker", index), 0, text) for text in (logged, "out") for index in (0, 1)]
    shown = [(line.slot.index, line.text) for line in fold_torchrun_output(lines)]
    assert shown == [
        (0, describe_folded(1, "worker-0.0.log")),
        (0, "out"),
        (1, describe_folded(1, "worker-1.0.log")),
        (1, "out"),
    ]


def test_lines_of_an_attempt_are_folded_before_the_next_attempt() -> None:
    slots = [Slot("worker", 0), Slot("worker", 1)]
    lines = [SlotLogLine(slot, 0, text) for text in ("out", *REPORT) for slot in slots]
    lines += [SlotLogLine(slot, 1, "resumed") for slot in slots]
    assert [(line.slot.index, line.attempt, line.text) for line in fold_torchrun_output(lines)] == [
        (0, 0, "out"),
        (1, 0, "out"),
        (0, 0, describe_folded(len(REPORT), "worker-0.0.log")),
        (1, 0, describe_folded(len(REPORT), "worker-1.0.log")),
        (0, 1, "resumed"),
        (1, 1, "resumed"),
    ]
