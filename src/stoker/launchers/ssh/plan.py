"""What the ssh launcher starts, as a value."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping

import msgspec

from stoker.core.spec import load
from stoker.jobs.run_folder import Run
from stoker.jobs.topologies.tensorflow import at_ports
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import LocalPlan, moved
from stoker.launchers.ssh.client import Client

FAR = "far"
"""The folder of what is known of slots elsewhere, in that of the run."""


PORTS = range(20000, 29500)
"""Where attempts meet but the first: below the first ports of all jobs, and those that the kernel gives to clients."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of one host."""

    workdir: str
    python: str
    copies: bool
    """Whether the working folder is copied there; not where it is that very folder."""
    rsync: bool = False
    profiler: bool = False
    """Whether the profiler is sent along, for want of stoker there."""
    mpi: bool = False
    """Whether what stands between mpirun and a rank is sent along."""


class SshPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, on which host, and what is copied there before."""

    places: dict[str, Place]
    standby: tuple[str, ...] = ()
    """Slots without a command: on their hosts another slot has commands started, by the program `$STOKER_ASK`."""
    standby_env: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """What commands in them find, by slot."""
    client: Client
    source: str
    exclude: tuple[str, ...] = ()
    setup: str | None = None
    modules: tuple[str, ...] = ()
    """What Python must have there once `setup` is done."""
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0
    keeps_port: bool = False
    """Whether the job names the port; else every attempt meets at another one, where nothing of the last can be."""


def command_at(plan: SshPlan, slot: Slot, run: str, attempt: int) -> Command:
    """Give the command of a slot in an attempt: nothing of the last one can be where it meets, nor another job."""
    command = plan.slots[str(slot)]
    if not attempt or plan.keeps_port:
        return command
    start = zlib.crc32(f"{run}.{attempt}".encode())
    if not plan.ports:
        return moved(command, plan.port, PORTS[start % len(PORTS)])
    return at_ports(command, slot, _next_ports(plan.ports, plan.hosts, start))


def _next_ports(ports: Mapping[str, int], hosts: Mapping[str, str], start: int) -> dict[Slot, int]:
    """Give slots the next ports on their hosts, from one that is the same for all."""
    taken = Counter[str]()
    found: dict[Slot, int] = {}
    for name in ports:
        found[Slot.parse(name)] = PORTS[(start + taken[hosts[name]]) % len(PORTS)]
        taken[hosts[name]] += 1
    return found


class Record(msgspec.Struct, kw_only=True):
    """How far a slot's output has come here, and by which key its keeper knows us.

    `log` bytes of the log here hold the first `offset` bytes of the one there, and lines of our own; what was written
    since is the slot's alone. So nothing is lost or doubled, whenever the process that stands for it is killed.
    """

    key: str
    log: int = 0
    offset: int = 0
    code: int | None = None
    """How it ended, once that is known."""


def far_codes(run: Run, attempt: int) -> list[int | None]:
    """Tell how the slots of an attempt ended, as far as their hosts said."""
    folder = run.folder / FAR
    paths = [*folder.glob(f"*.{attempt}.json"), *folder.glob(f"*.{attempt}.*.json")]
    return [load(path.read_bytes(), Record, path).code for path in paths]


def read_ssh_plan(run: Run) -> SshPlan:
    """Read what a run was started with."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), SshPlan, path)
