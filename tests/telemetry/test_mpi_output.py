"""mpirun's tagged output, taken apart: against a model of what Open MPI 4.1 does, byte by byte."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker.telemetry import mpi_rank
from stoker.telemetry.events import parse
from stoker.telemetry.mpi_output import Tagged, TaggedLine
from stoker.telemetry.mpi_rank import LONGEST_LINE, Encoder, Lines

CHUNK, ROOM = 4096, 8192


def tag(rank: int, stream: str = "stdout") -> bytes:
    return f"[1,{rank}]<{stream}>:".encode()


def tagged(rank: int, chunk: bytes) -> bytes:
    """What orte_iof_base_write_output makes of what it read at once; it forgets what does not fit."""
    body, last = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
    return (tag(rank) + body.replace(b"\n", b"\n" + tag(rank)) + last)[:ROOM]


def encoded(pieces: list[bytes], pauses: list[bool]) -> bytes:
    encoder = Encoder()
    return b"".join(encoder.encode(piece) + (encoder.pause() if pause else b"") for piece, pause in zip(pieces, pauses))  # noqa: B905


def taken_apart(data: bytes, sizes: random.Random) -> list[TaggedLine]:
    one, found = Tagged(), list[TaggedLine]()
    while data:
        size = sizes.randint(1, 9000)
        found += one.feed(data[:size])
        data = data[size:]
    return found + one.finish()


def lines(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [*whole, *([rest] if rest else [])]


SAID = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\n", b"\x10", b"]", b"<", b"[1,0]", b"<stdout>:", b"[1,2]<stdout>:", b"\x10n", b"\r"]),
    st.integers(0, 3000).map(lambda size: b"x" * size + b"\n"),
    st.integers(0, 3000).map(lambda count: b"1\n" * count),
)


@given(
    said=st.lists(st.lists(SAID, max_size=12), min_size=1, max_size=4),
    seed=st.randoms(use_true_random=False),
)
def test_every_byte_of_every_rank_comes_out_whatever_mpirun_cuts(said: list[list[bytes]], seed: random.Random) -> None:
    streams = {
        rank: encoded(pieces, [seed.random() < 0.3 for _ in pieces]) for rank, pieces in enumerate(said) if any(pieces)
    }
    written = b""
    while streams:
        rank = seed.choice(sorted(streams))
        size = min(CHUNK, seed.choice([1, 5, 80, 1000, 4096]))
        written += tagged(rank, streams[rank][:size])
        streams[rank] = streams[rank][size:]
        if not streams[rank]:
            del streams[rank]
    found = taken_apart(written, seed)
    for rank, pieces in enumerate(said):
        assert [line.text for line in found if line.rank == rank] == lines(b"".join(pieces))
    assert all(line.rank is not None for line in found)


def test_what_a_program_prints_in_long_lines_is_not_changed() -> None:
    text = b"".join(b"a line of a training, such as programs print it, with a number: %d\n" % i for i in range(100))
    assert Encoder().encode(text) == text


def test_words_without_a_tag_are_mpiruns_own() -> None:
    one = Tagged()
    found = one.feed(b"mpirun says\n[1,0]<stdout>:half[1,1]<stderr>:whole\n----\n[1,0]<stdout>: a line\nunfinished")
    assert found == [
        (None, "", b"mpirun says"),
        (1, "stderr", b"whole"),
        (None, "", b"----"),
        (0, "stdout", b"half a line"),
    ]
    assert one.finish() == [(None, "", b"unfinished")]


def test_mpiruns_words_after_a_pause_are_not_the_ranks() -> None:
    encoder = Encoder()
    said = encoder.encode(b"1\n2\nhalf") + encoder.pause()
    one = Tagged()
    found = one.feed(tagged(0, said) + b"----\n" + tagged(0, encoder.encode(b" a line\n")))
    assert found == [(0, "stdout", b"1"), (0, "stdout", b"2"), (None, "", b"----"), (0, "stdout", b"half a line")]


def test_a_line_that_never_ends_is_given_in_pieces() -> None:
    one = Tagged()
    found = [line for _ in range(300) for line in one.feed(tag(0) + b"x" * 4096)]
    assert [len(line.text) > LONGEST_LINE for line in found] == [True]


def test_past_mpirun_lines_go_whole_and_with_their_rank() -> None:
    one = Lines(3, 2)
    pieces = [b"half", b" a line", b'\n@stoker {"k": 1}\n\nmore', b"", b"\n"]
    said = [one.encode(piece) + one.pause() for piece in pieces]
    assert said == [b"", b"", b'[rank3]: half a line\n@stoker {"k": 1}\n[rank3]: \n', b"", b"[rank3]: more\n"]
    assert Lines(0, 1).encode(b"a\nb\n") == b"a\nb\n"
    assert len(one.encode(b"x" * (LONGEST_LINE + 1))) > LONGEST_LINE


# --- What stands before a rank, without mpirun


def test_it_rides_into_old_pythons_and_imports_nothing_of_ours() -> None:
    source = Path(mpi_rank.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert not any(line.startswith(("import stoker", "from stoker")) for line in source.splitlines())


def test_a_rank_of_another_starter_and_its_end() -> None:
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "STOKER_ATTEMPT": "2"}
    words = [sys.executable, "-I", "-S", mpi_rank.__file__, "--ranks", "2", "--first", "1", "--", "nosuch"]
    script = 'echo "$RANK of $WORLD_SIZE in $STOKER_SLOT"; exit 7'
    done = subprocess.run([*words, "/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    said, told = done.stdout.replace("\x10n", "\n").splitlines()
    assert (done.returncode, said) == (7, "3 of 4 in worker/1")
    event = parse(told)
    assert event is not None
    assert (event.slot, event.rank, event.attempt) == ("worker/1", 3, 2)
    assert (event.fields["name"], event.fields["code"]) == (mpi_rank.EXIT, 7)
