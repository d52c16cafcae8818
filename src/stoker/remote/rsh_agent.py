"""Remote shell agent: run a command on the host of another slot, `"$STOKER_ASK" worker/1 hostname -f`, as ssh would.

The words after the slot are joined by spaces and run by a shell there. The output of the command goes to the log of
that slot; its exit code is ours; terminating this program cancels the command. Standard library only: the file is
copied next to the log of the calling slot.
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
    """Write a request, and exit with the exit code of its command."""
    if len(sys.argv) < 3:
        sys.exit("stoker: usage: $STOKER_ASK SLOT COMMAND, for example: worker/1 hostname")
    name = f"{time.time_ns():x}-{os.getpid()}"
    folder = Path(__file__).resolve().parent / "exec"
    request, exit_file = folder / f"{name}.json", folder / f"{name}.exit"

    def cancel(number: int, frame: object) -> None:  # noqa: ARG001
        request.unlink(missing_ok=True)
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, cancel)
    fields = {"slot": sys.argv[1], "command": " ".join(sys.argv[2:]), "cwd": str(Path.cwd()), "pid": os.getpid()}
    try:
        (folder / f".{name}").write_text(json.dumps(fields))
        (folder / f".{name}").rename(request)
        while not exit_file.exists():
            if not request.exists():
                sys.exit("stoker: the command was cancelled")
            time.sleep(POLL_S)
    except FileNotFoundError:
        sys.exit("stoker: this slot has exited")
    code = int(exit_file.read_text())
    request.unlink(missing_ok=True)
    exit_file.unlink(missing_ok=True)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
