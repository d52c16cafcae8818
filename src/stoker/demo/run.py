"""Walks the road: shows each command, runs it, and kills a rank on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from stoker.core.processes import Process, start
from stoker.demo.steps import EPOCHS, NAME, Road, Step
from stoker.errors import JobFailedError, UnavailableError
from stoker.jobs.run_folder import Run, find
from stoker.launchers.local import LocalLauncher
from stoker.telemetry.events import Event
from stoker.telemetry.reader import RunFollower

Say = Callable[[str], None]
SERVICE_S = 20.0


def walk(road: Road, folder: Path, say: Say) -> Run:
    """Go all the way; stop at the first command that fails."""
    for step in road.before():
        _do(step, folder, say)
    with ExitStack() as services:
        for step, url in zip(road.services(), (road.origin, road.cache), strict=True):
            services.enter_context(_serving(step, url, folder, say))
        (folder / "job.yaml").write_text(road.job)
        say(f"\n# The job file, job.yaml\n{road.job.rstrip()}")
        for step in road.planning():
            _do(step, folder, say)
        begin, follow = road.training()
        _do(begin, folder, say)
        run = find(NAME)
        services.callback(LocalLauncher().stop, run.handle)  # whatever happens from here on
        threading.Thread(target=_kill_a_rank, args=(run, say), daemon=True).start()
        _do(follow, folder, say)
        end = run.read_status()
        if len(end.attempts) < 2:
            how = f"{end.state}: {end.message}" if end.message else str(end.state)
            raise JobFailedError(f"a killed rank was not started again ({how})", where=run.folder)
        for step in road.after():
            _do(step, folder, say)
    return run


def _do(step: Step, folder: Path, say: Say) -> None:
    say(f"\n# {step.why}\n$ {step.line}")
    code = subprocess.run(_argv(step), cwd=folder, check=False).returncode
    if code != 0:
        raise JobFailedError(f"`{step.line}` ended with exit code {code}")


def _argv(step: Step) -> list[str]:
    """Run what is installed here, whatever the PATH has."""
    program, *words = step.argv
    return [sys.executable, *(["-m", "stoker"] if program == "stoker" else []), *words]


@contextmanager
def _serving(step: Step, url: str, folder: Path, say: Say) -> Iterator[Process]:
    """Run a server beside what follows, from when it answers."""
    say(f"\n# {step.why}\n$ {step.line} &")
    path = folder / f"{step.argv[2]}.log"
    with open(path, "wb") as log, start(_argv(step), cwd=folder, stdout=log, stderr=log) as one:
        deadline = time.monotonic() + SERVICE_S
        host, _, port = url.removeprefix("http://").partition(":")
        while not _answers(host, int(port)):
            if one.poll() is not None or time.monotonic() > deadline:
                said = path.read_text().strip() or "it says nothing"
                raise UnavailableError(f"`{step.line}` does not answer: {said}")
            time.sleep(0.02)
        yield one


def _answers(host: str, port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


def _kill_a_rank(run: Run, say: Say) -> None:
    """Kill rank 1 in the middle of the training, once there is a checkpoint to go on from."""
    logs = RunFollower(run.logs)
    heard: list[Event] = []
    while not run.read_status().state.is_final:
        heard += logs.events()
        if (pid := _due(heard)) is not None:
            say(f"\n# Now rank 1 is killed, in the middle of an epoch\n$ kill -9 {pid}\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _due(events: list[Event]) -> int | None:
    """Tell which process to kill, when it is time."""
    marks = {str(event.fields.get("name")): event.fields for event in events if event.kind == "mark"}
    beats = [event for event in events if event.kind == "heartbeat" and event.rank == 1]
    if not ({"start", "checkpoint"} <= marks.keys() and beats):
        return None
    saved, total = marks["checkpoint"]["step"], marks["start"]["total_steps"]
    # Not one of those at the end of an epoch: it shall go on in the middle of one.
    is_inside = saved % (total // EPOCHS) != 0 or saved >= 0.6 * total  # a small set has no others
    return int(beats[-1].fields["pid"]) if saved >= 0.4 * total and is_inside else None
