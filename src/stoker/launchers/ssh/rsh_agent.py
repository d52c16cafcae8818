"""Has a command started on the host of another slot: `"$STOKER_ASK" worker/1 hostname -f`, as `ssh` would.

The words after the slot are joined by blanks, for a shell there. Its output goes into the log of that slot; its exit
code is ours. Who ends this takes the command back. Standard library alone: it lies beside the log of the slot that
asks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

POLL_S = 0.02


def main() -> NoReturn:
    """Ask, and wait for the answer."""
    if len(sys.argv) < 3:
        sys.exit("stoker: say which slot, and what to start there: worker/1 hostname")
    name = f"{time.time_ns():x}-{os.getpid()}"
    asks = Path(__file__).resolve().parent / "asks"
    ask, answer = asks / f"{name}.json", asks / f"{name}.exit"

    def take_back(number: int, frame: object) -> None:  # noqa: ARG001
        ask.unlink(missing_ok=True)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, take_back)
    words = {"slot": sys.argv[1], "command": " ".join(sys.argv[2:]), "cwd": str(Path.cwd()), "pid": os.getpid()}
    try:
        (asks / f".{name}").write_text(json.dumps(words))
        (asks / f".{name}").rename(ask)
        while not answer.exists():
            if not ask.exists():
                sys.exit("stoker: the command was taken back")
            time.sleep(POLL_S)
    except FileNotFoundError:
        sys.exit("stoker: nobody keeps this slot any more")
    code = int(answer.read_text())
    ask.unlink(missing_ok=True)
    answer.unlink(missing_ok=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
