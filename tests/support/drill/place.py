"""Place of a drill: a launcher with the keys of its job and the faults that make sense there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobStatus
from tests.support.drill.faults import Fault, find_ranks, kill, killer, tagged_commands
from tests.support.ssh_runs import Machine, supervisors

Find = Callable[[RunFolder], list[int]]


class Place:
    """One launcher, and what can be killed there."""

    on = "local"
    detach = True
    """Whether runs are started with --detach."""
    may_lose_more_attempts = False
    """Whether a fault can end the attempts that follow it too, for example while a host cannot be reached."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def job_keys(self, folder: Path) -> dict[str, Any]:
        """The keys of the job file for this launcher."""
        raise NotImplementedError

    def faults(self) -> Sequence[Fault]:
        """The kinds of faults that this job can be hit by."""
        raise NotImplementedError

    def read_status(self, run: RunFolder) -> JobStatus:
        return run.read_status()

    def resume(self, run: RunFolder, launching: Machine) -> None:
        """Continue a run whose supervisor was killed."""
        done = launching.run("job", "run", "--resume", run.id, "--detach")
        assert done.returncode == 0, done.stderr

    def one_of(self, find: Find) -> Callable[[RunFolder], bool]:
        """Return a function that kills one of the processes that another one finds."""
        return lambda run: kill(self._draw(find(run)))

    def _draw(self, pids: list[int]) -> list[int]:
        return [self.draw.choice(sorted(pids))] if pids else []

    def everything(self, run: RunFolder) -> bool:
        """Kill the supervisor and all processes of slots, in any order, while there is a supervisor."""
        watching = supervisors(run)
        return bool(watching) and self.kill_shuffled([*watching, *(pid for pid, _ in tagged_commands(run))])

    def kill_shuffled(self, pids: list[int]) -> bool:
        """Kill processes in any order."""
        self.draw.shuffle(pids)
        return kill(pids)

    def common_faults(self) -> list[Fault]:
        return [
            Fault("rank", self.one_of(find_ranks), 4),
            Fault("all ranks", killer(find_ranks), 2),
            Fault("supervisor", killer(supervisors), 3, ends_supervisor=True, cuts_logs=self.on != "local"),
            Fault("everything at once", self.everything, 2, ends_supervisor=True, cuts_logs=True),
        ]
