"""Start the background process of a run, its supervisor or log follower, in a session of its own.

A `stoker` command forks the supervisor, because it has imported all that the supervisor needs. From any other program,
which may have threads, open files and state of its own, a new interpreter is started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, NoReturn

from stoker.core import command_process
from stoker.core.processes import defer_signal
from stoker.errors import UnavailableError
from stoker.jobs.run_folder import RunFolder
from stoker.launchers.supervise import supervisor

START_TIMEOUT_S = 10.0
LOG = "supervisor.log"


def start_supervisor(run: RunFolder, has_started: Callable[[], bool], *, reattach: bool = False) -> None:
    """Start the supervisor of a run and wait until it has taken over."""
    with open(run.folder / LOG, "a+b") as log:
        offset = log.seek(0, os.SEEK_END)
        if command_process.is_command and len(os.listdir("/proc/self/task")) == 1:
            _fork_supervisor(run, log, reattach)
        else:
            _start_module(log, supervisor.__name__, run, *(["--continue"] if reattach else []))
        _wait_for_start(run, log, offset, has_started)


def start_follower(run: RunFolder, has_started: Callable[[], bool], module: str) -> None:
    """Start a module that follows the logs of a run, and wait until it has taken over."""
    with open(run.folder / LOG, "a+b") as log:
        offset = log.seek(0, os.SEEK_END)
        _start_module(log, module, run)
        _wait_for_start(run, log, offset, has_started)


def _start_module(log: BinaryIO, module: str, run: RunFolder, *args: str) -> None:
    argv = [sys.executable, "-P", "-m", module, str(run.folder), *args]
    # In its own session from the start: a Ctrl-C in this terminal must not reach it.
    subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=False)


def _fork_supervisor(run: RunFolder, log: BinaryIO, reattach: bool) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with defer_signal(signal.SIGINT):  # in the children until they have their own session and handlers
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() == 0:  # an orphan, for which this command need not wait
                    _become_supervisor(run, log, reattach)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _become_supervisor(run: RunFolder, log: BinaryIO, reattach: bool) -> NoReturn:
    """Detach from the command that was forked, and supervise the run; never return into its code."""
    try:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # Not closed: objects of the command that own a descriptor could close one of ours with the same number later.
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            if name not in ("1", "2", str(nothing)):
                with suppress(OSError):  # the descriptor of the listing itself
                    os.fstat(int(name))
                    os.dup2(nothing, int(name), inheritable=name == "0")
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
        if not sys.flags.safe_path:  # as with `python -P`: no module of the user may shadow one that we import later
            del sys.path[0]
        supervisor.run_supervisor(run, reattach=reattach)
    except SystemExit as error:
        print(error.code, file=sys.stderr)  # noqa: T201 (into supervisor.log)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait_for_start(run: RunFolder, log: BinaryIO, offset: int, has_started: Callable[[], bool]) -> None:
    """Wait until the background process has taken over; raise UnavailableError if it logs an error instead."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not has_started():
        log.seek(offset)
        lines = log.read().decode(errors="replace").strip().splitlines()
        if (lines or time.monotonic() > deadline) and not has_started():  # it may have started and logged a remark
            reason = lines[-1] if lines else f"no response within {START_TIMEOUT_S:g} s"
            raise UnavailableError(f"the supervisor did not start: {reason}", where=run.folder / LOG)
        time.sleep(0.005)
