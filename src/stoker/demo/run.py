"""Run the demo: print each command, run it, and kill a rank during the training."""

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
from stoker.demo.steps import EPOCHS, NAME, Demo, DemoStep
from stoker.errors import JobFailedError, UnavailableError
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.launchers.local import LocalLauncher
from stoker.telemetry.events import Event
from stoker.telemetry.reader import RunTail

Print = Callable[[str], None]
SERVICE_TIMEOUT_S = 60.0


def run_demo(demo: Demo, folder: Path, echo: Print) -> RunFolder:
    """Run all steps in `folder` and return the run; raise JobFailedError for the first command that fails."""
    for step in demo.conversion_steps():
        _run_step(step, folder, echo)
    with ExitStack() as services:
        for step, url in zip(demo.services(), (demo.origin, demo.cache), strict=True):
            services.enter_context(_run_service(step, url, folder, echo))
        (folder / "job.yaml").write_text(demo.job_file)
        echo(f"\n# The job file, job.yaml\n{demo.job_file.rstrip()}")
        for step in demo.planning_steps():
            _run_step(step, folder, echo)
        start_job, follow_logs = demo.training_steps()
        _run_step(start_job, folder, echo)
        run = find_run(NAME)
        services.callback(LocalLauncher().stop, run.handle)
        threading.Thread(target=_kill_rank_1, args=(run, echo), daemon=True).start()
        _run_step(follow_logs, folder, echo)
        status = run.read_status()
        if len(status.attempts) < 2:
            state = f"{status.state}: {status.message}" if status.message else str(status.state)
            raise JobFailedError(f"the killed rank was not restarted ({state})", where=run.folder)
        for step in demo.report_steps():
            _run_step(step, folder, echo)
    return run


def _run_step(step: DemoStep, folder: Path, echo: Print) -> None:
    echo(f"\n# {step.title}\n$ {step.line}")
    code = subprocess.run(_argv(step), cwd=folder, check=False).returncode
    if code != 0:
        raise JobFailedError(f"`{step.line}` exited with code {code}")


def _argv(step: DemoStep) -> list[str]:
    """Return the command with this interpreter and this installation, whatever PATH contains."""
    program, *arguments = step.argv
    return [sys.executable, *(["-m", "stoker"] if program == "stoker" else []), *arguments]


@contextmanager
def _run_service(step: DemoStep, url: str, folder: Path, echo: Print) -> Iterator[Process]:
    """Run a server in the background; yield once it accepts connections."""
    echo(f"\n# {step.title}\n$ {step.line} &")
    path = folder / f"{step.argv[2]}.log"
    with open(path, "wb") as log, start(_argv(step), cwd=folder, stdout=log, stderr=log) as process:
        deadline = time.monotonic() + SERVICE_TIMEOUT_S
        host, _, port = url.removeprefix("http://").partition(":")
        while not _accepts_connections(host, int(port)):
            if process.poll() is not None or time.monotonic() > deadline:
                output = path.read_text().strip() or "no output"
                raise UnavailableError(f"`{step.line}` did not start: {output}")
            time.sleep(0.02)
        yield process


def _accepts_connections(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


def _kill_rank_1(run: RunFolder, echo: Print) -> None:
    """Kill rank 1 in the middle of an epoch, once there is a checkpoint to resume from."""
    follower = RunTail(run.logs)
    events: list[Event] = []
    while not run.read_status().state.is_final:
        events += follower.events()
        if (pid := _pid_to_kill(events)) is not None:
            echo(f"\n# Kill rank 1 in the middle of an epoch\n$ kill -9 {pid}\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _pid_to_kill(events: list[Event]) -> int | None:
    """Return the process of rank 1 if the newest checkpoint lies in the middle of an epoch, else None."""
    marks = {str(event.fields.get("name")): event.fields for event in events if event.kind == "mark"}
    heartbeats = [event for event in events if event.kind == "heartbeat" and event.rank == 1]
    if not ({"start", "checkpoint"} <= marks.keys() and heartbeats):
        return None
    saved, total = marks["checkpoint"]["step"], marks["start"]["total_steps"]
    is_mid_epoch = saved % (total // EPOCHS) != 0 or saved >= 0.6 * total  # small datasets have only epoch ends
    return int(heartbeats[-1].fields["pid"]) if saved >= 0.4 * total and is_mid_epoch else None
