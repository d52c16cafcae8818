"""Who read what: a line for each rank's share of each step, and what of it counts once a training was resumed.

A line is written before the step's collectives. So no checkpoint of a step can exist before the lines of all ranks do,
and a line whose step was never finished is taken back by the resume that follows it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stoker.load.loader import find_one
from stoker.sampling.cursor import Cursor
from stoker.shards.scan import described
from stoker.storage.local import explained

Sample = tuple[int, int]
"""The number of a shard in its set, and of the sample in it."""


class Ledger:
    """Appends one rank's lines; a line that a kill tears is not read, and was not trained on."""

    def __init__(self, folder: str | Path, *, rank: int, attempt: int, session: int, cursor: Cursor) -> None:
        path = Path(folder).expanduser()
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._head = {"session": session, "attempt": attempt, "rank": rank}
        self._write(b"\n")  # ends a line that a kill tore
        self._append({"resume": True, "epoch": cursor.epoch, "consumed": cursor.consumed})

    def step(self, epoch: int, start: int, end: int, samples: Sequence[Sample]) -> None:
        """Write down what this rank reads of one step."""
        self._append({"epoch": epoch, "start": start, "end": end, "samples": samples})

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _append(self, fields: dict[str, Any]) -> None:
        self._write(json.dumps({**self._head, **fields}, separators=(",", ":")).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._fd, line) :]


class _Line(NamedTuple):
    """One rank's share of a step."""

    session: int
    epoch: int
    start: int
    end: int
    rank: int
    samples: list[Sample]


def effective(folder: str | Path) -> dict[int, list[Sample]]:
    """Read a folder of ledgers: the samples of each epoch that count, without those that a resume took back."""
    starts: dict[int, tuple[int, int]] = {}
    lines = []
    for raw in _read(Path(folder)):
        if raw.get("resume"):
            starts[raw["session"]] = (raw["epoch"], raw["consumed"])
        else:
            samples = [(shard, sample) for shard, sample in raw["samples"]]
            lines.append(_Line(raw["session"], raw["epoch"], raw["start"], raw["end"], raw["rank"], samples))
    epochs: dict[int, list[Sample]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: (line.epoch, line.start, line.rank)):
        later = [start for session, start in starts.items() if session > line.session]
        if not any(start <= (line.epoch, line.start) for start in later):
            epochs[line.epoch] += line.samples
    return dict(epochs)


def sessions(folder: str | Path) -> list[tuple[int, int]]:
    """Tell where each start of the training went on: epoch and samples consumed, in the order of the starts."""
    starts = {raw["session"]: (raw["epoch"], raw["consumed"]) for raw in _read(Path(folder)) if raw.get("resume")}
    return [starts[session] for session in sorted(starts)]


def next_session(folder: str | Path) -> int:
    """Number this start of the training: one more than the last in the folder, whatever the clocks say."""
    return 1 + max((raw["session"] for raw in _read(Path(folder).expanduser()) if "session" in raw), default=0)


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("rank-*.jsonl")):
        for text in path.read_text(errors="replace").split("\n"):
            try:
                raw = json.loads(text)
            except ValueError:
                continue  # torn by a kill, or the empty line after one
            if isinstance(raw, dict):
                yield raw


def main() -> None:
    """Tell whether every sample was trained on exactly once in each epoch; exit with 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m stoker.trainers.ledger", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", help="what --ledger named")
    parser.add_argument("--data", metavar="URL", required=True, help="the training set")
    args = parser.parse_args()
    manifest = described(find_one(args.data), jobs=1).manifest
    assert manifest is not None
    whole = {(shard, sample) for shard, one in enumerate(manifest.shards) for sample in range(one.samples)}
    epochs, starts = effective(args.folder), sessions(args.folder)
    odd = [epoch for epoch, samples in epochs.items() if sorted(samples) != sorted(whole)]
    for epoch, consumed in starts[1:]:
        sys.stdout.write(f"resumed in epoch {epoch}, after {consumed:,} of its {len(whole):,} samples\n")
    if odd or not epochs:
        sys.stdout.write(f"NOT exact: epochs {odd} of {len(epochs)}\n")
        sys.exit(1)
    sys.stdout.write(f"{len(epochs)} epochs: each of the {len(whole):,} samples exactly once in every epoch\n")


if __name__ == "__main__":
    main()
