"""`stoker profile`: the program keeps its streams, signals, options and exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from stoker.telemetry.events import PREFIX, parse
from stoker.telemetry.profile_summary import ProfileSummary
from tests.support.trees import stoker


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker", "profile", *words]
    return subprocess.run(command, input="in\n", capture_output=True, text=True, check=False, timeout=60)


def test_profiled_program_keeps_streams_and_exit_code() -> None:
    done = run("--json", "--every", "500ms", "--", "sh", "-c", "cat; sleep 0.8; exit 7")
    assert done.returncode == 7
    text, *lines = done.stdout.splitlines()
    assert text == "in"
    events = [parse(line) for line in lines]
    assert [event.kind for event in events if event] == ["profile", "profile", "mark"]


def test_summary_follows_on_standard_error() -> None:
    done = run("--every", "500ms", "--", "sh", "-c", "cat; sleep 0.8; echo mine >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "in\n")
    mine, sentence, columns, *rows = done.stderr.splitlines()
    assert mine == "mine"
    assert re.search(r" 7 after \S+s, .*\bMiB$", sentence)
    assert columns.split() == ["metric", "mean", "peak"]
    values = {metric: (mean, peak) for metric, mean, peak in (re.split(" {2,}", row) for row in rows)}
    assert float(values["program CPU (cores)"][1]) < 1
    assert all(value.endswith("%") for value in values["machine CPU"])
    assert PREFIX not in done.stderr


def test_program_without_a_sample_has_no_peak_memory() -> None:
    done = run("--every", "0", "--", "false")
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert "memory" not in sentence


def test_samples_over_no_time_are_not_summarized() -> None:
    summary = ProfileSummary()
    summary.write("profile", interval_s=0.0, cpu_pct=100.0)
    assert summary.rows == []
    summary.write("profile", interval_s=1.0, cpu_pct=10.0)
    assert summary.rows == [("machine CPU", "10%", "10%")]


def test_job_gets_events_without_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_RUN", "x")
    done = run("--every", "0", "--", "true")
    assert [event.kind for line in done.stdout.splitlines() if (event := parse(line))] == ["mark"]
    assert done.stderr == ""


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_after_the_program_belong_to_it(dashes: list[str]) -> None:
    done = run("--every", "0", *dashes, "echo", "--every", "5", "--help", "--", "-x")
    assert done.stdout.startswith("--every 5 --help -- -x\n")


def test_bad_input_fails_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    missing = run("--every", "0", "--", "no-such-program")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert re.search("cannot start .*'no-such-program'", missing.stderr)
    for words in (["--every", "soon", "--", "true"], [], ["--"], ["--wrong", "--", "true"]):
        assert stoker("profile", *words) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_signals_reach_the_program() -> None:
    command = [sys.executable, "-m", "stoker", "profile", "--every", "0", "--"]
    script = "trap 'echo terminated; exit 12' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen([*command, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "terminated\n"
    assert process.wait(60) == 12
    process.stdout.close()
