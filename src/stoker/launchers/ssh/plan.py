"""The plan of the ssh launcher: the command and host of every slot, and what is uploaded, as one value."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping

import msgspec

from stoker.core.spec import load
from stoker.jobs.run_files import VERSION
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topologies.tensorflow import replace_ports
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import LocalPlan, read_plan, with_rendezvous_port
from stoker.launchers.ssh.client import SshClient

RETRY_PORTS = range(20000, 29500)
"""Rendezvous ports of all attempts but the first: below the default port of jobs and the kernel's ephemeral ports."""
_DETACHED_FILE = "detached"


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one host is used: working directory, Python, and what is uploaded."""

    workdir: str
    python: str
    copies: bool
    """Whether the working directory is uploaded, unless it is the very same directory."""
    rsync: bool = False
    profiler: bool = False
    """Whether the profiler is uploaded, because the host has no stoker."""
    mpi: bool = False
    """Whether the wrapper between mpirun and a rank is uploaded."""


class SshPlan(LocalPlan, frozen=True, kw_only=True):
    """The command of every slot, its host, and what is uploaded there first."""

    host_configs: dict[str, HostConfig] = msgspec.field(name="places")
    standby: tuple[str, ...] = ()
    """Slots without a command of their own: another slot runs commands on their hosts, by `$STOKER_ASK`."""
    standby_env: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """The environment of those commands, by slot."""
    client: SshClient
    source: str
    exclude: tuple[str, ...] = ()
    setup: str | None = None
    modules: tuple[str, ...] = ()
    """Modules that the hosts' Python must have after `setup`."""
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0
    keeps_port: bool = False
    """Whether the job sets the rendezvous port; if not, each attempt uses a new one, free of processes of the last."""


def command_for_attempt(plan: SshPlan, slot: Slot, run: str, attempt: int) -> Command:
    """Return the command of a slot, with rendezvous ports that no earlier attempt and no other job uses."""
    command = plan.slots[str(slot)]
    if not attempt or plan.keeps_port:
        return command
    start = zlib.crc32(f"{run}.{attempt}".encode())
    if not plan.ports:
        return with_rendezvous_port(command, plan.port, RETRY_PORTS[start % len(RETRY_PORTS)])
    return replace_ports(command, slot, _assign_ports(plan.ports, plan.hosts, start))


def _assign_ports(ports: Mapping[str, int], hosts: Mapping[str, str], start: int) -> dict[Slot, int]:
    """Assign consecutive ports to the slots of each host, starting at the same port on all hosts."""
    used = Counter[str]()
    assigned: dict[Slot, int] = {}
    for name in ports:
        assigned[Slot.parse(name)] = RETRY_PORTS[(start + used[hosts[name]]) % len(RETRY_PORTS)]
        used[hosts[name]] += 1
    return assigned


def set_detached(run: RunFolder, *, is_detached: bool) -> None:
    """Record whether the slots of a run, which is of this version from now on, keep running without a supervisor."""
    run.write("version", f"{VERSION}\n".encode())
    if is_detached:
        run.write(_DETACHED_FILE, b"")
    else:
        (run.folder / _DETACHED_FILE).unlink(missing_ok=True)


def is_detached(run: RunFolder) -> bool:
    """Whether the slots of a run keep running without a supervisor."""
    if is_first_version(run):
        return read_plan(run).detached
    return (run.folder / _DETACHED_FILE).exists()


def is_first_version(run: RunFolder) -> bool:
    """Whether a run was started when each slot had a local process and a daemon of its own."""
    return run.version == 1


def read_ssh_plan(run: RunFolder) -> SshPlan:
    """Read the plan of a run."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), SshPlan, path)
