from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.telemetry.events import PREFIX, Event, Recorder
from stoker.telemetry.reader import Follower, Gap, RunFollower, gaps, log_files, read_log, read_run, text_of

TAGS = ["[1,0]<stdout>:", "[default3]:", "(worker pid=12, ip=10.0.0.1) ", "\x1b[36m(f pid=7)\x1b[0m ", " "]


def event_line(seq: int = 0, t: float = 1.0, name: str = "here", slot: str = "worker/0", attempt: int = 0) -> str:
    head = f'{{"v": 1, "t": {t}, "slot": "{slot}", "rank": 0, "attempt": {attempt}, "seq": {seq}, "k": "mark", '
    return f'{PREFIX}{head}"name": "{name}", "detail": ""}}'


def event(seq: int, t: float = 0.0, pid: int = 1, rank: int = 0, attempt: int = 0) -> Event:
    return Event(t=t or float(seq), slot="w/0", rank=rank, attempt=attempt, seq=seq, kind="mark", pid=pid)


def test_a_log_that_grows_is_given_once_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker-0.0.log"
    follower = Follower(path)
    assert follower.read() == ([], [])
    path.parent.mkdir()
    with path.open("ab", buffering=0) as file:
        file.write(b"one\n" + event_line(0).encode()[:20])
        assert follower.read() == (["one"], [])
        assert follower.read() == ([], [])
        file.write(event_line(0).encode()[20:] + b"\ntwo")
        log = follower.read()
        assert log.lines == []
        assert [found.seq for found in log.events] == [0]
        file.write("ä\r\n".encode()[:1])
        assert follower.read() == ([], [])
        file.write("ä\r\nrest".encode()[1:])
        assert follower.read().lines == ["twoä"]
    assert follower.read(final=True).lines == ["rest"]
    assert follower.read(final=True).lines == []


def test_a_log_that_is_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a longer line\nhalf")
    follower = Follower(path)
    assert follower.read().lines == ["a longer line"]
    path.write_text("short\n")
    assert follower.read().lines == ["short"]
    path.unlink()
    assert follower.read().lines == []
    (tmp_path / "new").write_text("another, longer than before\n")
    (tmp_path / "new").rename(path)
    assert follower.read().lines == ["another, longer than before"]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (5 << 20) + b"\nend\n")
    lines = read_log(path).lines
    assert sum(map(len, lines[:-1])) == 5 << 20
    assert len(lines) > 2
    assert lines[-1] == "end"


@pytest.mark.parametrize("tag", ["", *TAGS])
def test_tags_of_launchers_go_with_the_event(tag: str) -> None:
    assert text_of(tag + event_line()) is None
    assert text_of(f"{tag}{event_line()}\x1b[0m") is None
    assert text_of(f"{tag}loss 0.5 {event_line()}") == f"{tag}loss 0.5 "


def test_text_stays_text() -> None:
    for line in ("", "hello", "[1,0]<stdout>:", f"see {PREFIX}docs", event_line()[:-1]):
        assert text_of(line) == line
    assert text_of(event_line() + event_line(1)) is None


def test_text_before_an_event_on_its_line_is_given(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f" 50%|####{event_line()}\n{event_line(1)}\n\nplain\n{event_line(2)[:50]}\n{event_line(3)}\n")
    log = read_log(path)
    assert log.lines == [" 50%|####", "", "plain", event_line(2)[:50]]
    assert [found.seq for found in log.events] == [0, 1, 3]


def test_a_run_is_merged_by_time(tmp_path: Path) -> None:
    first, second = tmp_path / "worker-0.0.log", tmp_path / "data-server-10.1.log"
    first.write_text(f"early\n{event_line(0, 1.0)}\na\n{event_line(1, 3.0)}\nc\n")
    second.write_text(f"{event_line(0, 2.0, slot='')}\nb\n")
    for other in ("worker-0.log", "stoker.log", "worker-0.0.log.gz", "notes.txt"):
        (tmp_path / other).write_text(event_line(9) + "\n")
    log = read_run(tmp_path)
    assert [line.text for line in log.lines] == ["early", "a", "b", "c"]
    assert [found.t for found in log.events] == [1.0, 2.0, 3.0]
    assert (log.events[1].slot, log.events[1].attempt) == ("data-server/10", 1)
    assert [(file.slot, file.attempt) for file in log_files(tmp_path)] == [("worker/0", 0), ("data-server/10", 1)]


def test_a_run_that_grows_finds_new_slots(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path / "logs")
    assert follower.read() == ([], [])
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "worker-0.0.log"
    path.write_text(f"{event_line(0, 5.0)}\nx\n")
    assert [line.text for line in follower.read().lines] == ["x"]
    path.with_name("worker-1.0.log").write_text("y\n")
    with path.open("a") as file:
        file.write("z\n")
    log = follower.read()
    assert [(line.t, line.log.slot, line.text) for line in log.lines] == [
        (0.0, "worker/1", "y"),
        (5.0, "worker/0", "z"),
    ]


def test_gaps() -> None:
    assert gaps([]) == []
    assert gaps([event(0), event(1), event(2)]) == []
    assert gaps([event(0), event(3), event(4), event(6)]) == [Gap("w/0", 0, 0, 1, 1, 2), Gap("w/0", 0, 0, 1, 5, 5)]
    assert gaps([event(2)])[0].missing == 2
    assert gaps([event(1, 2.0), event(0, 3.0)]) == []  # a clock that was set back
    assert gaps([event(0), event(0, pid=2), event(1, pid=2), event(1)]) == []
    assert gaps([event(0, 1.0), event(1, 2.0), event(0, 3.0), event(2, 4.0)]) == [Gap("w/0", 0, 0, 1, 1, 1)]
    assert gaps([event(0, 1.0), event(1, 2.0), event(1, 2.0), event(2, 3.0)]) == []  # read twice


@settings(max_examples=60)
@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([event_line().encode() + b"\n", PREFIX.encode(), b"\n"])),
    st.data(),
)
def test_any_bytes_in_any_pieces_give_the_same(pieces: list[bytes], data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        whole = b"".join(pieces)
        follower = Follower(path)
        lines, events, at = [], [], 0
        with path.open("ab", buffering=0) as file:
            while at < len(whole):
                step = data.draw(st.integers(1, len(whole)))
                file.write(whole[at : at + step])
                at += step
                log = follower.read()
                lines += log.lines
                events += log.events
        log = follower.read(final=True)
        path.touch()
        assert read_log(path) == (lines + log.lines, events + log.events)


def test_what_a_recorder_writes_is_read(tmp_path: Path) -> None:
    with (tmp_path / "worker-0.0.log").open("ab") as file:
        record = Recorder(slot="worker/0", fd=file.fileno())
        for step in range(5):
            record.heartbeat(step)
    log = read_run(tmp_path)
    assert log.lines == []
    assert [found.fields["step"] for found in log.events] == list(range(5))
    assert gaps(log.events) == []


@pytest.mark.parametrize(("last", "lines"), [(0, []), (3, []), (4, ["ccc"]), (5, ["ccc"]), (8, ["bbb", "ccc"])])
def test_the_end_of_a_log_has_only_whole_lines(last: int, lines: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"aaa\nbbb\nccc\n")
    assert read_log(log, last=last).lines == lines
    assert read_log(log, last=100).lines == ["aaa", "bbb", "ccc"]
    assert read_log(tmp_path / "none", last=5).lines == []
