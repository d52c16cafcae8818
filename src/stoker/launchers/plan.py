"""What the local launcher starts, as a value: what `job plan` prints, and what a run folder keeps."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from stoker.core.spec import load
from stoker.errors import Fault, SpecError
from stoker.jobs.run_folder import Run
from stoker.jobs.spec import Job
from stoker.jobs.topologies.tensorflow import at_ports
from stoker.jobs.topology import Command, Slot, slots_of

HOST = "127.0.0.1"
# Below those that the kernel gives to clients, so that none of them takes one while a job pauses.
PORTS = range(20000, 32000)
LAST_PORT = 65535


class LocalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The command of every slot, where they meet, and what the user should know of them."""

    slots: dict[str, Command]
    port: int = 0
    ports: dict[str, int] = {}
    """Where slots that share a host listen, each at a port of its own; those that the job names are not among them."""
    notes: tuple[str, ...] = ()
    hosts: dict[str, str] = {}
    """The host of each slot, where that is not this machine: then the processes here only stand for those there."""
    carried: tuple[str, ...] = ()
    """Slots without a process here: one that is here writes their logs, and tells how they end."""

    detached: bool = False
    """Whether slots elsewhere go on without this machine."""

    @property
    def commands(self) -> dict[Slot, Command]:
        """By slot."""
        return {Slot.parse(name): command for name, command in self.slots.items()}

    @property
    def is_far(self) -> bool:
        """Whether the slots run elsewhere."""
        return bool(self.hosts)

    def shown(self) -> str:
        """Write the commands as a shell would take them."""
        parts = []
        for name, command in self.slots.items():
            host = self.hosts.get(name)
            parts.append(f"# {name}{f' on {host}' if host else ''}\n{command.to_sh()}\n")
        return "\n".join(parts)

    @property
    def is_placed_later(self) -> bool:
        """Whether slots wait for a place that someone elsewhere gives them: then whoever carries them tells it."""
        return self.is_far and bool(self.carried)

    def on_free_port(self) -> LocalPlan:
        """Give the same plan, with other ports to meet at where someone has taken one of these."""
        if self.ports:
            if all(map(_is_free, self.ports.values())):
                return self
            ports = dict(zip(self.ports, free_ports(len(self.ports)), strict=True))
            return self.at_ports({Slot.parse(name): port for name, port in ports.items()})
        if not self.port or _is_free(self.port):
            return self
        (port,) = free_ports(1)
        slots = {name: moved(one, self.port, port) for name, one in self.slots.items()}
        return msgspec.structs.replace(self, slots=slots, port=port)

    def at_ports(self, ports: Mapping[Slot, int]) -> LocalPlan:
        """Give the same plan, with slots that listen at these ports."""
        slots = {name: at_ports(one, Slot.parse(name), ports) for name, one in self.slots.items()}
        named = {str(slot): port for slot, port in ports.items()}
        return msgspec.structs.replace(self, slots=slots, ports=named)


def read_plan(run: Run) -> LocalPlan:
    """Read which processes a run has here: those of its plan, or those that stand for them."""
    path = run.folder / "processes.json"
    path = path if path.exists() else run.folder / "plan.json"
    return load(path.read_bytes(), LocalPlan, path)


def named_ports(job: Job, slots: Sequence[Slot]) -> dict[Slot, int]:
    """Give the ports that a job names for slots on one host: the next ones, where several have the same."""
    taken: dict[int, Slot] = {}
    for slot in slots:
        own = job.roles[slot.role].port if slot.role in job.roles else None
        port = own or (None if slot.role == "tensorboard" else job.port)
        if port is None:
            continue
        while port in taken:
            port += 1
        if port > LAST_PORT:
            raise SpecError([Fault("port", f"{slot} would listen at {port}, and {LAST_PORT} is the last: start lower")])
        taken[port] = slot
    return {slot: port for port, slot in taken.items()}


def listeners(job: Job) -> list[Slot]:
    """List the slots that each listen at a port of their own; none, where one port is enough for all."""
    return [slot for slot in slots_of(job) if slot.role != "evaluator"] if job.topology.startswith("tf-") else []


def gpu_faults(job: Job) -> Iterator[Fault]:
    """Refuse accelerators for others than workers, where slots share what a machine has."""
    here = {slot.role for slot in slots_of(job)} if job.topology.startswith("tf-") else set()
    for name, role in job.roles.items():
        if role.resources.gpu and name in here:
            yield Fault(f"roles.{name}.resources.gpu", "only workers get accelerators here: leave it out")


def free_ports(count: int) -> list[int]:
    """Find loopback ports that nothing listens on."""
    start = PORTS.start + os.getpid() * 37 % len(PORTS)
    free = (port for port in itertools.chain(range(start, PORTS.stop), PORTS) if _is_free(port))
    return list(itertools.islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
        return True


def moved(command: Command, old: int, new: int) -> Command:
    """Give a command that meets the others at another port."""

    def word(before: str, this: str) -> str:
        if before == "--rdzv-endpoint" and this.endswith(f":{old}"):
            return f"{this.rpartition(':')[0]}:{new}"
        return str(new) if (before, this) == ("--master-port", str(old)) else this

    argv = command.argv
    env = {name: str(new) if (name, one) == ("MASTER_PORT", str(old)) else one for name, one in command.env.items()}
    return replace(command, argv=(argv[0], *(word(*pair) for pair in itertools.pairwise(argv))), env=env)
