"""The ledger: which samples each rank saw at each step, and which of them count after resumes.

A line is written before the collectives of its step. So no checkpoint of a step can exist before the lines of all
ranks, and the next resume revokes the lines of steps that were not completed.
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

from stoker.load.planning import find_shard_set
from stoker.sampling.cursor import Cursor
from stoker.shards.scan import ensure_manifest
from stoker.storage.local import translate_os_errors

Sample = tuple[int, int]
"""Number of the shard in its shard set, and of the sample in the shard."""


class Ledger:
    """The ledger of one rank, a file to append to; a line truncated by a kill counts as not trained, and is ignored."""

    def __init__(self, folder: str | Path, *, rank: int, attempt: int, session: int, cursor: Cursor) -> None:
        path = Path(folder).expanduser()
        self._path = path / f"rank-{rank}.jsonl"
        with translate_os_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._head = {"session": session, "attempt": attempt, "rank": rank}
        self._write(b"\n")  # ends a line that a kill has truncated
        self._append({"resume": True, "epoch": cursor.epoch, "consumed": cursor.consumed})

    def step(self, epoch: int, start: int, end: int, samples: Sequence[Sample]) -> None:
        """Record the samples of one step on this rank."""
        self._append({"epoch": epoch, "start": start, "end": end, "samples": samples})

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _append(self, fields: dict[str, Any]) -> None:
        self._write(json.dumps({**self._head, **fields}, separators=(",", ":")).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        with translate_os_errors(self._path):
            while line:
                line = line[os.write(self._fd, line) :]


class _LedgerLine(NamedTuple):
    """The share of one rank in a step."""

    session: int
    epoch: int
    start: int
    end: int
    rank: int
    samples: list[Sample]


def effective_samples(folder: str | Path) -> dict[int, list[Sample]]:
    """Return the samples of each epoch that count, without those that a resume has revoked."""
    starts: dict[int, tuple[int, int]] = {}
    lines = []
    for raw in _read(Path(folder)):
        if raw.get("resume"):
            starts[raw["session"]] = (raw["epoch"], raw["consumed"])
        else:
            samples = [(shard, sample) for shard, sample in raw["samples"]]
            lines.append(_LedgerLine(raw["session"], raw["epoch"], raw["start"], raw["end"], raw["rank"], samples))
    epochs: dict[int, list[Sample]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: (line.epoch, line.start, line.rank)):
        later = [start for session, start in starts.items() if session > line.session]
        if not any(start <= (line.epoch, line.start) for start in later):
            epochs[line.epoch] += line.samples
    return dict(epochs)


def session_starts(folder: str | Path) -> list[tuple[int, int]]:
    """Return where each start of the training began: epoch and samples consumed, in order."""
    starts = {raw["session"]: (raw["epoch"], raw["consumed"]) for raw in _read(Path(folder)) if raw.get("resume")}
    return [starts[session] for session in sorted(starts)]


def next_session(folder: str | Path) -> int:
    """Return the number of this start of the training: one more than the last, independent of clocks."""
    return 1 + max((raw["session"] for raw in _read(Path(folder).expanduser()) if "session" in raw), default=0)


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("rank-*.jsonl")):
        for text in path.read_text(errors="replace").split("\n"):
            try:
                raw = json.loads(text)
            except ValueError:
                continue  # truncated by a kill, or the empty line after it
            if isinstance(raw, dict):
                yield raw


def main() -> None:
    """Check that every sample was trained on exactly once per epoch; exit with code 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m stoker.trainers.ledger", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", help="directory of --ledger")
    parser.add_argument("--data", metavar="URL", required=True, help="training set")
    args = parser.parse_args()
    manifest = ensure_manifest(find_shard_set(args.data), jobs=1).manifest
    assert manifest is not None
    dataset = {(shard, sample) for shard, entry in enumerate(manifest.shards) for sample in range(entry.samples)}
    epochs, starts = effective_samples(args.folder), session_starts(args.folder)
    wrong = [epoch for epoch, samples in epochs.items() if sorted(samples) != sorted(dataset)]
    for epoch, consumed in starts[1:]:
        sys.stdout.write(f"resumed in epoch {epoch}, after {consumed:,} of its {len(dataset):,} samples\n")
    if wrong or not epochs:
        sys.stdout.write(f"NOT exact: epochs {wrong} of {len(epochs)}\n")
        sys.exit(1)
    sys.stdout.write(f"{len(epochs)} epochs: each of the {len(dataset):,} samples exactly once in every epoch\n")


if __name__ == "__main__":
    main()
