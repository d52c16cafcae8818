"""Runs for tests of the commands that take one: real ones on this machine, and folders of finished ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder, create_run
from stoker.jobs.status import JobState, JobStatus, SlotStatus
from stoker.launchers.local import LocalLauncher
from tests.launchers.contract import job_of

SLEEP = "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done"


class Runs:
    """Starts runs on this machine, and writes the folders of runs that have finished."""

    def __init__(self) -> None:
        self.launcher = LocalLauncher()
        self.started: list[RunFolder] = []

    def start(self, command: str = SLEEP, **keys: Any) -> RunFolder:
        """Start a job; return its run."""
        job = job_of(command, **keys)
        rendered = self.launcher.render(job)
        run = create_run(job, rendered)
        self.launcher.start(rendered, run)
        self.started.append(run)
        return run

    def write(
        self, home: Path, run_id: str, state: JobState = JobState.SUCCEEDED, *, ended: float | None = None, **keys: Any
    ) -> RunFolder:
        """Write the folder of a run that this state was recorded for."""
        run = create_run(job_of("true", name=run_id.rsplit("-", 3)[0], **keys), {})
        folder = home / "runs" / run_id
        run.folder.rename(folder)
        run = RunFolder(folder)
        run.write("handle", f"local://{folder}\n".encode())
        now = time.time()
        slots = (SlotStatus(slot="worker/0", state=state),)
        run.write_status(JobStatus(state=state, slots=slots, began=(ended or now) - 60, ended=ended or now))
        return run

    def stop(self) -> None:
        """Stop what was started."""
        for run in self.started:
            if run.folder.exists():
                self.launcher.stop(run.handle)
