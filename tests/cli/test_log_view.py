"""Printing of log lines: progress bars on a terminal and elsewhere, and what torchrun writes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli import log_view
from stoker.cli.log_view import LogView
from stoker.core.yaml_io import to_yaml
from stoker.jobs.launcher import SlotLogLine
from stoker.jobs.run_folder import find_run
from stoker.jobs.topology import Slot
from tests.support.trees import stoker

WORKER = Slot("worker", 0)
BARS = r"""
import sys, time
for percent in range(0, 101, 10):
    sys.stderr.write(f"\rtrain: {percent:3d}%")
    sys.stderr.flush()
    time.sleep(0.1)
sys.stderr.write("\n")
print("done")
"""
BARS_THAT_ARE_SEEN = r"""
import os, sys, time
for percent in range(0, 101, 25):
    sys.stderr.write(f"\rtrain: {percent:3d}%")
    sys.stderr.flush()
    while not os.path.exists(f"seen-{percent}"):
        time.sleep(0.01)
sys.stderr.write("\n")
print("done")
"""
FAILING = """
raise LookupError("no such thing")
"""


def write_job(name: str, script: str, **keys: object) -> Path:
    Path(f"{name}.py").write_text(script)
    job = {"name": name, "program": {"script": f"{name}.py"}, "retries": 0, "profile": {"every": 0}, **keys}
    Path(f"{name}.yaml").write_text(to_yaml(job))
    return Path(f"{name}.yaml")


def partial(text: str) -> SlotLogLine:
    return SlotLogLine(WORKER, 0, text, is_partial=True)


def test_bar_is_shown_in_its_last_state(workspace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = write_job("bars", BARS, topology="single")
    assert stoker("job", "run", job) == 0
    assert capfd.readouterr().out == "train: 100%\ndone\n"
    assert stoker("job", "logs", "bars") == 0
    assert capfd.readouterr().out == "train: 100%\ndone\n"
    assert find_run("bars").log_path(WORKER, 0).read_bytes().count(b"\r") == 11


def test_terminal_updates_a_bar_in_place(workspace: Path) -> None:
    """The program draws the next state of its bar when the terminal shows the last one."""
    job = write_job("bars", BARS_THAT_ARE_SEEN, topology="single")
    parent, child = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "stoker", "job", "run", job], stdout=child, stderr=child) as process:
        os.close(child)
        written = b""
        while True:
            try:
                written += os.read(parent, 4096)
            except OSError:  # the terminal has been closed
                break
            for state in re.findall(rb"train: +(\d+)%", written):
                Path(f"seen-{state.decode()}").touch()
        assert process.wait(60) == 0
    os.close(parent)
    states = [int(state) for state in re.findall(rb"\r\x1b\[Ktrain: +(\d+)%", written)]
    assert sorted(set(states)) == [0, 25, 50, 75, 100]
    assert sorted(states) == states
    assert re.search(rb"\r\x1b\[Ktrain: 100%\r\ndone\r\n", written)


def test_bar_in_a_file_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = LogView(slots=True)
    view.print(partial("10%"))
    monkeypatch.setattr(log_view, "LOG_EVERY_S", 0.0)
    view = LogView(slots=True)
    view.print(partial("20%"))
    view.print(SlotLogLine(WORKER, 0, "end"))
    assert capsys.readouterr().out == "[worker/0] 20%\n[worker/0] end\n"


def test_foreground_shows_the_error_of_the_program_without_torchruns_report(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write_job("failing", FAILING, topology="torchrun")
    assert stoker("job", "run", job) == 4
    out = capfd.readouterr().out
    assert "LookupError: no such thing" in out
    assert "ChildFailedError" not in out
    assert stoker("job", "logs", "failing") == 0
    assert "ChildFailedError" in capfd.readouterr().out  # not a terminal: everything
    assert "ChildFailedError" in find_run("failing").log_path(WORKER, 0).read_text()
