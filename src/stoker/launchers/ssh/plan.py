"""The plan of the ssh launcher: the command and host of every slot, and what is uploaded, as one value."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker.core.spec import load
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.topologies.tensorflow import replace_ports
from stoker.jobs.topology import Command, Slot
from stoker.launchers.plan import LocalPlan, with_rendezvous_port
from stoker.launchers.ssh.client import SshClient

RETRY_PORTS = range(20000, 29500)
"""Rendezvous ports of all attempts but the first: below the default port of jobs and the kernel's ephemeral ports."""


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


class SlotRecord(msgspec.Struct, kw_only=True):
    """How much of a remote slot's output is in the local log, and the key of its daemon.

    The first `log_size` bytes of the local log hold the first `offset` bytes of the remote log, and lines of our own;
    everything after them is output of the slot. So no byte is lost or duplicated, whenever the local process is killed.
    """

    key: str
    log_size: int = msgspec.field(default=0, name="log")
    offset: int = 0
    code: int | None = None
    """The exit code, once it is known."""


def records_folder(run: RunFolder) -> Path:
    """Return the folder with the records of the run's remote slots."""
    return run.folder / "remote"


def read_exit_codes(run: RunFolder, attempt: int) -> list[int | None]:
    """Return the exit codes of the slots of an attempt, None where a host has not reported one."""
    folder = records_folder(run)
    paths = [*folder.glob(f"*.{attempt}.json"), *folder.glob(f"*.{attempt}.*.json")]
    return [load(path.read_bytes(), SlotRecord, path).code for path in paths]


def read_ssh_plan(run: RunFolder) -> SshPlan:
    """Read the plan of a run."""
    path = run.folder / "plan.json"
    return load(path.read_bytes(), SshPlan, path)
