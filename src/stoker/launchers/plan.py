"""Plan of the local launcher: the command and port of every slot, as printed by `job plan` and kept in run folders."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from stoker.core.spec import load
from stoker.errors import Fault, SpecError
from stoker.jobs.run_folder import RunFolder
from stoker.jobs.spec import JobSpec
from stoker.jobs.topologies.tensorflow import replace_ports
from stoker.jobs.topology import Command, Slot, get_topology, list_slots, observer_slots

LOOPBACK = "127.0.0.1"
# Below the ephemeral ports of the kernel, so that no client takes one between two attempts.
PORT_RANGE = range(20000, 32000)
LAST_PORT = 65535


class LocalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The command of every slot, the rendezvous port, and notes for the user."""

    slots: dict[str, Command]
    port: int = 0
    ports: dict[str, int] = {}
    """Ports of slots that each need their own on a shared host; ports set in the job file are not included."""
    notes: tuple[str, ...] = ()
    hosts: dict[str, str] = {}
    """The host of each remote slot."""
    delegated: tuple[str, ...] = msgspec.field(default=(), name="carried")
    """Slots without a local process of their own: one local process writes their logs and reports their exit codes."""

    detached: bool = False
    """Whether remote slots keep running when this machine goes away; only in run folders of version 1."""

    @property
    def commands(self) -> dict[Slot, Command]:
        """The command of each slot."""
        return {Slot.parse(name): command for name, command in self.slots.items()}

    @property
    def is_remote(self) -> bool:
        """Whether the slots run on other machines."""
        return bool(self.hosts)

    def to_text(self) -> str:
        """Return the commands as shell text."""
        parts = []
        for name, command in self.slots.items():
            host = self.hosts.get(name)
            parts.append(f"# {name}{f' on {host}' if host else ''}\n{command.to_shell()}\n")
        return "\n".join(parts)

    def with_free_ports(self) -> LocalPlan:
        """Return the plan with new ports if any of its ports is in use."""
        if self.ports:
            if all(map(is_free, self.ports.values())):
                return self
            ports = dict(zip(self.ports, find_free_ports(len(self.ports)), strict=True))
            return self.with_ports({Slot.parse(name): port for name, port in ports.items()})
        if not self.port or is_free(self.port):
            return self
        (port,) = find_free_ports(1)
        slots = {name: with_rendezvous_port(command, self.port, port) for name, command in self.slots.items()}
        return msgspec.structs.replace(self, slots=slots, port=port)

    def with_ports(self, ports: Mapping[Slot, int]) -> LocalPlan:
        """Return the plan with slots listening on the given ports."""
        slots = {name: replace_ports(command, Slot.parse(name), ports) for name, command in self.slots.items()}
        named = {str(slot): port for slot, port in ports.items()}
        return msgspec.structs.replace(self, slots=slots, ports=named)


def read_plan(run: RunFolder) -> LocalPlan:
    """Read the local processes of a run folder of version 1, which represented its remote slots; or its plan."""
    path = run.folder / "processes.json"
    path = path if path.exists() else run.folder / "plan.json"
    return load(path.read_bytes(), LocalPlan, path)


def requested_ports(job: JobSpec, slots: Sequence[Slot]) -> dict[Slot, int]:
    """Return the ports that the job file sets for slots on one host; slots with the same port get consecutive ones."""
    taken: dict[int, Slot] = {}
    observers = observer_slots(job)
    for slot in slots:
        own = job.roles[slot.role].port if slot.role in job.roles else None
        port = own or (None if slot in observers else job.port)
        if port is None:
            continue
        while port in taken:
            port += 1
        if port > LAST_PORT:
            raise SpecError(
                [Fault("port", f"{slot} would need port {port}, above the maximum {LAST_PORT}: set a lower port")]
            )
        taken[port] = slot
    return {slot: port for port, slot in taken.items()}


def listening_slots(job: JobSpec) -> list[Slot]:
    """List the slots that each need a port of their own; none where one rendezvous port serves all."""
    listening_roles = {role.name for role in get_topology(job).roles(job) if role.listens}
    return [slot for slot in list_slots(job) if slot.role in listening_roles]


def find_free_ports(count: int) -> list[int]:
    """Return loopback ports that nothing listens on; other ports each time, because slots do not listen at once."""
    start = random.choice(PORT_RANGE)
    free = (port for port in itertools.chain(range(start, PORT_RANGE.stop), PORT_RANGE) if is_free(port))
    return list(itertools.islice(free, count))


def is_free(port: int) -> bool:
    """Return whether nothing listens on a loopback port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def with_rendezvous_port(command: Command, old: int, new: int) -> Command:
    """Return the command with another rendezvous port."""

    def replace_port(flag: str, value: str) -> str:
        if flag == "--rdzv-endpoint" and value.endswith(f":{old}"):
            return f"{value.rpartition(':')[0]}:{new}"
        return str(new) if (flag, value) == ("--master-port", str(old)) else value

    argv = command.argv
    env = {key: str(new) if (key, value) == ("MASTER_PORT", str(old)) else value for key, value in command.env.items()}
    return replace(command, argv=(argv[0], *(replace_port(*pair) for pair in itertools.pairwise(argv))), env=env)
