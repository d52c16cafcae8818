"""The index of a run: equal to a reading of all events, whatever happens between and during its updates."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.telemetry import column_files, run_index
from stoker.telemetry.analysis import RunAnalysis, analyze
from stoker.telemetry.events import PREFIX, Event, split_line
from stoker.telemetry.profile_rows import PROFILE_FIELDS, ProfileRows
from stoker.telemetry.reader import LogFile, read_events, with_slot
from stoker.telemetry.run_index import RunIndex, decode_events, open_index
from tests.support.event_logs import EventLogs


def describe(analysis: RunAnalysis) -> Any:
    """Everything that an analysis says; NaN is equal to NaN."""
    found = analysis.progress()
    numbers = [found.step, found.total_steps, found.loss, found.ended, found.attempt, analysis.eta()]
    cost, verdict = analysis.restarts(), analysis.verdict()
    totals = [verdict.shares.get("compute", 0.0), verdict.step_s, cost.idle_s]
    rounded = [value if value is None or math.isfinite(value) else str(value) for value in numbers]
    return (
        [round(value, 9) if isinstance(value, float) else value for value in rounded + totals],
        (verdict.bound_by, verdict.steps, cost.count, cost.repeated_steps, sorted(analysis.remarks())),
    )


def assert_equals_events(index: RunIndex) -> None:
    events = read_events(index.logs)
    assert describe(index.analysis) == describe(analyze(events))
    kinds = {kind: [event for event in events if event.kind == kind] for kind in ("profile", "scalar", "span", "mark")}
    for kind in ("profile", "scalar", "span"):
        assert index.tables[kind].rows == len(kinds[kind])
    assert len(index.marks()[0]) == len(kinds["mark"])
    cpu = [event.fields["cpu_pct"] for event in kinds["profile"]]
    np.testing.assert_allclose(np.sort(index.tables["profile"].read("cpu_pct")), np.sort(cpu), rtol=1e-6)
    values = [event.fields["value"] for event in kinds["scalar"]]
    np.testing.assert_array_equal(np.sort(index.tables["scalar"].read("value")), np.sort(values))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "run" / "logs"


def test_index_follows_the_logs(logs: Path) -> None:
    writer, index = EventLogs(logs), RunIndex(logs)
    for _ in range(10):
        writer.write(5)
        assert index.refresh()
        assert not index.refresh()
        assert_equals_events(index)
    generation = index.generation
    again = RunIndex(logs)
    assert not again.refresh()  # nothing is read twice
    assert again.generation == generation
    assert_equals_events(again)


def test_two_processes_update_one_index(logs: Path) -> None:
    writer, one, two = EventLogs(logs), RunIndex(logs), RunIndex(logs)
    for index in (one, two, two, one, two):
        writer.write(4)
        index.refresh()
        assert_equals_events(index)
    assert one.generation == two.generation


@pytest.mark.parametrize("age_s", [0, 3600])
def test_new_log_is_found_however_old_the_directory_looks(logs: Path, age_s: int) -> None:
    writer, index = EventLogs(logs), RunIndex(logs)
    writer.write(2)
    changed = time.time_ns() - age_s * 10**9
    os.utime(logs, ns=(changed, changed))
    index.refresh()
    writer.write(1)
    assert index.refresh()  # logs grow without a change of the directory
    shutil.copy(logs / "worker-0.0.log", logs / "worker-7.0.log")
    if not age_s:
        os.utime(logs, ns=(changed, changed))  # two changes within the resolution of the clock
    assert index.refresh()
    assert_equals_events(index)


def test_incomplete_line_is_read_when_it_is_complete(logs: Path) -> None:
    EventLogs(logs).write(2)
    log = logs / "worker-0.0.log"
    index = open_index(logs)
    before = index.tables["scalar"].rows
    fields = {"v": 1, "t": 9.5, "slot": "w/0", "rank": 0, "attempt": 0, "seq": 1, "k": "scalar"}
    line = f"{PREFIX}{json.dumps({**fields, 'name': 'x', 'step': 1, 'value': 2})}"
    with open(log, "a") as file:
        file.write(line[:70])
        file.flush()
        index.refresh()
        assert index.tables["scalar"].rows == before
        file.write(f"{line[70:]}\n")
    index.refresh()
    assert index.tables["scalar"].rows == before + 1


@pytest.mark.parametrize(
    "change", ["truncate", "replace", "rewrite", "missing column", "damaged commit", "old version"]
)
def test_index_that_does_not_match_is_built_again(logs: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EventLogs(logs)
    writer.write(20)
    generation = open_index(logs).generation
    log, folder = logs / "worker-0.0.log", logs.parent / "index"
    if change == "truncate":
        os.truncate(log, 0)
    elif change == "replace":
        shutil.copy(log, tmp := log.with_suffix(".new"))
        tmp.replace(log)
    elif change == "rewrite":
        text = log.read_bytes()
        log.write_bytes(text.replace(b'"cpu_pct": ', b'"cpu_pct": 1', 1) + b"more\n")
    elif change == "missing column":
        (folder / "profile.cpu_pct").write_bytes(b"")
    elif change == "damaged commit":
        (folder / "commit").write_bytes(b"nonsense")
    else:
        monkeypatch.setattr(run_index, "VERSION", run_index.VERSION + 1)
    index = open_index(logs)
    assert index.generation != generation
    assert_equals_events(index)


class Killed(BaseException):
    """Stands for SIGKILL: no handler may catch it."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of writes after which the process is killed, in the middle of the next one."""
    countdown = [10**9]
    append, replace = column_files.append_bytes, column_files.replace_file

    def is_due() -> bool:
        countdown[0] -= 1
        return countdown[0] < 0

    def append_part(path: Path, data: bytes) -> None:
        due = is_due()
        append(path, data[: len(data) // 2] if due else data)
        if due:
            raise Killed

    def replace_part(path: Path, data: bytes) -> None:
        if is_due():
            path.with_name(f".{path.name}.1").write_bytes(data[: len(data) // 2])
            raise Killed
        replace(path, data)

    monkeypatch.setattr(column_files, "append_bytes", append_part)
    monkeypatch.setattr(run_index, "append_bytes", append_part)
    monkeypatch.setattr(run_index, "replace_file", replace_part)
    return countdown


def test_index_killed_at_any_write_is_right_after_reopening(logs: Path, kill_at: list[int]) -> None:
    writer = EventLogs(logs)
    writer.write(5)
    open_index(logs)
    kept = logs.parent / "kept"
    shutil.copytree(logs.parent / "index", kept)
    writer.write(5)
    kills = 0
    for writes in itertools.count():
        shutil.rmtree(logs.parent / "index")
        if writes % 2:  # also the first pass
            shutil.copytree(kept, logs.parent / "index")
        kill_at[0] = writes // 2
        try:
            open_index(logs)
        except Killed:
            kills += 1
        else:
            break
        kill_at[0] = 10**9
        assert_equals_events(open_index(logs))
    assert kills > 60  # every column, the marks and the commit, with and without an index before


@pytest.mark.parametrize("commit_bytes", [128 << 20, 4000])
def test_index_goes_on_after_an_error_in_the_same_process(
    logs: Path, kill_at: list[int], commit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_index, "_COMMIT_BYTES", commit_bytes)  # the small one: several commits in each pass
    monkeypatch.setattr(run_index, "_MAX_PROFILES", 2)
    writer, index = EventLogs(logs), RunIndex(logs)
    for writes in (3, 30, 35, 60, 75, 10**9):
        writer.write(3)
        kill_at[0] = writes
        try:
            index.refresh()
        except Killed:
            kill_at[0] = 10**9
            index.refresh()
        assert_equals_events(index)


def test_read_only_run_folder(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EventLogs(logs).write(3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    index = open_index(logs)
    assert index.folder.is_relative_to(tmp_path / "cache")
    assert not (logs.parent / "index").exists()
    assert_equals_events(index)


def test_held_lock_leads_to_a_private_index(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EventLogs(logs).write(3)
    monkeypatch.setattr(run_index, "LOCK_TIMEOUT_S", 0.1)
    holder = RunIndex(logs)
    with holder._locked():
        index = open_index(logs)
    assert index.folder != holder.folder
    assert_equals_events(index)


def test_run_without_logs(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    index = open_index(tmp_path / "run" / "logs")
    assert (index.refresh(), index.slots, index.marks()) == (False, [], ([], 0))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["NaN", "Infinity", "1", "é", ""])
gpu = st.lists(st.dictionaries(st.sampled_from(["i", "util_pct", "mem_used"]), scalars) | scalars, max_size=2)
lines = st.fixed_dictionaries(
    {"v": st.just(1) | scalars, "t": st.floats(0, 1e9) | scalars, "slot": st.text(max_size=3) | scalars,
     "rank": st.integers(0, 3) | scalars, "attempt": st.integers(0, 3) | scalars, "seq": st.integers(0, 9) | scalars,
     "k": st.sampled_from(["profile", "profile", "scalar", "span"])},
    optional={"pid": scalars, "machine": st.text(max_size=3) | scalars, "gpu": gpu | scalars, "name": scalars,
              "value": scalars, "other": st.text(max_size=5), **dict.fromkeys(PROFILE_FIELDS[:4], scalars)},
)  # fmt: skip


@settings(max_examples=400)
@given(lines, st.sampled_from(["", "", " ", "x", "[1,0]<stdout>: "]), st.booleans())
def test_fast_and_slow_path_agree(fields: dict[str, Any], around: str, is_ascii: bool) -> None:
    text = json.dumps(fields, ensure_ascii=is_ascii)
    for line in (f"{PREFIX}{text}{around}", f"{around}{PREFIX}{text}", f"{PREFIX}{text[:-3]}"):
        raw = line.encode(errors="replace")
        slow = [part for part in split_line(raw.decode(errors="replace")) if isinstance(part, Event)]
        assert repr(decode_events(raw)) == repr(slow)
        fast, expected = ProfileRows(), ProfileRows()
        if fast.add_lines([raw], "log/7", 7):
            assert not len(fast)
        if len(fast):
            (event,) = slow
            expected.add_event(with_slot(event, LogFile("log/7", 7, Path())))
            assert_equal_rows(fast, expected)


def assert_equal_rows(one: ProfileRows, two: ProfileRows) -> None:
    assert (one.slots, one.machines, one.gpu_counts) == (two.slots, two.machines, two.gpu_counts)
    for first, second in zip(one.columns() + one.gpu_columns(), two.columns() + two.gpu_columns(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_usual_profile_takes_the_fast_path() -> None:
    fields = {"v": 1, "t": 5.5, "slot": "w/0", "rank": 0, "attempt": 2, "seq": 3, "pid": 9, "k": "profile"}
    profile = f"{PREFIX}{json.dumps({**fields, 'cpu_pct': 5})}".encode()
    span = f"{PREFIX}{json.dumps({**fields, 'k': 'span'})}".encode()
    rows = ProfileRows()
    assert rows.add_lines([b"text", profile, b"text", profile, span, b"[1] " + profile, profile], "log/7", 7) == [4, 5]
    t, attempts, values = rows.columns()
    assert (t.tolist(), rows.slots, attempts.tolist()) == ([5.5] * 3, ["w/0"] * 3, [2] * 3)
    assert values[PROFILE_FIELDS.index("cpu_pct")].tolist() == [5.0] * 3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_any_division_into_updates_gives_the_same_index(
    tmp_path_factory: pytest.TempPathFactory, seed: int, parts: list[int]
) -> None:
    logs = tmp_path_factory.mktemp("run") / "logs"
    writer, index = EventLogs(logs, seed), RunIndex(logs)
    for rounds in parts:
        writer.write(rounds)
        index.refresh()
    assert_equals_events(index)
