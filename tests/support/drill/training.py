"""Training of a drill: its job file, an undisturbed reference, and whether what it left behind is exact."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.testing import make_shards, run_job
from stoker.trainers.ledger import effective_samples
from tests.support.drill import program
from tests.support.training_drill import final_state

SAMPLES, EPOCHS, RANKS = 240, 8, 2
GRACE_S = 3


def write_drill_job(folder: Path, shards: Path, **keys: Any) -> Path:
    """Write the job file and its program, with ledger, checkpoints and records in a folder."""
    options = f"--model small --size 32 --global-batch-size 12 --epochs {EPOCHS} --deterministic --seed 3 --threads 1"
    options += f" --checkpoint-every-steps 3 --log-every 1s --ledger {folder / 'ledger'}"
    job = {
        "name": "drill",
        "workers": RANKS,
        "program": {"script": "program.py", "args": options.split()},
        "data": {"train": str(shards / "train"), "val": str(shards / "val")},
        "checkpoint": {"dir": str(folder / "checkpoints")},
        "env": {"OMP_NUM_THREADS": "1", "DRILL_DIR": str(folder / "drill")},
        "profile": {"every": 0},
        "retries": 100,
        "grace": GRACE_S,
        **keys,
    }
    work = folder / "work"
    for path in (work, folder / "drill"):
        path.mkdir(exist_ok=True)
    shutil.copy(program.__file__, work / "program.py")
    path = work / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def train_reference(folder: Path) -> Path:
    """Write shards to a folder, and run an undisturbed training on this machine."""
    make_shards(folder / "shards", samples=SAMPLES, val=20, classes=5, size=(40, 32))
    job = write_drill_job(folder, folder / "shards")
    (folder / "drill" / "go").touch()
    with contextlib.chdir(job.parent):
        run = run_job(job, home=folder / "stoker")
    assert run.succeeded, run.message
    check_training(folder, folder)
    return folder


def check_training(folder: Path, reference: Path) -> None:
    """Assert that every epoch has each sample once, attempts did not overlap, and the weights are the reference's."""
    assert not (folder / "drill" / "overlap").exists(), (folder / "drill" / "overlap").read_text()
    ledger = effective_samples(folder / "ledger")
    assert {epoch: (len(samples), len(set(samples))) for epoch, samples in ledger.items()} == dict.fromkeys(
        range(EPOCHS), (SAMPLES, SAMPLES)
    )
    expected, actual = final_state(reference), final_state(folder)
    assert expected.keys() == actual.keys()
    assert [name for name in expected if not expected[name].equal(actual[name])] == []


def check_logs(run: RunFolder, records: Path, *, cut_attempts: set[int]) -> int:
    """Assert that the logs have exactly the lines that the ranks wrote; return how many bytes that are.

    The logs of `cut_attempts` may lack bytes at their end: what was on its way was lost with a host or a pipe.
    """
    total = 0
    for path in sorted(records.glob("begun.*")):
        attempt, rank = map(int, path.name.split(".")[1:])
        logs = b"".join(log.read_bytes() for log in run.logs.glob(f"*.{attempt}.log"))
        mark = f"drill-{rank} ".encode()
        lines = [line[line.index(mark) :] for line in logs.split(b"\n")[:-1] if mark in line]
        begun = path.read_bytes().split(b"\n")[:-1]
        if attempt in cut_attempts and lines and begun[len(lines) - 1 : len(lines)] != lines[-1:]:
            assert begun[len(lines) - 1].startswith(lines.pop()), f"attempt {attempt}, rank {rank}: the last line"
        done = (records / f"done.{attempt}.{rank}").stat().st_size
        assert lines == begun[: len(lines)], f"attempt {attempt}, rank {rank}: {first_difference(lines, begun)}"
        assert attempt in cut_attempts or len(lines) >= done, f"attempt {attempt}, rank {rank}: {len(lines)} of {done}"
        total += sum(map(len, lines)) + len(lines)
    return total


def first_difference(lines: list[bytes], expected: list[bytes]) -> str:
    """Describe the first line that is not the expected one."""
    number = next(n for n, line in enumerate(lines) if n >= len(expected) or line != expected[n])
    return f"line {number} is {lines[number][:60]!r}, expected {expected[number : number + 1]!r:.60}"
