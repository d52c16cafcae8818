"""A process that has imported TensorFlow and forks a trainer for each request, which saves seconds per task.

Requests and replies are lines of JSON on standard input and output. TensorFlow must not execute anything before a fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Any

MODULES = ("tf_mirrored", "tf_ps", "tf_evaluator")


def start(request: dict[str, Any]) -> int:
    """Fork a task; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["env"])
        run(request["module"], request["args"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(71)


def run(name: str, argv: list[str]) -> None:
    """Run a trainer like `python -m`."""
    from stoker.trainers import tf_flags, watchdog

    module = import_module(f"stoker.trainers.{name}")
    watchdog.exit_now(module.main(tf_flags.parse_or_exit(argv, getattr(tf_flags, name.upper()))))


def poll(pid: int) -> int | None:
    """Return the exit code of a task; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    """Serve requests until standard input is closed."""
    for name in MODULES:
        import_module(f"stoker.trainers.{name}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        reply = start(request) if "module" in request else poll(request["poll"])
        sys.stdout.write(f"{json.dumps(reply)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
