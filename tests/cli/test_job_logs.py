"""`stoker job logs`: the last lines, the lines since a time, and when each line was written."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stoker.api import Run
from stoker.cli.runs import print_logs
from stoker.jobs.launcher import SlotLogLine
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topology import Slot
from stoker.launchers.supervise.torchrun_output import describe_folded
from stoker.telemetry.log_times import index_path
from tests.support.runs import Runs
from tests.support.trees import stoker
from tests.support.waiting import wait_until

RUN_ID = "small-20260101-000000-abcd"
HOUR = 3600
TORCHRUN_LINES = [
    f"E0101 10:00:00.{number:06d} 1 torch/distributed/elastic/multiprocessing/api.py:1028] failed"
    for number in range(20)
]
LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) (.*)")


@pytest.fixture
def written(runs: Runs, stoker_home: Path) -> RunFolder:
    """A run of two attempts; the lines of its second attempt are two hours, one hour and no time old."""
    run, now = runs.write(stoker_home, RUN_ID), time.time()
    (run.logs / "worker-0.0.log").write_text("first\n")
    (run.logs / "worker-0.0.times").write_text(f"sampled\n0 {now - 5 * HOUR:.3f}\n")
    (run.logs / "worker-0.1.log").write_text("old\nolder\nrecent\nlast")
    (run.logs / "worker-0.1.times").write_text(f"sampled\n0 {now - 2 * HOUR:.3f}\n10 {now - HOUR:.3f}\n17 {now:.3f}\n")
    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["first", "old", "older", "recent", "last"]),
        (["--tail", "2"], ["recent", "last"]),
        (["--tail", "0"], []),
        (["--since", "90m"], ["recent", "last"]),
        (["--since", "3h", "--tail", "3"], ["older", "recent", "last"]),
        (["--since", "90m", "--tail", "1"], ["last"]),
        (["--since", "2000-01-01"], ["first", "old", "older", "recent", "last"]),
        (["--since", "2100-01-01T10:00:00Z"], []),
        (["--follow", "--tail", "1"], ["last"]),
    ],
)
def test_selected_lines(
    written: RunFolder, words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert stoker("job", "logs", written.id, *words) == 0
    assert capsys.readouterr().out.splitlines() == expected


@pytest.fixture
def failed(runs: Runs, stoker_home: Path) -> RunFolder:
    """A run whose program failed, with torchrun's report after the error."""
    run = runs.write(stoker_home, RUN_ID)
    (run.logs / "worker-0.0.log").write_text("\n".join(["starting", "ValueError: mine", *TORCHRUN_LINES]) + "\n")
    return run


@pytest.mark.parametrize("words", [[], ["--follow"]])
def test_last_lines_on_a_terminal_are_those_of_the_program(
    failed: RunFolder, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    folded = describe_folded(len(TORCHRUN_LINES), "worker-0.0.log")
    for tail, expected in ((2, ["ValueError: mine", folded]), (9, ["starting", "ValueError: mine", folded]), (0, [])):
        assert stoker("job", "logs", failed.id, "--tail", str(tail), *words) == 0
        assert capsys.readouterr().out.splitlines() == expected


def test_last_lines_elsewhere_are_those_of_the_log(failed: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "logs", failed.id, "--tail", "3") == 0
    assert capsys.readouterr().out.splitlines() == TORCHRUN_LINES[-3:]


def test_lines_after_the_last_ones_are_followed(
    written: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(_run: Run, _slot: str | None, *, follow: bool = False, **_options: object) -> Iterator[SlotLogLine]:
        lines = ["first", *TORCHRUN_LINES, "second", *(["third", "fourth"] if follow else [])]
        return (SlotLogLine(Slot("worker", 0), 0, text) for text in lines)

    monkeypatch.setattr(Run, "logs", grow)
    print_logs(Run.find(written.id), None, follow=True, fold=True, tail=2)
    assert capsys.readouterr().out.splitlines() == [
        describe_folded(len(TORCHRUN_LINES), "worker-0.0.log"),
        "second",
        "third",
        "fourth",
    ]


def test_interrupt_clears_a_progress_bar(
    written: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object, **_options: object) -> Iterator[SlotLogLine]:
        yield SlotLogLine(Slot("worker", 0), 0, "10%", is_partial=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(Run, "logs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        print_logs(Run.find(written.id), None, follow=True)
    assert capsys.readouterr().out.endswith("10%\r\x1b[K")


def test_timestamps_are_those_of_the_index(written: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "logs", written.id, "--timestamps") == 0
    found = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    ages = [time.time() - datetime.fromisoformat(match[1]).timestamp() for match in found if match]
    assert [round(age / HOUR) for age in ages] == [5, 2, 2, 1, 0]


def test_lines_without_a_known_time_are_reported(written: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    index_path(written.logs / "worker-0.0.log").unlink()
    assert stoker("job", "logs", written.id, "--since", "90m") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["recent", "last"]
    assert " 1 line " in err
    assert stoker("job", "logs", written.id, "--timestamps") == 0
    assert capsys.readouterr().out.splitlines()[0] == "- first"


@pytest.mark.parametrize("words", [["--since", "yesterday"], ["--since", ""], ["--tail", "-1"]])
def test_invalid_selection_is_refused(written: RunFolder, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker("job", "logs", written.id, *words) == 2
    assert words[0] in capsys.readouterr().err


def test_supervisor_records_when_lines_were_written(
    runs: Runs, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.time()
    run = runs.start(f"echo one; while ! test -e {workspace}/go; do sleep 0.05; done; echo two")
    index = run.logs / "worker-0.0.times"
    wait_until(index.exists)
    one = time.time()
    wait_until(lambda: time.time() > one + 2)
    (workspace / "go").touch()
    wait_until(lambda: run.read_status().state.is_final)
    ended = time.time()
    assert (run.logs / "worker-0.0.log").read_bytes() == b"one\ntwo\n"
    assert stoker("job", "logs", run.id, "--timestamps") == 0
    found = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    times = [datetime.fromisoformat(match[1]).timestamp() for match in found if match]
    assert [match[2] for match in found if match] == ["one", "two"]
    assert int(began) <= times[0] <= one
    assert int(one + 2) <= times[1] <= ended
    assert stoker("job", "logs", run.id, "--since", datetime.fromtimestamp(one + 1, UTC).isoformat()) == 0
    assert capsys.readouterr().out == "two\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["logs", "--tail", "-3"], "stoker: --tail must be >= 0, got '-3'\n"),
        (["list", "--limit", "0"], "stoker: --limit must be >= 1, got '0'\n"),
    ],
)
def test_number_out_of_range_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stoker("job", *words) == 2
    assert capsys.readouterr().err == sentence
