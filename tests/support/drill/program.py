"""Program of a drill: the image trainer, slowed down, beside numbered lines of which it keeps a record.

Runs as a script in jobs. In the directory DRILL_DIR it leaves, for each attempt and rank:

- `lock.ATTEMPT.RANK`, locked for as long as the process lives; `overlap` if a rank of another attempt was alive;
- `begun.ATTEMPT.RANK` and `done.ATTEMPT.RANK`: the lines it was about to write to its log, and one byte for each line
  that it has written: a kill can hit between the three writes;
- `trained.ATTEMPT` after the first step.

Until the file `go` exists it trains slowly, and waits in the last epoch.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

STEP_S = 0.08
MAX_LINE_BYTES = 3000
"""Written at once: less than the 4096 bytes that a pipe does not break up."""
MAX_PAUSE_S = 0.04


def hold_lock(folder: Path, attempt: int, rank: int) -> None:
    """Lock a file until this process exits; record whether a rank of another attempt holds its lock."""
    lock = os.open(folder / f"lock.{attempt}.{rank}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for other in folder.glob("lock.*"):
        if other.name.split(".")[1] != str(attempt):
            with other.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    (folder / "overlap").open("a").write(f"{other.name} while {attempt}.{rank} starts\n")


def write_lines(folder: Path, attempt: int, rank: int) -> None:
    """Write numbered lines of random length to the log, without end."""
    draw = random.Random(f"{attempt}.{rank}")
    # First, because the check expects it for each file `begun`: a kill can hit in between.
    done = os.open(folder / f"done.{attempt}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begun = os.open(folder / f"begun.{attempt}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in itertools.count():
        line = f"drill-{rank} {number} ".encode() + draw.randbytes(draw.randrange(MAX_LINE_BYTES // 2)).hex().encode()
        for fd, data in ((begun, line + b"\n"), (1 + number % 2, line + b"\n"), (done, b".")):
            try:
                os.write(fd, data)
            except BrokenPipeError:  # what reads our output was killed
                return
        time.sleep(draw.uniform(0, MAX_PAUSE_S))


def slow_down(folder: Path, attempt: int, last_epoch: int) -> None:
    """Pause in each step of the trainer while there is no file `go`, and wait for it in the last epoch."""
    from stoker.trainers.ledger import Ledger

    go, trained, record = folder / "go", folder / f"trained.{attempt}", Ledger.step

    def step(ledger: Ledger, epoch: int, *args: Any) -> None:
        record(ledger, epoch, *args)
        trained.touch()
        if not go.exists():
            time.sleep(STEP_S)
        while epoch == last_epoch and not go.exists():
            time.sleep(STEP_S)

    Ledger.step = step  # type: ignore[assignment,method-assign]


def main() -> None:
    folder, attempt, rank = Path(os.environ["DRILL_DIR"]), int(os.environ["STOKER_ATTEMPT"]), int(os.environ["RANK"])
    hold_lock(folder, attempt, rank)
    threading.Thread(target=write_lines, args=(folder, attempt, rank), daemon=True).start()
    slow_down(folder, attempt, int(sys.argv[sys.argv.index("--epochs") + 1]) - 1)
    runpy.run_module("stoker.trainers.torch_image", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
