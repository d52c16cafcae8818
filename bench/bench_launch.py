"""Benchmark the launch of an empty job with stoker and with plain torchrun, locally and on two SSH hosts."""

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

from many_slots import start_slots
from measure import (
    STOKER,
    BenchContext,
    BenchResult,
    Comparison,
    Implementation,
    Limit,
    run_rounds,
    time_call,
    time_command,
)

if TYPE_CHECKING:
    from tests.support.hosts import Network

OURS, PLAIN = "stoker job run", "torchrun"
SSH_OURS, SSH_PLAIN = "stoker job run --on ssh, 2 hosts", "torchrun over ssh, 2 hosts"
BASELINE = os.environ.get("STOKER_BENCH_BASELINE", "")
"""`src` folder of another commit, whose launches are then measured too."""
BASELINE_SUFFIX = ", baseline"
SLOTS = 100
MEMORY_SLOTS = 64
PODS = 1000


def run(context: BenchContext) -> BenchResult:
    folder = context.work / "launch"
    folder.mkdir()
    (folder / "nothing.py").write_text("")
    program = {"script": str(folder / "nothing.py")}
    (folder / "job.yaml").write_text(json.dumps({"name": "nothing", "program": program, "processes_per_worker": 2}))
    home = folder / "home"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    implementations = [
        *_stoker_implementations(OURS, f"STOKER_HOME={home} {STOKER} job run {folder}/job.yaml", [home]),
        Implementation(name=PLAIN, run=lambda: time_command(*torchrun, folder / "nothing.py")),
    ]
    notes = ["Wall time of the whole command, including supervisor, profiler and run folder."]
    comparisons = [Comparison(ours=OURS, peer=PLAIN)]
    with _start_two_hosts() as net:
        if isinstance(net, str):
            notes.append(f"The launch on two SSH hosts was not measured: {net}.")
        else:
            implementations += _ssh_implementations(folder, home, net)
            comparisons.append(Comparison(ours=SSH_OURS, peer=SSH_PLAIN))
            notes.append(
                "The two hosts are network namespaces of this machine, each with its own sshd; they share its cores."
            )
        speeds, _ = run_rounds(implementations, context.rounds, 60)
        notes.append(f"Memory of our own processes with {MEMORY_SLOTS} slots: {start_slots(folder, MEMORY_SLOTS)}.")
        if not isinstance(net, str):
            many = start_slots(folder, SLOTS, net)
            notes[-1] += f" On two SSH hosts: {start_slots(folder, MEMORY_SLOTS, net)}; with {SLOTS} slots: {many}."
    helps = [time_command(STOKER, "--help").seconds for _ in range(context.rounds + 1)][1:]
    limits = [
        Limit(what="Overhead of stoker", value=_added_ms(speeds, OURS, PLAIN), bound=1000, unit="ms"),
        Limit(what="`stoker --help`", value=1000 * statistics.median(helps), bound=300, unit="ms"),
        Limit(what=f"Planning {SLOTS} slots on SSH hosts", value=_time_planning_ms(folder), bound=1000, unit="ms"),
        *(
            Limit(
                what=f"Rendering {PODS:,} workers of {topology}",
                value=_time_rendering_ms(topology),
                bound=1000,
                unit="ms",
            )
            for topology in ("torchrun", "tf-ps", "tf-mirrored", "mpi")
        ),
    ]
    if SSH_OURS in speeds:
        limits += [
            Limit(
                what="Overhead on two SSH hosts", value=_added_ms(speeds, SSH_OURS, SSH_PLAIN), bound=3000, unit="ms"
            ),
            Limit(what=f"Start of {SLOTS} slots on two SSH hosts", value=many.seconds, bound=60, unit="s"),
        ]
    limits += [
        Limit(
            what=f"Overhead of {ours}, relative to the baseline",
            value=100 * _added_ms(speeds, ours, bare) / _added_ms(speeds, f"{ours}{BASELINE_SUFFIX}", bare),
            bound=65,
            unit="%",
        )
        for ours, bare in ((OURS, PLAIN), (SSH_OURS, SSH_PLAIN))
        if f"{ours}{BASELINE_SUFFIX}" in speeds
    ]
    return BenchResult(
        name="launch",
        title="Launch two ranks that do nothing",
        unit="launches/minute",
        implementations=implementations,
        speeds=speeds,
        comparisons=comparisons,
        limits=limits,
        notes=notes,
    )


def _added_ms(speeds: dict[str, list[float]], ours: str, bare: str) -> float:
    """Return the median over the rounds of the additional time of ours, in milliseconds."""
    return 1000 * statistics.median(60 / a - 60 / b for a, b in zip(speeds[ours], speeds[bare], strict=True))


@contextmanager
def _start_two_hosts() -> Iterator[Network | str]:
    """Yield two hosts with an sshd, or the reason why there are none."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from _pytest.outcomes import Skipped

    from tests.support.hosts import network

    with TemporaryDirectory() as folder:
        try:
            with network(Path(folder)) as hosts:
                yield hosts
        except Skipped as reason:
            yield str(reason)


def _ssh_implementations(folder: Path, home: Path, net: Network) -> list[Implementation]:
    """Return the implementations for two hosts with one rank each, started from this machine."""
    project = folder / "project"
    project.mkdir()
    shutil.copy(folder / "nothing.py", project)
    ssh = {"hosts": ["node1", "node2"], "config": str(net.config), "workdir": str(folder / "remote")}
    job = {"name": "far", "workers": 2, "program": {"script": "nothing.py"}, "ssh": {**ssh, "python": sys.executable}}
    (folder / "far.yaml").write_text(json.dumps(job))
    words = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1"
    words += f" --master-addr {net['node1'].address} --master-port 29517"
    lines = [
        f'ssh -F {net.config} node{rank + 1} {words} --node-rank {rank} {folder}/nothing.py & pids="$pids $!"'
        for rank in range(2)
    ]
    bare = "\n".join([*lines, "for pid in $pids; do wait $pid || exit 1; done"])

    command = f"cd {project} && STOKER_HOME={home} {STOKER} job run {folder}/far.yaml --on ssh"
    return [
        *_stoker_implementations(SSH_OURS, command, [home, folder / "remote"]),
        Implementation(name=SSH_PLAIN, run=lambda: time_command("sh", "-c", bare)),
    ]


def _stoker_implementations(name: str, command: str, outputs: list[Path]) -> list[Implementation]:
    """Return ours, and the baseline if there is one; both with bytecode, as after an installation."""

    def clean() -> None:
        for output in outputs:
            shutil.rmtree(output, ignore_errors=True)

    command = f"unset PYTHONDONTWRITEBYTECODE; {command}"
    ours = Implementation(name=name, run=lambda: time_command("sh", "-c", command), cleanup=clean, ours=True)
    if not BASELINE:
        return [ours]
    # Also for the profiler on the hosts.
    old = f"export PYTHONPATH={BASELINE}; {command} --set env.PYTHONPATH={BASELINE}"
    baseline = Implementation(name=f"{name}{BASELINE_SUFFIX}", run=lambda: time_command("sh", "-c", old), cleanup=clean)
    return [ours, baseline]


def _time_planning_ms(folder: Path) -> float:
    """Return the time to plan the commands of many slots when the facts of all hosts are known."""
    from stoker.core.spec import decode
    from stoker.jobs.spec import JobSpec
    from stoker.jobs.topology import list_slots
    from stoker.launchers.ssh.client import SshClient
    from stoker.launchers.ssh.launcher import build_plan
    from stoker.launchers.ssh.preflight import HostFacts, Route

    hosts = [f"node{number}" for number in range(SLOTS)]
    job = decode(
        {"name": "many", "program": {"script": "nothing.py"}, "workers": SLOTS, "ssh": {"hosts": hosts}}, JobSpec
    )
    facts = {host: HostFacts(host, _host_facts(host)) for host in hosts}
    routes = {host: Route(f"10.0.0.{number + 1}", f"eth{number}") for number, host in enumerate(hosts)}
    placement = dict(zip(list_slots(job), hosts, strict=True))
    before = Path.cwd()
    os.chdir(folder)
    try:
        return 1000 * time_call(lambda: build_plan(job, SshClient(), placement, facts, routes, 29500)).seconds
    finally:
        os.chdir(before)


def _host_facts(host: str) -> dict[str, object]:
    """Return what the host probe would report; each host differs from the others."""
    return {
        "workdir": f"/home/{host}/work",
        "python": f"/home/{host}/bin/python",
        "version": "3.11.7",
        "modules": {"torch": "2.13.0", "stoker": None},
        "identity": [],
        "cores": 8,
        "gpus": 0,
        "rsync": True,
        "clock_skew_s": 0.0,
    }


def _time_rendering_ms(topology: str) -> float:
    """Return the time to render all Kubernetes objects of a large job."""
    from stoker.core.spec import decode
    from stoker.jobs.spec import JobSpec
    from stoker.launchers.kubernetes.launcher import KubernetesLauncher

    keys = {"name": "bench", "image": "trainer:v1", "program": {"module": "train"}, "workers": PODS}
    job = decode({**keys, "topology": topology}, JobSpec)
    return 1000 * time_call(lambda: KubernetesLauncher().render(job)).seconds
