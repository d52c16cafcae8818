"""What the local launcher starts, as a value: what `job plan` prints, and what a run folder keeps."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import replace

import msgspec

from stoker.core.spec import load
from stoker.jobs.runs import Run
from stoker.jobs.topology import Command, Slot

HOST = "127.0.0.1"
# Below those that the kernel gives to clients, so that none of them takes one while a job pauses.
PORTS = range(20000, 32000)


class LocalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The command of every slot, where they meet, and what the user should know of them."""

    slots: dict[str, Command]
    port: int = 0
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

    @property
    def is_placed_later(self) -> bool:
        """Whether slots wait for a place that someone elsewhere gives them: then whoever carries them tells it."""
        return self.is_far and bool(self.carried)

    def on_free_port(self) -> LocalPlan:
        """Give the same plan, with another port to meet at where someone has taken this one."""
        if not self.port or _is_free(self.port):
            return self
        (port,) = free_ports(1)
        slots = {name: moved(one, self.port, port) for name, one in self.slots.items()}
        return msgspec.structs.replace(self, slots=slots, port=port)


def read_plan(run: Run) -> LocalPlan:
    """Read which processes a run has here: those of its plan, or those that stand for them."""
    path = run.folder / "processes.json"
    path = path if path.exists() else run.folder / "plan.json"
    return load(path.read_bytes(), LocalPlan, path)


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
