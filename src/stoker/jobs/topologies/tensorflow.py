"""Topologies `tf-ps` and `tf-mirrored`: TensorFlow with and without parameter servers.

Every task gets the cluster in its environment: in `TF_CONFIG` for TensorFlow, and in `CLUSTER_CONFIG` and `POD_NAME`
for programs that start their own servers. Only the addresses depend on the launcher.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from stoker.jobs.spec import JobSpec
from stoker.jobs.topology import OBSERVER_ROLES, AddressBook, Command, Role, Slot, program_argv
from stoker.jobs.topology_traits import RoleTraits, TopologyTraits

TENSORBOARD_PORT = 6006
LOOPBACK = "127.0.0.1"
_OBSERVERS = dict.fromkeys(OBSERVER_ROLES, RoleTraits())
_CLUSTER_ENV = ("TF_CONFIG", "CLUSTER_CONFIG", "POD_NAME")


class TfMirrored:
    """MultiWorkerMirroredStrategy: workers only; the first one is the chief."""

    traits: ClassVar[TopologyTraits] = TopologyTraits(
        has_address_per_slot=True, extra_roles=_OBSERVERS, reserved_env=_CLUSTER_ENV
    )

    def roles(self, job: JobSpec) -> tuple[Role, ...]:
        """List the workers, which are the lead role, and the observers."""
        return Role("worker", job.max_workers, is_lead=True, listens=True), *_observer_roles(job)

    def command(self, job: JobSpec, slot: Slot, book: AddressBook) -> Command:
        """Return the command, with the cluster in `TF_CONFIG`."""
        return _command(job, slot, book, {"worker": _addresses(job, "worker", job.max_workers, book)})


class TfPs:
    """ParameterServerStrategy: a chief that coordinates, workers, and parameter servers, which never exit.

    Without a chief (`roles: {chief: {count: 0}}`) each worker trains by itself, and the workers are the lead role. A
    worker has no state that the others need, and so can be restarted alone.
    """

    traits: ClassVar[TopologyTraits] = TopologyTraits(
        has_address_per_slot=True,
        extra_roles={
            "ps": RoleTraits(min_count=1, max_count=None, has_gpus=False),
            "chief": RoleTraits(),
            **_OBSERVERS,
        },
        reserved_env=_CLUSTER_ENV,
    )

    def roles(self, job: JobSpec) -> tuple[Role, ...]:
        """List the chief, workers, parameter servers and observers."""
        chiefs = _count(job, "chief", 1)
        roles = (
            Role("chief", chiefs, is_lead=True, listens=True),
            Role("worker", job.max_workers, is_lead=not chiefs, listens=True, restart="slot"),
            Role("ps", _count(job, "ps", 1), listens=True, is_spread=True),
        )
        return *(role for role in roles if role.count), *_observer_roles(job)

    def command(self, job: JobSpec, slot: Slot, book: AddressBook) -> Command:
        """Return the command, with the cluster in `TF_CONFIG` and `CLUSTER_CONFIG`."""
        roles = {"chief": _count(job, "chief", 1), "worker": job.max_workers, "ps": _count(job, "ps", 1)}
        return _command(
            job, slot, book, {role: _addresses(job, role, count, book) for role, count in roles.items() if count}
        )


def _count(job: JobSpec, role: str, default: int) -> int:
    count = job.roles[role].count if role in job.roles else None
    return default if count is None else count


def _observer_roles(job: JobSpec) -> tuple[Role, ...]:
    roles = (
        Role(name, _count(job, name, 0), is_profiled=False, listens=name == "tensorboard") for name in OBSERVER_ROLES
    )
    return tuple(role for role in roles if role.count)


def _port(job: JobSpec, role: str, book: AddressBook, slot: Slot) -> int | str:
    role_port = job.roles[role].port if role in job.roles else None
    return book.ports.get(slot) or role_port or (TENSORBOARD_PORT if role == "tensorboard" else book.port)


def _addresses(job: JobSpec, role: str, count: int, book: AddressBook) -> list[str]:
    slots = [Slot(role, index) for index in range(count)]
    return [f"{book.hosts[slot]}:{_port(job, role, book, slot)}" for slot in slots]


def _command(job: JobSpec, slot: Slot, book: AddressBook, cluster: dict[str, list[str]]) -> Command:
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
    return Command(tuple(program_argv(program, book.python)), env)


def _tensorboard(job: JobSpec, slot: Slot, book: AddressBook) -> Command:
    """Return the command of TensorBoard; it listens on loopback only if the whole job runs on this machine."""
    logdir = job.roles[slot.role].logdir or str(job.checkpoint.dir)
    host = book.hosts[slot]
    bind = ("--host", host) if host == LOOPBACK else ("--bind_all",)
    args = ("-m", "tensorboard.main", "--logdir", logdir, *bind, "--port", str(_port(job, slot.role, book, slot)))
    return Command((book.python, *args))


def replace_ports(command: Command, slot: Slot, ports: Mapping[Slot, int]) -> Command:
    """Return the command of a slot with the ports of some slots of the cluster replaced."""
    env = dict(command.env)
    if "TF_CONFIG" in env:
        config = json.loads(env["TF_CONFIG"])
        env["TF_CONFIG"] = json.dumps({**config, "cluster": _replace_ports(config["cluster"], ports)})
        env["CLUSTER_CONFIG"] = json.dumps(_replace_ports(json.loads(env["CLUSTER_CONFIG"]), ports))
    argv = command.argv
    if slot.role == "tensorboard" and slot in ports and "tensorboard.main" in argv:
        argv = (*argv[:-1], str(ports[slot]))
    return replace(command, argv=argv, env=env)


def _replace_ports(cluster: Mapping[str, list[str]], ports: Mapping[Slot, int]) -> dict[str, list[str]]:
    return {
        role: [
            f"{address.rpartition(':')[0]}:{ports[slot]}" if (slot := Slot(role, index)) in ports else address
            for index, address in enumerate(addresses)
        ]
        for role, addresses in cluster.items()
    }
