"""Event lines: writing, truncation, parsing, and many writers on one pipe."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.telemetry import recorder
from stoker.telemetry.events import MAX_LINE_BYTES, PREFIX, Event, Recorder, parse, split_line

WRITER = """
import sys
from stoker.telemetry.events import Recorder
record = Recorder(slot=f"worker/{sys.argv[1]}", rank=int(sys.argv[1]))
for number in range(int(sys.argv[2])):
    record.mark("fill", "x" * (number * 97 % 3900), number=number)
"""


class RecorderPipe:
    """A recorder that writes to a pipe, and the lines it has written."""

    def __init__(self) -> None:
        self._read_fd, self.fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.record = Recorder(slot="worker/0", rank=3, attempt=1, fd=self.fd)

    def lines(self) -> list[str]:
        try:
            return os.read(self._read_fd, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self.fd)

    def last(self) -> Event:
        event = parse(self.lines()[-1])
        assert event is not None
        return event


@pytest.fixture
def pipe() -> Iterator[RecorderPipe]:
    pipe = RecorderPipe()
    yield pipe
    pipe.close()


def test_line_format(pipe: RecorderPipe) -> None:
    pipe.record.scalar("loss", 1.25, 12)
    (line,) = pipe.lines()
    assert line.startswith('@stoker {"v": 1, "t": ')
    raw = json.loads(line.removeprefix(PREFIX))
    assert raw.pop("t") > 1e9
    expected = {"v": 1, "slot": "worker/0", "rank": 3, "attempt": 1, "seq": 0, "k": "scalar", "pid": os.getpid()}
    assert raw == {**expected, "name": "loss", "step": 12, "value": 1.25}


def test_kinds_round_trip(pipe: RecorderPipe) -> None:
    pipe.record.span("step", 5.0, 0.5, 7, count=10)
    pipe.record.mark("start", "two ranks", world=2, **{"from": "there"})
    pipe.record.heartbeat(4, shard="a.tar", sample=9)
    span, mark, heartbeat = (parse(line) for line in pipe.lines())
    assert span is not None
    assert mark is not None
    assert heartbeat is not None
    assert (span.kind, span.fields) == ("span", {"name": "step", "start": 5.0, "length": 0.5, "step": 7, "count": 10})
    assert mark.fields == {"name": "start", "detail": "two ranks", "world": 2, "from": "there"}
    assert heartbeat.fields == {"step": 4, "shard": "a.tar", "sample": 9, "pid": os.getpid()}
    assert [span.seq, mark.seq, heartbeat.seq] == [0, 1, 2]
    assert span.pid == heartbeat.pid == os.getpid()


@pytest.mark.parametrize("target_kind", ["pipe", "file"])
def test_lines_of_many_processes_do_not_interleave(target_kind: str, tmp_path: Path) -> None:
    count, writers, target = 200, 6, tmp_path / "log"
    with target.open("ab") as file:
        stdout: Any = subprocess.PIPE if target_kind == "pipe" else file
        reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file) if target_kind == "pipe" else None
        if reader is not None:
            stdout = reader.stdin
        argv = [sys.executable, "-c", WRITER]
        running = [subprocess.Popen([*argv, str(rank), str(count)], stdout=stdout) for rank in range(writers)]
        assert [process.wait() for process in running] == [0] * writers
        if reader is not None:
            assert reader.stdin is not None
            reader.stdin.close()
            assert reader.wait() == 0
    events = [parse(line) for line in target.read_text().splitlines()]
    assert len(events) == count * writers
    seen = {
        rank: [event.seq for event in events if event is not None and event.rank == rank] for rank in range(writers)
    }
    assert seen == {rank: list(range(count)) for rank in range(writers)}


def test_nonfinite_numbers_round_trip_as_valid_json(pipe: RecorderPipe) -> None:
    for value in (math.nan, math.inf, -math.inf):
        pipe.record.scalar("loss", value, 1)
    pipe.record.mark("NaN", "Infinity", nested={"x": math.nan}, loss=np.float32("nan"))
    *scalars, mark = pipe.lines()

    def reject_constant(name: str) -> None:
        raise AssertionError(name)

    for line in (*scalars, mark):
        json.loads(line.removeprefix(PREFIX), parse_constant=reject_constant)
    values = [event.fields["value"] for line in scalars if (event := parse(line))]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]
    event = parse(mark)
    assert event is not None
    assert (event.fields["name"], event.fields["detail"]) == ("NaN", "Infinity")
    assert math.isnan(event.fields["loss"])


def test_numpy_scalars_and_other_objects_are_converted(pipe: RecorderPipe) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError

    circle: dict[str, object] = {}
    circle["self"] = circle
    pipe.record.emit(
        "mark", a=np.float32(0.5), b=np.int64(3), c=Path("x"), d=Bad(), e={(1, 2): {3}}, f=circle, kind="mine", t=5, k=1
    )
    event = pipe.last()
    assert (event.fields["a"], event.fields["b"], event.fields["c"], event.fields["d"]) == (0.5, 3, "x", "Bad")
    assert event.fields["e"] == {"(1, 2)": "{3}"}
    assert event.fields["kind"] == "mine"
    assert event.kind == "mark"  # the fields of the header cannot be overwritten
    assert event.t > 1e9


@pytest.mark.parametrize("text", ["x", "ä", "😀", '"', "\x00", "a\n"])
def test_only_the_long_text_is_truncated(text: str, pipe: RecorderPipe) -> None:
    pipe.record.mark("error", text * 9000, step=3, where="here")
    (line,) = pipe.lines()
    assert len(line.encode()) + 1 <= MAX_LINE_BYTES
    event = parse(line)
    assert event is not None
    assert event.fields["step"] == 3
    assert event.fields["where"] == "here"
    assert event.fields["cut"] is True
    kept = event.fields["detail"].removesuffix("…")
    assert kept
    assert (text * 9000).startswith(kept)
    if text == "x":
        assert len(line.encode()) > MAX_LINE_BYTES - 100


def test_values_that_cannot_be_truncated_are_omitted(pipe: RecorderPipe) -> None:
    pipe.record.emit("profile", many=list(range(5000)), few=1, **{"k" * 6000: 2})
    event = pipe.last()
    assert event.fields == {"few": 1, "cut": True}
    Recorder(slot="s" * 9000, fd=pipe.fd).mark("x", "y" * 9000)
    assert pipe.last().slot == "s" * 128


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(max_size=20),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2000) | st.binary(),
            lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=5),
            max_leaves=30,
        ),
    )
)
def test_any_fields_give_a_line_that_parses(fields: dict[str, Any]) -> None:
    pipe = RecorderPipe()
    try:
        pipe.record.emit("mark", **fields)
        (line,) = pipe.lines()
        assert len(line.encode()) < MAX_LINE_BYTES
        assert parse(line) is not None
    finally:
        pipe.close()


def test_invalid_numbers_in_the_environment_are_ignored() -> None:
    record = recorder({"RANK": "first", "OMPI_COMM_WORLD_RANK": "5", "STOKER_ATTEMPT": "", "STOKER_SLOT": "worker/2"})
    assert (record.rank, record.attempt, record.slot) == (5, 0, "worker/2")
    assert recorder({"RANK": "x"}).rank == 0
    assert recorder({"PMI_RANK": "2", "STOKER_ATTEMPT": "3"}).attempt == 3


def test_closed_or_full_output_is_no_error(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    record = Recorder(fd=write_fd)
    record.mark("unread")
    os.close(write_fd)
    record.mark("closed")
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    record = Recorder(fd=write_fd)
    for _ in range(100):
        record.mark("full", "x" * 3000)
    os.close(read_fd)
    os.close(write_fd)
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            Recorder(fd=full.fileno()).mark("no room")


def test_sequence_numbers_of_threads_and_forks(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as file:
        record = Recorder(fd=file.fileno())

        def write() -> None:
            for _ in range(200):
                record.mark("here")

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = [event for line in (tmp_path / "log").read_text().splitlines() if (event := parse(line))]
    assert [event.seq for event in events] == list(range(800))
    program = (
        "import os\nfrom stoker.telemetry import recorder\nr = recorder()\nr.mark('a')\nr.mark('b')\n"
        "r._lock.acquire()\npid = os.fork()\nif pid == 0:\n r.mark('c')\n os._exit(0)\n"
        "r._lock.release()\nos.waitpid(pid, 0)\nr.mark('d')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found = [event for line in done.stdout.splitlines() if (event := parse(line))]
    assert [(event.fields["name"], event.seq) for event in found] == [("a", 0), ("b", 1), ("c", 0), ("d", 2)]
    assert found[2].pid != found[0].pid == found[3].pid


def test_signal_handlers_may_record(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as file:
        record = Recorder(fd=file.fileno())
        before = signal.signal(signal.SIGALRM, lambda *_: record.mark("signal"))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            for _ in range(5000):
                record.mark("loop")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    events = [event for line in (tmp_path / "log").read_text().splitlines() if (event := parse(line))]
    assert len(events) > 5000
    assert sorted(event.seq for event in events) == list(range(len(events)))


def valid_line(**more: object) -> str:
    return PREFIX + json.dumps({"v": 1, "t": 1.5, "slot": "w/0", "rank": 0, "attempt": 0, "seq": 0, "k": "x", **more})


@pytest.mark.parametrize(
    "line",
    [
        "", "text", "@stoker", PREFIX, PREFIX + "{", PREFIX + "[]", PREFIX + "1",
        valid_line()[:-1], valid_line(v=2), valid_line(t="x"),
        valid_line(t=None), valid_line(rank=math.inf), valid_line(t=math.nan), valid_line(seq="1.5"),
        PREFIX + "[" * 100_000,
        PREFIX + '{"v": 1}', valid_line(seq=10**60).replace("0" * 60, "0" * 5000),
    ],
)  # fmt: skip
def test_invalid_lines_are_not_events(line: str) -> None:
    assert parse(line) is None


def test_event_after_tags_text_and_an_incomplete_event() -> None:
    assert parse(f"[1,3]<stdout>:{valid_line()}") is not None
    assert parse(f"{valid_line()[:40]}{valid_line(seq=4)}") is not None
    assert parse(f"{valid_line()}\x1b[0m") is not None
    assert parse(valid_line(detail="say @stoker {}")).fields == {"detail": "say @stoker {}"}  # type: ignore[union-attr]
    first, text, second = split_line(f"{valid_line()}and{valid_line(seq=1)}")
    assert isinstance(first, Event)
    assert text == "and"
    assert isinstance(second, Event)
    surrogate = parse(valid_line(shard="a\udc80"))
    assert surrogate is not None
    assert surrogate.fields["shard"] == "a?"


@given(
    st.text()
    | st.builds("".join, st.lists(st.text(max_size=5) | st.sampled_from([PREFIX, valid_line(), valid_line()[:30]])))
)
def test_splitting_a_line_loses_no_text(line: str) -> None:
    rest = "".join(part for part in split_line(line) if isinstance(part, str))
    assert rest == line.replace(valid_line(), "") or re.search(re.escape(PREFIX), line)
    parse(line)
