"""What a launch costs: jobs that do nothing, under stoker and under bare torchrun, here and on two ssh hosts."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from measure import STOKER, Contestant, Lab, Limit, Result, Versus, command, in_process, take_turns

if TYPE_CHECKING:
    from tests.support.hosts import Network

OURS, BARE = "stoker job run", "torchrun"
FAR_OURS, FAR_BARE = "stoker job run --on ssh, 2 hosts", "torchrun by ssh, 2 hosts"
MANY = 100
PODS = 1000


def run(lab: Lab) -> Result:
    folder = lab.work / "launch"
    folder.mkdir()
    (folder / "nothing.py").write_text("")
    program = {"script": str(folder / "nothing.py")}
    (folder / "job.yaml").write_text(json.dumps({"name": "nothing", "program": program, "processes_per_worker": 2}))
    home = folder / "home"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    contestants = [
        Contestant(
            name=OURS,
            act=lambda: command("env", f"STOKER_HOME={home}", STOKER, "job", "run", folder / "job.yaml"),
            clean=lambda: shutil.rmtree(home, ignore_errors=True),
            ours=True,
        ),
        Contestant(name=BARE, act=lambda: command(*torchrun, folder / "nothing.py")),
    ]
    notes = ["From the command to the shell's next prompt: supervisor, profiler and run folder included."]
    versus = [Versus(ours=OURS, peer=BARE)]
    with _two_hosts() as net:
        if isinstance(net, str):
            notes.append(f"Not measured, the launch on two ssh hosts: {net}.")
        else:
            contestants += _far(folder, home, net)
            versus.append(Versus(ours=FAR_OURS, peer=FAR_BARE))
            notes.append(
                "The two hosts are network namespaces of this machine, each with an sshd, and share its cores."
            )
        speeds, _ = take_turns(contestants, lab.rounds, 60)
    helps = [command(STOKER, "--help").seconds for _ in range(lab.rounds + 1)][1:]
    limits = [
        Limit(what="Added by stoker", value=_added(speeds, OURS, BARE), bound=1000, unit="ms"),
        Limit(what="`stoker --help`", value=1000 * statistics.median(helps), bound=300, unit="ms"),
        Limit(what=f"{MANY} slots on ssh hosts planned", value=_planning_ms(folder), bound=1000, unit="ms"),
        *(
            Limit(what=f"{PODS:,} workers of {topology} rendered", value=_rendering_ms(topology), bound=1000, unit="ms")
            for topology in ("torchrun", "tf-ps", "tf-mirrored", "mpi")
        ),
    ]
    if FAR_OURS in speeds:
        limits.append(
            Limit(what="Added on two ssh hosts", value=_added(speeds, FAR_OURS, FAR_BARE), bound=3000, unit="ms")
        )
    return Result(
        name="launch",
        title="Launching two ranks that do nothing",
        unit="launches/minute",
        contestants=contestants,
        speeds=speeds,
        versus=versus,
        limits=limits,
        notes=notes,
    )


def _added(speeds: dict[str, list[float]], ours: str, bare: str) -> float:
    """The median of what ours took longer, round by round, in milliseconds."""
    return 1000 * statistics.median(60 / a - 60 / b for a, b in zip(speeds[ours], speeds[bare], strict=True))


@contextmanager
def _two_hosts() -> Iterator[Network | str]:
    """Two hosts with an sshd, or why there are none."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from _pytest.outcomes import Skipped

    from tests.support.hosts import network

    with TemporaryDirectory() as folder:
        try:
            with network(Path(folder)) as found:
                yield found
        except Skipped as why:
            yield str(why)


def _far(folder: Path, home: Path, net: Network) -> list[Contestant]:
    """The same on two hosts: one rank on each, started from here."""
    project = folder / "project"
    project.mkdir()
    shutil.copy(folder / "nothing.py", project)
    ssh = {"hosts": ["node1", "node2"], "config": str(net.config), "workdir": str(folder / "there")}
    job = {"name": "far", "workers": 2, "program": {"script": "nothing.py"}, "ssh": {**ssh, "python": sys.executable}}
    (folder / "far.yaml").write_text(json.dumps(job))
    words = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1"
    words += f" --master-addr {net['node1'].address} --master-port 29517"
    lines = [
        f'ssh -F {net.config} node{rank + 1} {words} --node-rank {rank} {folder}/nothing.py & pids="$pids $!"'
        for rank in range(2)
    ]
    bare = "\n".join([*lines, "for pid in $pids; do wait $pid || exit 1; done"])

    def ours() -> object:
        return command("sh", "-c", f"cd {project} && STOKER_HOME={home} {STOKER} job run {folder}/far.yaml --on ssh")

    def clean() -> None:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(folder / "there", ignore_errors=True)

    return [
        Contestant(name=FAR_OURS, act=ours, clean=clean, ours=True),
        Contestant(name=FAR_BARE, act=lambda: command("sh", "-c", bare)),
    ]


def _planning_ms(folder: Path) -> float:
    """The time in which the commands of many slots are planned, once all is known of their hosts."""
    from stoker.core.spec import decode
    from stoker.jobs.spec import Job
    from stoker.jobs.topology import slots_of
    from stoker.launchers.ssh.client import Client
    from stoker.launchers.ssh.launcher import Look, Route, plan_of

    hosts = [f"node{number}" for number in range(MANY)]
    job = decode({"name": "many", "program": {"script": "nothing.py"}, "workers": MANY, "ssh": {"hosts": hosts}}, Job)
    looks = {host: Look(host, _found(host)) for host in hosts}
    routes = {host: Route(f"10.0.0.{number + 1}", f"eth{number}") for number, host in enumerate(hosts)}
    spread = dict(zip(slots_of(job), hosts, strict=True))
    before = Path.cwd()
    os.chdir(folder)
    try:
        return 1000 * in_process(lambda: plan_of(job, Client(), spread, looks, routes, 29500)).seconds
    finally:
        os.chdir(before)


def _found(host: str) -> dict[str, object]:
    """What an agent would tell of a host, each in some way unlike the others."""
    return {
        "workdir": f"/home/{host}/work",
        "python": f"/home/{host}/bin/python",
        "version": "3.11.7",
        "modules": {"torch": "2.13.0", "stoker": None},
        "identity": [],
        "cores": 8,
        "gpus": 0,
        "rsync": True,
        "skew": 0.0,
    }


def _rendering_ms(topology: str) -> float:
    """The time in which every Kubernetes object of a large job is made."""
    from stoker.core.spec import decode
    from stoker.jobs.spec import Job
    from stoker.launchers.kubernetes.launcher import KubernetesLauncher

    keys = {"name": "bench", "image": "trainer:v1", "program": {"module": "train"}, "workers": PODS}
    job = decode({**keys, "topology": topology}, Job)
    return 1000 * in_process(lambda: KubernetesLauncher().render(job)).seconds
