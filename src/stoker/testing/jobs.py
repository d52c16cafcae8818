"""Jobs for tests: run a job on this machine to its end and inspect its status, log and events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.processes import wait_until
from stoker.jobs.run_folder import RunFolder, create_run
from stoker.jobs.spec import JobSpec, load_job, parse_job
from stoker.jobs.status import JobState, JobStatus
from stoker.launchers.local import LocalLauncher
from stoker.telemetry import reader
from stoker.telemetry.events import Event


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has finished: succeeded, failed or stopped."""

    run: RunFolder
    status: JobStatus

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run.folder

    @property
    def succeeded(self) -> bool:
        """Whether the job succeeded."""
        return self.status.state is JobState.SUCCEEDED

    @property
    def exit_code(self) -> int:
        """The exit code of the last attempt; negative: the signal that killed it."""
        return self.status.attempts[-1].code if self.status.attempts else 0

    @property
    def message(self) -> str:
        """Why the job failed; empty if it succeeded."""
        return self.status.message

    def log(self, slot: str | None = None) -> str:
        """Return the text that a slot such as `worker/0`, or all slots, printed in all attempts, without events."""
        lines = reader.read_run(self.run.logs).lines
        return "".join(f"{line.text}\n" for line in lines if slot in (None, line.log.slot))

    def events(self, kind: str | None = None, name: str | None = None) -> list[Event]:
        """Return the events of all slots, optionally of one kind (`scalar`, `span`, `mark` …) and name."""
        return read_events(self.run, kind, name)


def run_job(
    job: JobSpec | Mapping[str, Any] | str | Path,
    *,
    home: str | Path,
    overrides: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> FinishedRun:
    """Run a job on this machine, wait until it has finished, and return the run.

    `job` is the path of a job file, its content as a mapping, or a `Job`. Relative paths in it are relative to the
    current directory. The run folder is created in `home`, which takes the place of STOKER_HOME. `overrides` are
    assignments as for `--set`. After `timeout_s` the job is stopped and TimeoutError is raised. A failed job is no
    exception: check `succeeded` or `status`.
    """
    launcher = LocalLauncher()
    spec = launcher.resolve_paths(_load(job, overrides))
    plan = launcher.render(spec)
    run = create_run(spec, plan, home=Path(home).absolute())
    handle = launcher.start(plan, run)
    began = time.monotonic()
    try:
        is_finished = wait_until(lambda: launcher.status(handle).state.is_final, timeout_s)
    except BaseException:
        launcher.stop(handle)
        raise
    if not is_finished:
        launcher.stop(handle)
        raise TimeoutError(f"job {spec.name!r} was stopped after {time.monotonic() - began:.0f} s; logs: {run.logs}")
    return FinishedRun(run, launcher.status(handle))


def read_events(
    run: FinishedRun | RunFolder | str | Path, kind: str | None = None, name: str | None = None
) -> list[Event]:
    """Return the events of a run or run folder in order of time, optionally of one kind and name."""
    match run:
        case FinishedRun():
            logs = run.run.logs
        case RunFolder():
            logs = run.logs
        case _:
            logs = RunFolder(Path(run)).logs
    events = reader.read_events(logs)
    return [
        event for event in events if kind in (None, event.kind) and (name is None or event.fields.get("name") == name)
    ]


def _load(job: JobSpec | Mapping[str, Any] | str | Path, overrides: Sequence[str]) -> JobSpec:
    match job:
        case str() | Path():
            return load_job(job, overrides)
        case Mapping():
            return parse_job(json.dumps(dict(job)), "job", overrides)
        case _ if overrides:
            raise TypeError("overrides need a job file or a mapping, not a Job")
        case _:
            return job
