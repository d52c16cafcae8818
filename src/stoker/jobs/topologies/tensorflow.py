"""TensorFlow, with parameter servers and without: every task finds the cluster in its environment, in any image.

`TF_CONFIG` is what TensorFlow reads. `CLUSTER_CONFIG` and `POD_NAME` say the same to programs that build their own
servers. Addresses are all that differs from place to place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from stoker.jobs.spec import Job
from stoker.jobs.topology import ONLOOKERS, AddressBook, Command, Role, Slot, program_words

TENSORBOARD_PORT = 6006
LOOPBACK = "127.0.0.1"


class TfMirrored:
    """MultiWorkerMirroredStrategy: workers alone, of which the first is the chief."""

    def roles(self, job: Job) -> tuple[Role, ...]:
        """List the workers, whose end is the job's, and what looks on."""
        return Role("worker", job.max_workers, lead=True), *_onlookers(job)

    def command(self, job: Job, slot: Slot, book: AddressBook) -> Command:
        """Run the program, with the cluster in `TF_CONFIG`."""
        return _command(job, slot, book, {"worker": _addresses(job, "worker", job.max_workers, book)})


class TfPs:
    """ParameterServerStrategy: a chief that coordinates, workers, and parameter servers, which never end by themselves.

    Without a chief (`roles: {chief: {count: 0}}`) each worker trains by itself, and all of them lead.
    """

    def roles(self, job: Job) -> tuple[Role, ...]:
        """List chief, workers and parameter servers, and what looks on."""
        chiefs = _count(job, "chief", 1)
        every = (
            Role("chief", chiefs, lead=True),
            Role("worker", job.max_workers, lead=not chiefs),
            Role("ps", _count(job, "ps", 1)),
        )
        return *(role for role in every if role.count), *_onlookers(job)

    def command(self, job: Job, slot: Slot, book: AddressBook) -> Command:
        """Run the program, with the cluster in `TF_CONFIG`, and in `CLUSTER_CONFIG` beside `POD_NAME`."""
        roles = {"chief": _count(job, "chief", 1), "worker": job.max_workers, "ps": _count(job, "ps", 1)}
        return _command(
            job, slot, book, {role: _addresses(job, role, count, book) for role, count in roles.items() if count}
        )


def _count(job: Job, role: str, default: int) -> int:
    given = job.roles[role].count if role in job.roles else None
    return default if given is None else given


def _onlookers(job: Job) -> tuple[Role, ...]:
    every = (Role(name, _count(job, name, 0), profiled=False) for name in ONLOOKERS)
    return tuple(role for role in every if role.count)


def _port(job: Job, role: str, book: AddressBook, slot: Slot) -> int | str:
    own = job.roles[role].port if role in job.roles else None
    return book.ports.get(slot) or own or (TENSORBOARD_PORT if role == "tensorboard" else book.port)


def _addresses(job: Job, role: str, count: int, book: AddressBook) -> list[str]:
    slots = [Slot(role, index) for index in range(count)]
    return [f"{book.hosts[slot]}:{_port(job, role, book, slot)}" for slot in slots]


def _command(job: Job, slot: Slot, book: AddressBook, cluster: dict[str, list[str]]) -> Command:
    program = job.program_of(slot.role)
    if slot.role == "tensorboard" and program is job.program:
        return _tensorboard(job, slot, book)
    task = {"type": slot.role, "index": slot.index}
    servers = {role: cluster.get(role, []) for role in ("ps", "worker")}
    env = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        "CLUSTER_CONFIG": json.dumps(servers),
        "POD_NAME": slot.filename,
    }
    return Command(tuple(program_words(program, book.python)), env)


def _tensorboard(job: Job, slot: Slot, book: AddressBook) -> Command:
    """Show what the job writes; on this machine alone where all of it is here."""
    logs = job.roles[slot.role].logdir or str(job.checkpoint.dir)
    host = book.hosts[slot]
    reach = ("--host", host) if host == LOOPBACK else ("--bind_all",)
    words = ("-m", "tensorboard.main", "--logdir", logs, *reach, "--port", str(_port(job, slot.role, book, slot)))
    return Command((book.python, *words))


def at_ports(command: Command, slot: Slot, ports: Mapping[Slot, int]) -> Command:
    """Give the command of a slot in a cluster in which these slots listen at other ports than before."""
    env = dict(command.env)
    if "TF_CONFIG" in env:
        config = json.loads(env["TF_CONFIG"])
        env["TF_CONFIG"] = json.dumps({**config, "cluster": _moved(config["cluster"], ports)})
        env["CLUSTER_CONFIG"] = json.dumps(_moved(json.loads(env["CLUSTER_CONFIG"]), ports))
    argv = command.argv
    if slot.role == "tensorboard" and slot in ports and "tensorboard.main" in argv:
        argv = (*argv[:-1], str(ports[slot]))
    return replace(command, argv=argv, env=env)


def _moved(cluster: Mapping[str, list[str]], ports: Mapping[Slot, int]) -> dict[str, list[str]]:
    return {
        role: [
            f"{address.rpartition(':')[0]}:{ports[slot]}" if (slot := Slot(role, index)) in ports else address
            for index, address in enumerate(addresses)
        ]
        for role, addresses in cluster.items()
    }
