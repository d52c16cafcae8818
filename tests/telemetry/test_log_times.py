"""The index of a log's times: what is recorded, what is left out, and logs that are truncated or still grow."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from stoker.telemetry.log_times import LogTimes, LogTimesSampler, LogTimesWriter, index_path
from stoker.telemetry.reader import RunTail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.0.log"


def find_all(log: Path, *offsets: int) -> list[float | None]:
    times = LogTimes(log)
    times.refresh()
    return [times.find(offset) for offset in offsets]


def test_lines_within_a_second_share_a_time(log: Path) -> None:
    writer = LogTimesWriter(log)
    for offset, when in ((0, 100.0), (10, 100.5), (20, 100.999), (30, 101.0), (40, 90.0)):
        writer.add(offset, when)
    assert find_all(log, 0, 9, 25, 30, 39, 45) == [100.0, 100.0, 100.0, 101.0, 101.0, 90.0]
    assert len(index_path(log).read_text().splitlines()) == 3


def test_later_records_replace_those_of_a_truncated_log(log: Path) -> None:
    writer = LogTimesWriter(log)
    for offset, when in ((0, 1.0), (10, 5.0), (20, 9.0), (10, 20.0)):
        writer.add(offset, when)
    assert find_all(log, 5, 15, 25) == [1.0, 20.0, 20.0]


def test_log_without_an_index_has_no_times(log: Path) -> None:
    assert find_all(log, 0) == [None]
    index_path(log).write_text("garbage\n12\n")
    assert find_all(log, 0) == [None]


def test_index_of_a_long_run_takes_little_memory(log: Path) -> None:
    index_path(log).write_text("".join(f"{number * 1000} {1e9 + number:.3f}\n" for number in range(50_000)))
    times = LogTimes(log)
    tracemalloc.start()
    times.refresh()
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 50_000 * 24
    assert peak < 50_000 * 48
    assert times.find(49_999 * 1000) == 1e9 + 49_999


def test_index_is_read_up_to_its_last_complete_line(log: Path) -> None:
    times = LogTimes(log)
    index_path(log).write_text("0 1.000\n10 2.0")
    times.refresh()
    assert times.find(10) == 1.0
    index_path(log).write_text(f"0 1.000\n10 2.000\n{2**64} 3.000\n")
    times.refresh()
    assert times.find(2**62) == 2.0


def test_sampler_continues_after_what_was_recorded(log: Path) -> None:
    log.write_text("one\n")
    LogTimesSampler([log]).sample()
    first = index_path(log).read_text()
    again = LogTimesSampler([log])
    again.sample()
    assert index_path(log).read_text() == first
    with log.open("a") as file:
        file.write("two\n")
    again.sample()
    assert index_path(log).read_text().splitlines()[-1].startswith("4 ")


def test_missing_sample_does_not_make_a_new_line_old(log: Path) -> None:
    log.write_text("one\n")
    index_path(log).write_text("sampled\n0 1000.000\n")
    tail, before = RunTail(log.parent), time.time()
    assert [line.t for line in tail.lines()] == [1000.0]
    with log.open("a") as file:
        file.write("two\n")  # and the sampler has not seen it yet
    (line,) = tail.lines()
    assert before <= line.t <= time.time()


def test_times_of_others_are_not_changed_while_a_log_is_copied(log: Path) -> None:
    tail, writer = RunTail(log.parent), LogTimesWriter(log)
    for number, when in enumerate((1000.0, 1002.0)):
        writer.add(4 * number, when)
        with log.open("a") as file:
            file.write("one\n")
        assert [line.t for line in tail.lines()] == [when]


def test_lines_of_all_slots_are_merged_by_time(tmp_path: Path) -> None:
    for slot, records in enumerate(((10.0, 30.0), (20.0, 40.0))):
        log = tmp_path / f"worker-{slot}.0.log"
        log.write_text(f"{slot}a\n{slot}b\n")
        for number, when in enumerate(records):
            LogTimesWriter(log).add(3 * number, when)
    assert [line.text for line in RunTail(tmp_path).lines(final=True)] == ["0a", "1a", "0b", "1b"]
