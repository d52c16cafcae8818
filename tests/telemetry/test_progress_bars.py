"""Progress bars: their last state, from the bytes that programs really write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.telemetry.events import Recorder
from stoker.telemetry.progress_bars import last_state, strip_colours
from stoker.telemetry.reader import MAX_LINE_BYTES, LogTail, read_log

KERAS = """
import numpy, keras
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(numpy.zeros((64, 4)), numpy.zeros((64, 1)), batch_size=8, epochs=2)
"""
TQDM = (
    "\rtrain:   0%|          | 0/5 [00:00<?, ?it/s]\rtrain:  40%|████      | 2/5 [00:00<00:00,  9.05it/s]"
    "\rtrain: 100%|██████████| 5/5 [00:00<00:00,  9.06it/s]\n"
)
"""As tqdm 4 writes it."""


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain text", "plain text"),
        ("\x1b[31mred\x1b[0m stays as it is ", "\x1b[31mred\x1b[0m stays as it is "),
        ("windows\r", "windows"),
        (TQDM.rstrip("\n"), "train: 100%|██████████| 5/5 [00:00<00:00,  9.06it/s]"),
        ("100 of 100\r5 done", "5 done 100"),  # what is not overwritten stays
        ("a longer line\r             \rshort", "short"),
        ("50%\b\b\b60%\b\b\b\b\b\b70%", "70%"),
        ("\x1b[32mok\x1b[0m 1\r\x1b[32mok\x1b[0m 2", "\x1b[32mok\x1b[0m 2"),
        ("\x1b[1m\x1b[32mok\x1b[32m!\r", "\x1b[1m\x1b[32mok!\x1b[0m"),
        ("old text\r\x1b[2Knew", "new"),
        ("old text\rnew\x1b[K", "new"),
        ("inner: 100%\x1b[A\r           \x1b[A\router: 50%", "outer: 50%"),
        ("\b\r\x1b[K", ""),
    ],
)
def test_last_state(written: str, shown: str) -> None:
    assert last_state(written) == shown


@pytest.mark.parametrize("colours", [1, 200])
def test_colours_that_are_never_reset_do_not_accumulate(colours: int) -> None:
    line = "".join(f"\x1b[38;5;{number % colours}mx" for number in range(2_000)) + "\r"
    shown = last_state(line)
    assert strip_colours(shown) == "x" * 2_000
    assert len(shown) < 10 * len(line)


def test_keras_bar_ends_with_its_last_step() -> None:
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", KERAS], env=env, capture_output=True, text=False, check=True)
    lines = [last_state(line) for line in done.stdout.decode().split("\n") if line]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert [plain[0], plain[2]] == ["Epoch 1/2", "Epoch 2/2"]
    for line in (plain[1], plain[3]):
        assert re.fullmatch(r"8/8 ━+ \d+s \d+\S+/step - loss: \S+", line)


def test_reader_returns_the_last_state_and_leaves_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(f"begin\n{TQDM}end\n".encode())
    assert read_log(path).lines == ["begin", last_state(TQDM.rstrip("\n")), "end"]
    assert path.read_bytes() == f"begin\n{TQDM}end\n".encode()


def test_events_do_not_cut_a_bar_into_lines(tmp_path: Path) -> None:
    """An event ends the line of a bar with its own newline."""
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as log:
        record = Recorder(fd=log.fileno())
        for percent in (10, 20, 30):
            log.write(f"\r{percent}%".encode())
            record.heartbeat(percent)
        log.write(b"\r100%\n")
    content = read_log(path)
    assert content.lines == ["100%"]
    assert [event.fields["step"] for event in content.events] == [10, 20, 30]
    path.write_bytes(path.read_bytes().removesuffix(b"\r100%\n"))
    assert read_log(path).lines == ["30%"]


def test_bar_longer_than_the_longest_line_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    bar = b"".join(b"\r%7d of 9999999 %s" % (number, b"#" * 60) for number in range(50_000))
    assert len(bar) > 3 * MAX_LINE_BYTES
    path.write_bytes(bar + b"\nend\n")
    first, end = read_log(path).lines
    assert first == f"  49999 of 9999999 {'#' * 60}"
    assert end == "end"


def test_unfinished_bar_is_partial_until_it_ends(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "log")
    with tail.path.open("ab", buffering=0) as log:
        log.write(b"prompt without a newline")
        tail.read()
        assert tail.partial == ""
        log.write(b"\n\r10%")
        assert tail.read().lines == ["prompt without a newline"]
        assert tail.partial == "10%"
        Recorder(fd=log.fileno()).heartbeat(1)
        log.write(b"\r20%")
        assert tail.read().lines == []
        assert tail.partial == "20%"
        log.write(b"\r30%\n")
        assert tail.read().lines == ["30%"]
        assert tail.partial == ""
