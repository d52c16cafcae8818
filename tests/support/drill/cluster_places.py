"""Places of a drill on clusters: Ray and Slurm."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stoker.jobs.run_folder import RunFolder
from stoker.jobs.status import JobStatus
from stoker.launchers.slurm.launcher import SlurmLauncher
from tests.support.drill.faults import (
    Fault,
    command_name,
    find_programs,
    find_ranks,
    find_torchrun,
    killer,
    tagged_commands,
)
from tests.support.drill.place import Place
from tests.support.ray import RayTestCluster
from tests.support.slurm import NODES, SlurmTestCluster
from tests.support.ssh_runs import supervisors
from tests.support.waiting import wait_until

OUTAGE_S = 10


class RayPlace(Place):
    """A Ray cluster with two nodes, each with one worker."""

    def __init__(self, draw: random.Random, cluster: RayTestCluster) -> None:
        super().__init__(draw)
        self.cluster, self.on = cluster, f"ray://{cluster.target}"

    def job_keys(self, folder: Path) -> dict[str, Any]:
        return {"topology": "torchrun", "ray": {"strategy": "spread", "lost_after": OUTAGE_S + 20}}

    def faults(self) -> Sequence[Fault]:
        killed = {
            name: Fault(name, self.one_of(partial(self.find, name)), 2, cuts_logs=True)
            for name in ("driver", "actor", "slot daemon", "guard")
        }
        node = Fault("node lost", self.lose_node, 1, cuts_logs=True, needs_training=True)
        return [*self.common_faults(), Fault("torchrun", self.one_of(find_torchrun), 2), *killed.values(), node]

    def find(self, part: str, run: RunFolder) -> list[int]:
        """The processes of one part of a run on the cluster."""
        match part:
            case "driver":
                return self.cluster.processes(".stoker/driver.py", f"gcs://stoker-{run.id}")
            case "actor":
                return self.cluster.processes("ray::SlotActor")
            case _:
                pids = self.cluster.processes("stoker-slot-", "SlotDaemon")
                return [pid for pid in pids if ("guard" in command_name(pid)) == (part == "guard")]

    def everything(self, run: RunFolder) -> bool:
        watching = supervisors(run)
        parts = [pid for part in ("driver", "actor", "slot daemon", "guard") for pid in self.find(part, run)]
        slots = [pid for pid, _ in tagged_commands(run)]
        return bool(watching) and self.kill_shuffled([*watching, *parts, *slots])

    def lose_node(self, run: RunFolder) -> bool:
        node = self.cluster.nodes[1]
        if not find_ranks(run):
            return False
        attempts = len(run.read_status().attempts)
        node.down()
        wait_until(lambda: len(run.read_status().attempts) > attempts, 90)
        node.up()
        return True


class SlurmPlace(Place):
    """A Slurm cluster with two nodes. The batch script retries, and no process of ours runs elsewhere."""

    on = "slurm"
    may_lose_more_attempts = True

    def __init__(self, draw: random.Random, cluster: SlurmTestCluster) -> None:
        super().__init__(draw)
        self.cluster = cluster
        os.environ["SLURM_CONF"] = str(cluster.config)

    def job_keys(self, folder: Path) -> dict[str, Any]:
        return {"topology": "torchrun"}

    def faults(self) -> Sequence[Fault]:
        return [
            Fault("rank", self.one_of(find_ranks), 4),
            Fault("all ranks", killer(find_ranks), 2),
            Fault("torchrun", self.one_of(find_torchrun), 3),
            Fault("srun", self.one_of(partial(find_programs, name="srun")), 2),
            Fault("job requeued", self.requeue, 1, needs_training=True),
            Fault("node lost", self.lose_node, 1, needs_training=True),
        ]

    def read_status(self, run: RunFolder) -> JobStatus:
        return SlurmLauncher().status(run.handle)

    def requeue(self, run: RunFolder) -> bool:
        """Requeue the job as its owner would; Slurm ends it like a preempted one."""
        if not find_ranks(run):
            return False
        self.cluster.run("scontrol", "requeue", (run.folder / "slurm.job").read_text().strip())
        self.cluster.hasten(run)
        return True

    def lose_node(self, run: RunFolder) -> bool:
        if not find_ranks(run):
            return False
        self.cluster.lose_node(NODES[1], run)
        wait_until(lambda: "PENDING" in self.cluster.run("squeue", "--noheader", "--format=%T"), 120)
        self.cluster.up(NODES[1])
        wait_until(self.cluster.is_idle, 120)
        self.cluster.hasten(run)
        return True
