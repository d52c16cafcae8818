"""Drill: run one training, hit it with the faults that its seed draws, and check what it left behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stoker.core.processes import find_processes_by_env
from stoker.jobs.run_folder import RunFolder, find_run
from stoker.jobs.status import JobState, JobStatus
from stoker.launchers.supervise.supervisor import supervisor_pid
from tests.support.drill.faults import Fault
from tests.support.drill.place import Place
from tests.support.drill.training import RANKS, check_logs, check_training, write_drill_job
from tests.support.ray import processes_matching
from tests.support.ssh_runs import Machine
from tests.support.waiting import wait_until

HIT_TIMEOUT_S = 120.0
END_TIMEOUT_S = 180.0
EARLY = 0.5
"""How often a fault does not wait until the ranks train again after the last one."""
MAX_RETRIES = 2
"""Faults that end an attempt before the supervisor is killed: its pauses between attempts become longer."""


class Drill:
    """One job, and the faults that hit it."""

    def __init__(self, place: Place, launching: Machine, folder: Path) -> None:
        self.place, self.draw, self.launching, self.folder = place, place.draw, launching, folder
        self.records = folder / "drill"
        self.hits: Counter[str] = Counter()
        self.fatal_hits = 0
        self.cut_attempts: set[int] = set()
        self.log_bytes = 0

    def run(self, reference: Path, faults: int) -> None:
        """Run the job to its end with this many faults, and check everything."""
        run = self.start(write_drill_job(self.folder, reference / "shards", **self.place.job_keys(self.folder)))
        begun = -1
        for fault in list(self.draw_faults(faults)):
            self.wait_for_moment(run, fault, begun)
            begun = self.newest("lock") if fault.ends_attempt else begun
            self.inject(run, fault)
        (self.records / "go").touch()
        wait_until(lambda: self.status(run).state.is_final, END_TIMEOUT_S)
        self.check(run, reference)

    def start(self, job: Path) -> RunFolder:
        argv = ["job", "run", job, "--on", self.place.on]
        if self.place.detach:
            done = self.launching.run(*argv, "--detach")
            assert done.returncode == 0, done.stderr
        else:
            self.launching.start(*argv)
            wait_until(lambda: any(self.folder.glob("stoker/runs/*/handle")))
        return find_run(None)

    def draw_faults(self, count: int) -> Iterator[Fault]:
        """Draw faults by their weights; those that end the supervisor come often enough."""
        faults = self.place.faults()
        resets = [fault for fault in faults if fault.ends_supervisor]
        retries = 0
        for _ in range(count):
            candidates = resets if resets and retries >= MAX_RETRIES else faults
            fault = self.draw.choices(candidates, [fault.weight for fault in candidates])[0]
            retries = 0 if fault.ends_supervisor else retries + fault.ends_attempt
            yield fault

    def wait_for_moment(self, run: RunFolder, fault: Fault, begun: int) -> None:
        """Wait for a random time, usually after the ranks have made a step since the last fault."""
        is_early = self.draw.random() < EARLY and not fault.needs_training
        pause_s = self.draw.uniform(0, 3 if is_early else 1.5)
        if not is_early:
            wait_until(lambda: self.newest("trained") > begun or self.status(run).state.is_final, HIT_TIMEOUT_S)
        time.sleep(pause_s)

    def inject(self, run: RunFolder, fault: Fault) -> None:
        """Hit the run, as soon as there is something to hit, and resume it if that takes a command."""
        attempt = run.read_status().attempt
        wait_until(lambda: fault.inject(run) or self.status(run).state.is_final, HIT_TIMEOUT_S)
        status = self.status(run)
        assert not status.state.is_final, f"{status.state} before fault {fault.name}: {status.message}"
        self.hits[fault.name] += 1
        self.fatal_hits += fault.ends_attempt
        if fault.cuts_logs:
            self.cut_attempts |= {attempt, run.read_status().attempt, self.newest("lock")}
        if fault.ends_supervisor:
            wait_until(lambda: supervisor_pid(run) is None)
            self.place.resume(run, self.launching)

    def status(self, run: RunFolder) -> JobStatus:
        return self.place.read_status(run)

    def newest(self, kind: str) -> int:
        """The newest attempt whose ranks have left a record of this kind."""
        return max((int(path.name.split(".")[1]) for path in self.records.glob(f"{kind}.*")), default=-1)

    def check(self, run: RunFolder, reference: Path) -> None:
        status = self.status(run)
        assert status.state is JobState.SUCCEEDED, status.message
        wait_until(lambda: not self.survivors(run), 30)
        check_training(self.folder, reference)
        self.log_bytes = check_logs(run, self.records, cut_attempts=self.cut_attempts)
        last = [self.records / f"done.{self.newest('lock')}.{rank}" for rank in range(RANKS)]
        assert all(path.stat().st_size for path in last)
        if not self.place.may_lose_more_attempts:
            assert len(status.attempts) <= 1 + self.fatal_hits, status.attempts

    def survivors(self, run: RunFolder) -> list[int]:
        """All processes of the run, in any process namespace."""
        return [*find_processes_by_env({"STOKER_RUN": run.id}), *processes_matching(run.id)]
