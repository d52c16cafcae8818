"""Log readers: tails of growing logs, merged runs, gaps in sequence numbers."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.telemetry import reader
from stoker.telemetry.events import PREFIX, Event, Recorder
from stoker.telemetry.log_times import LogTimes
from stoker.telemetry.progress_bars import last_state
from stoker.telemetry.reader import Gap, LogTail, RunTail, find_gaps, list_log_files, read_log, read_run, strip_events

TAGS = ["[1,0]<stdout>:", "[default3]:", "(worker pid=12, ip=10.0.0.1) ", "\x1b[36m(f pid=7)\x1b[0m ", " "]


def event_line(seq: int = 0, t: float = 1.0, name: str = "here", slot: str = "worker/0", attempt: int = 0) -> str:
    head = f'{{"v": 1, "t": {t}, "slot": "{slot}", "rank": 0, "attempt": {attempt}, "seq": {seq}, "k": "mark", '
    return f'{PREFIX}{head}"name": "{name}", "detail": ""}}'


def event(seq: int, t: float = 0.0, pid: int = 1, rank: int = 0, attempt: int = 0) -> Event:
    return Event(t=t or float(seq), slot="w/0", rank=rank, attempt=attempt, seq=seq, kind="mark", pid=pid)


def test_growing_log_is_returned_once_in_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.0.log"
    tail = LogTail(path)
    assert tail.read() == ([], [])
    path.parent.mkdir()
    with path.open("ab", buffering=0) as file:
        file.write(b"one\n" + event_line(0).encode()[:20])
        assert tail.read() == (["one"], [])
        assert tail.read() == ([], [])
        file.write(event_line(0).encode()[20:] + b"\ntwo")
        log = tail.read()
        assert log.lines == []
        assert [event.seq for event in log.events] == [0]
        file.write("ä\r\n".encode()[:1])
        assert tail.read() == ([], [])
        file.write("ä\r\nrest".encode()[1:])
        assert tail.read().lines == ["twoä"]
    assert tail.read(final=True).lines == ["rest"]
    assert tail.read(final=True).lines == []


def test_truncated_or_replaced_log_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a longer line\nhalf")
    tail = LogTail(path)
    assert tail.read().lines == ["a longer line"]
    path.write_text("short\n")
    assert tail.read().lines == ["short"]
    path.unlink()
    assert tail.read().lines == []
    (tmp_path / "new").write_text("another, longer than before\n")
    (tmp_path / "new").rename(path)
    assert tail.read().lines == ["another, longer than before"]


def test_line_without_a_newline_is_returned_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (5 << 20) + b"\nend\n")
    lines = read_log(path).lines
    assert sum(map(len, lines[:-1])) == 5 << 20
    assert len(lines) > 2
    assert lines[-1] == "end"


@pytest.mark.parametrize("tag", ["", *TAGS])
def test_launcher_prefixes_are_stripped_with_the_event(tag: str) -> None:
    assert strip_events(tag + event_line()) is None
    assert strip_events(f"{tag}{event_line()}\x1b[0m") is None
    assert strip_events(f"{tag}loss 0.5 {event_line()}") == f"{tag}loss 0.5 "


def test_text_without_events_is_unchanged() -> None:
    for line in ("", "hello", "[1,0]<stdout>:", f"see {PREFIX}docs", event_line()[:-1]):
        assert strip_events(line) == line
    assert strip_events(event_line() + event_line(1)) is None


def test_text_before_an_event_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f" 50%|####{event_line()}\n{event_line(1)}\n\nplain\n{event_line(2)[:50]}\n{event_line(3)}\n")
    log = read_log(path)
    assert log.lines == [" 50%|####", "", "plain", event_line(2)[:50]]
    assert [event.seq for event in log.events] == [0, 1, 3]


def test_run_is_merged_by_time(tmp_path: Path) -> None:
    first, second = tmp_path / "worker-0.1.log", tmp_path / "data-server-10.1.log"
    first.write_text(f"early\n{event_line(0, 1.0)}\na\n{event_line(1, 3.0)}\nc\n")
    second.write_text(f"{event_line(0, 2.0, slot='')}\nb\n")
    for other in ("worker-0.log", "stoker.log", "worker-0.0.log.gz", "notes.txt"):
        (tmp_path / other).write_text(event_line(9) + "\n")
    log = read_run(tmp_path)
    assert [line.text for line in log.lines] == ["early", "a", "b", "c"]
    assert [event.t for event in log.events] == [1.0, 2.0, 3.0]
    assert (log.events[1].slot, log.events[1].attempt) == ("data-server/10", 1)
    assert [(file.slot, file.attempt) for file in list_log_files(tmp_path)] == [("data-server/10", 1), ("worker/0", 1)]


def test_attempts_are_in_order_whatever_their_clocks(tmp_path: Path) -> None:
    (tmp_path / "worker-0.0.log").write_text(f"first\n{event_line(0, 9.0)}\nfirst again\n")
    (tmp_path / "worker-0.1.log").write_text(f"second\n{event_line(0, 5.0)}\nsecond again\n")
    expected = ["first", "first again", "second", "second again"]
    assert [line.text for line in read_run(tmp_path).lines] == expected
    assert [line.text for line in RunTail(tmp_path).lines(final=True)] == expected
    assert [line.text for line in RunTail(tmp_path, slot="worker/1").lines(final=True)] == []


def test_growing_run_finds_new_slots(tmp_path: Path) -> None:
    tail = RunTail(tmp_path / "logs")
    assert tail.read() == ([], [])
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "worker-0.0.log"
    path.write_text(f"{event_line(0, 5.0)}\nx\n")
    assert [line.text for line in tail.read().lines] == ["x"]
    path.with_name("worker-1.0.log").write_text("y\n")
    with path.open("a") as file:
        file.write("z\n")
    log = tail.read()
    assert [(line.t, line.log.slot, line.text) for line in log.lines] == [
        (0.0, "worker/1", "y"),
        (5.0, "worker/0", "z"),
    ]


def test_plain_text_is_not_searched_for_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_text(f"one\n{event_line()}\ntwo\n")
    search = Mock(wraps=last_state)
    monkeypatch.setattr(reader, "last_state", search)
    assert read_log(path).lines == ["one", "two"]
    search.assert_not_called()


def test_events_are_read_without_the_times_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker-0.0.log").write_text(f"one\n{event_line(0, 5.0)}\ntwo\n")
    monkeypatch.delattr(LogTimes, "refresh")
    tail = RunTail(tmp_path)
    assert [event.t for event in tail.events()] == [5.0]
    monkeypatch.undo()
    with (tmp_path / "worker-0.0.log").open("a") as file:
        file.write("three\n")
    assert [(line.t, line.text) for line in tail.lines()] == [(5.0, "three")]


def test_bars_of_unchanged_logs_are_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worker-0.0.log"
    path.write_bytes(b"\r10%\r20%")
    draw = Mock(wraps=last_state)
    monkeypatch.setattr(reader, "last_state", draw)
    tail = RunTail(tmp_path)
    states = []
    for written in (b"", b"", b"\r30%", b"", b"\n"):
        with path.open("ab") as file:
            file.write(written)
        lines = [line.text for line in tail.lines()]
        states.append([bar.text for bar in tail.changed_bars()] + lines)
    assert states == [["20%"], [], ["30%"], [], ["30%"]]
    assert draw.call_count == 3


def test_find_gaps() -> None:
    assert find_gaps([]) == []
    assert find_gaps([event(0), event(1), event(2)]) == []
    assert find_gaps([event(0), event(3), event(4), event(6)]) == [Gap("w/0", 0, 0, 1, 1, 2), Gap("w/0", 0, 0, 1, 5, 5)]
    assert find_gaps([event(2)])[0].missing == 2
    assert find_gaps([event(1, 2.0), event(0, 3.0)]) == []  # the clock was set back
    assert find_gaps([event(0), event(0, pid=2), event(1, pid=2), event(1)]) == []
    assert find_gaps([event(0, 1.0), event(1, 2.0), event(0, 3.0), event(2, 4.0)]) == [Gap("w/0", 0, 0, 1, 1, 1)]
    assert find_gaps([event(0, 1.0), event(1, 2.0), event(1, 2.0), event(2, 3.0)]) == []  # read twice


@settings(max_examples=60)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from([event_line().encode() + b"\n", PREFIX.encode(), b"\n", b"\r5%", b"\x1b[K"])
    ),
    st.data(),
)
def test_any_bytes_in_any_pieces_give_the_same_content(pieces: list[bytes], data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        whole = b"".join(pieces)
        tail = LogTail(path)
        lines, events, at = [], [], 0
        with path.open("ab", buffering=0) as file:
            while at < len(whole):
                step = data.draw(st.integers(1, len(whole)))
                file.write(whole[at : at + step])
                at += step
                log = tail.read()
                lines += log.lines
                events += log.events
        log = tail.read(final=True)
        path.touch()
        assert read_log(path) == (lines + log.lines, events + log.events)


def test_recorder_round_trip(tmp_path: Path) -> None:
    with (tmp_path / "worker-0.0.log").open("ab") as file:
        record = Recorder(slot="worker/0", fd=file.fileno())
        for step in range(5):
            record.heartbeat(step)
    log = read_run(tmp_path)
    assert log.lines == []
    assert [event.fields["step"] for event in log.events] == list(range(5))
    assert find_gaps(log.events) == []


@pytest.mark.parametrize(("last", "lines"), [(0, []), (3, []), (4, ["ccc"]), (5, ["ccc"]), (8, ["bbb", "ccc"])])
def test_last_bytes_of_a_log_in_complete_lines(last: int, lines: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"aaa\nbbb\nccc\n")
    assert read_log(log, last=last).lines == lines
    assert read_log(log, last=100).lines == ["aaa", "bbb", "ccc"]
    assert read_log(tmp_path / "none", last=5).lines == []
