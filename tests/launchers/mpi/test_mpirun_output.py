"""The parser of mpirun's tagged output, against a byte-exact model of Open MPI 4.1; the wrapper of a rank."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stoker.launchers.mpi.mpirun_output import TaggedLine, TagParser
from stoker.remote import mpi_rank
from stoker.remote.mpi_rank import MAX_LINE_BYTES, EscapingEncoder, LineEncoder
from stoker.telemetry.events import parse

CHUNK_BYTES, BUFFER_BYTES = 4096, 8192


def tag(rank: int, stream: str = "stdout") -> bytes:
    return f"[1,{rank}]<{stream}>:".encode()


def add_tags(rank: int, chunk: bytes) -> bytes:
    """What orte_iof_base_write_output writes for one read; it drops what does not fit."""
    body, last = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
    return (tag(rank) + body.replace(b"\n", b"\n" + tag(rank)) + last)[:BUFFER_BYTES]


def encode(pieces: list[bytes], flushes: list[bool]) -> bytes:
    encoder = EscapingEncoder()
    return b"".join(
        encoder.encode(piece) + (encoder.flush() if flush else b"")
        for piece, flush in zip(pieces, flushes, strict=True)
    )


def parse_output(data: bytes, sizes: random.Random) -> list[TaggedLine]:
    parser, lines = TagParser(), list[TaggedLine]()
    while data:
        size = sizes.randint(1, 9000)
        lines += parser.feed(data[:size])
        data = data[size:]
    return lines + parser.finish()


def split_lines(data: bytes) -> list[bytes]:
    *complete, rest = data.split(b"\n")
    return [*complete, *([rest] if rest else [])]


OUTPUT = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\n", b"\x10", b"]", b"<", b"[1,0]", b"<stdout>:", b"[1,2]<stdout>:", b"\x10n", b"\r"]),
    st.integers(0, 3000).map(lambda size: b"x" * size + b"\n"),
    st.integers(0, 3000).map(lambda count: b"1\n" * count),
)


@given(
    outputs=st.lists(st.lists(OUTPUT, max_size=12), min_size=1, max_size=4),
    seed=st.randoms(use_true_random=False),
)
def test_every_byte_of_every_rank_arrives_however_mpirun_splits_it(
    outputs: list[list[bytes]], seed: random.Random
) -> None:
    streams = {
        rank: encode(pieces, [seed.random() < 0.3 for _ in pieces])
        for rank, pieces in enumerate(outputs)
        if any(pieces)
    }
    written = b""
    while streams:
        rank = seed.choice(sorted(streams))
        size = min(CHUNK_BYTES, seed.choice([1, 5, 80, 1000, 4096]))
        written += add_tags(rank, streams[rank][:size])
        streams[rank] = streams[rank][size:]
        if not streams[rank]:
            del streams[rank]
    parsed = parse_output(written, seed)
    for rank, pieces in enumerate(outputs):
        assert [line.text for line in parsed if line.rank == rank] == split_lines(b"".join(pieces))
    assert all(line.rank is not None for line in parsed)


def test_long_lines_are_not_escaped() -> None:
    text = b"".join(b"a line of a training, such as programs print it, with a number: %d\n" % i for i in range(100))
    assert EscapingEncoder().encode(text) == text


def test_output_without_a_tag_is_from_mpirun() -> None:
    parser = TagParser()
    lines = parser.feed(b"mpirun says\n[1,0]<stdout>:half[1,1]<stderr>:whole\n----\n[1,0]<stdout>: a line\nunfinished")
    assert lines == [
        (None, "", b"mpirun says"),
        (1, "stderr", b"whole"),
        (None, "", b"----"),
        (0, "stdout", b"half a line"),
    ]
    assert parser.finish() == [(None, "", b"unfinished")]


def test_output_of_mpirun_after_a_flush_is_not_from_the_rank() -> None:
    encoder = EscapingEncoder()
    output = encoder.encode(b"1\n2\nhalf") + encoder.flush()
    parser = TagParser()
    lines = parser.feed(add_tags(0, output) + b"----\n" + add_tags(0, encoder.encode(b" a line\n")))
    assert lines == [(0, "stdout", b"1"), (0, "stdout", b"2"), (None, "", b"----"), (0, "stdout", b"half a line")]


def test_endless_line_is_returned_in_pieces() -> None:
    parser = TagParser()
    lines = [line for _ in range(300) for line in parser.feed(tag(0) + b"x" * 4096)]
    assert [len(line.text) > MAX_LINE_BYTES for line in lines] == [True]


def test_line_encoder_writes_complete_lines_with_their_rank() -> None:
    encoder = LineEncoder(3, 2)
    pieces = [b"half", b" a line", b'\n@stoker {"k": 1}\n\nmore', b"", b"\n"]
    output = [encoder.encode(piece) + encoder.flush() for piece in pieces]
    assert output == [b"", b"", b'[rank3]: half a line\n@stoker {"k": 1}\n[rank3]: \n', b"", b"[rank3]: more\n"]
    assert LineEncoder(0, 1).encode(b"a\nb\n") == b"a\nb\n"
    assert len(encoder.encode(b"x" * (MAX_LINE_BYTES + 1))) > MAX_LINE_BYTES


# --- The wrapper of a rank, without mpirun


def test_file_runs_alone_on_python_3_8() -> None:
    source = Path(mpi_rank.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    assert not any(line.startswith(("import stoker", "from stoker")) for line in source.splitlines())


def test_environment_and_exit_of_a_rank_started_by_pmi() -> None:
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "STOKER_ATTEMPT": "2"}
    words = [sys.executable, "-I", "-S", mpi_rank.__file__, "--ranks", "2", "--first", "1", "--", "nosuch"]
    script = 'echo "$RANK of $WORLD_SIZE in $STOKER_SLOT"; exit 7'
    done = subprocess.run([*words, "/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    output, event_line = done.stdout.replace("\x10n", "\n").splitlines()
    assert (done.returncode, output) == (7, "3 of 4 in worker/1")
    event = parse(event_line)
    assert event is not None
    assert (event.slot, event.rank, event.attempt) == ("worker/1", 3, 2)
    assert (event.fields["name"], event.fields["code"]) == (mpi_rank.RANK_EXIT_MARK, 7)
