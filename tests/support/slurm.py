"""A Slurm cluster for tests: one controller and two nodes as processes of this machine, without root if need be."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stoker.core.processes import Process, find_processes_by_env, parent_pid, read_env, start
from stoker.jobs.run_folder import RunFolder
from tests.support.servers import free_port
from tests.support.waiting import eventually, wait_until

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
NODES = ("127.0.0.1", "127.0.0.2")
"""Their names are addresses of this machine, so that programs can connect to them without a name service."""
CPUS = 4
GPUS, GPU_DEVICES = 2, "/dev/null,/dev/zero"
"""Of each node; Slurm requires that the devices exist."""
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
GresTypes=gpu
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,defer_batch=no
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=2
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=127.0.0.[1-2] MaxTime=INFINITE State=UP PriorityTier=2
"""


@dataclass
class SlurmTestCluster:
    """The cluster: its directory with slurm.conf, and its daemons by name."""

    folder: Path
    daemons: dict[str, Process] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """The configuration, for SLURM_CONF."""
        return self.folder / "slurm.conf"

    def up(self, name: str) -> None:
        """Start a daemon: munged, slurmctld, or slurmd of a node."""
        folder = self.folder
        argv = {
            "munged": ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
            + [f"--{kind}={folder}/munge.{kind.partition('-')[0]}" for kind in ("socket", "pid-file", "log-file")]
            + [f"--seed-file={folder}/munge.seed"],
            "slurmctld": ["slurmctld", "-D"],
        }.get(name, ["slurmd", "-D", "-N", name])
        program = shutil.which(argv[0], path=PATH)
        assert program is not None
        with open(folder / f"{name}.out", "ab") as output:
            env = {**os.environ, "SLURM_CONF": str(self.config)}
            self.daemons[name] = start([program, *argv[1:]], env=env, stdout=output, stderr=output)

    def down(self, name: str) -> None:
        """Kill a daemon, and nothing else."""
        self.daemons.pop(name).stop(0)

    def run(self, *argv: str) -> str:
        """Run a program of Slurm; return its output, empty if it fails."""
        env = {**os.environ, "SLURM_CONF": str(self.config)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False).stdout.strip()

    def is_idle(self) -> bool:
        """Whether all nodes are free."""
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split() == ["idle"] * 2

    def hasten(self, run: RunFolder) -> None:
        """Start a requeued job now: Slurm waits for two minutes, so that nothing of the old one is under way.

        If a node gets the request to end the old job only after the new one has started there, its response removes the
        node from the new job.
        """
        job_id = (run.folder / "slurm.job").read_text().strip()
        wait_until(lambda: "BeginTime" in self.run("squeue", "-h", f"--jobs={job_id}", "--format=%r"), 90)
        wait_until(lambda: re.search(r"Agent queue size:\s*0\nAgent count:\s*0\n", self.run("sdiag")), 90)
        self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def lose_node(self, name: str, run: RunFolder) -> None:
        """Kill everything of a run on a node, and its daemon."""
        pids = find_processes_by_env({"SLURMD_NODENAME": name, "STOKER_RUN": run.id})
        pids += [pid for pid in find_processes_by_env({"SLURMD_NODENAME": name}) if pid not in pids]
        daemons = {parent for pid in pids if (parent := parent_pid(pid)) and "SLURMD_NODENAME" not in read_env(parent)}
        self.down(name)
        for pid in [*daemons, *pids]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmTestCluster]:
    """Start a cluster with two nodes."""
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program, path=PATH) is None:
            pytest.skip(f"no program {program!r}")
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIG.format(host=host, port=free_port(), user=getpass.getuser(), folder=folder)
    gres = ""
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
        settings = f"Port={free_port()} CPUs={CPUS} RealMemory=4096 Gres=gpu:{GPUS} State=UNKNOWN"
        text += f"NodeName={name} NodeHostname={host} NodeAddr={name} {settings}\n"
        gres += f"NodeName={name} Name=gpu File={GPU_DEVICES}\n"
    cluster = SlurmTestCluster(folder)
    cluster.config.write_text(text)
    (folder / "gres.conf").write_text(gres)
    try:
        cluster.up("munged")
        assert eventually((folder / "munge.socket").exists), (folder / "munged.out").read_text()
        for name in ("slurmctld", *NODES):
            cluster.up(name)
        assert eventually(cluster.is_idle), "".join(path.read_text() for path in folder.glob("*.out"))
        yield cluster
        cluster.run("scancel", "--state=PENDING", "--user", getpass.getuser())
        cluster.run("scancel", "--user", getpass.getuser())
        eventually(lambda: not cluster.run("squeue", "--noheader"), 30)
    finally:
        for name in reversed(list(cluster.daemons)):
            cluster.down(name)
