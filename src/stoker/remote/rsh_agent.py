"""Remote shell agent: run a command on the host of another slot, `"$STOKER_ASK" worker/1 hostname -f`, as ssh would.

The words after the slot are joined by spaces and run by a shell there. The output of the command goes to the log of
that slot; its exit code is ours; terminating this program cancels the command. Standard library only: the slot daemon
copies this file into the folder of the calling slot, together with its own address.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Send a request to the slot daemon, and exit with the exit code of its command."""
    if len(sys.argv) < 3:
        sys.exit("stoker: usage: $STOKER_ASK SLOT COMMAND, for example: worker/1 hostname")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    request = {"op": "exec", "slot": sys.argv[1], "command": " ".join(sys.argv[2:]), "cwd": str(Path.cwd())}
    try:
        address = Path(__file__).resolve().with_name("socket").read_text()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
            daemon.connect(f"\0{address}")
            daemon.sendall(json.dumps(request).encode() + b"\n")
            response = daemon.makefile("rb").readline()  # the end of the connection cancels the command
    except OSError:
        response = b""
    if not response:
        sys.exit("stoker: this slot has exited")
    code = int(response)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
