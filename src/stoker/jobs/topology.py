"""Topologies: which processes a job has, and the command and environment of each, given their addresses.

A topology knows which processes exist; a launcher knows where they run. Only `Slot`, `AddressBook` and `Command` pass
between them. Pure: no clock, no network, no files.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from stoker.jobs.spec import JobSpec, ProgramSpec, RoleSpec
from stoker.jobs.topology_traits import TopologyTraits, find_topology


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One process that stoker starts."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def filename(self) -> str:
        """The slot as part of a file name: `worker-0`."""
        return f"{self.role}-{self.index}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Parse `worker/0`."""
        role, _, index = text.partition("/")
        return cls(role, int(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressBook:
    """Addresses and paths where slots run, passed from a launcher to a topology."""

    hosts: Mapping[Slot, str]
    port: int | str
    ports: Mapping[Slot, int | str] = field(default_factory=dict)
    """Ports of slots that share a host and need different ones."""
    python: str = "python3"
    profiler: tuple[str, ...] = ()
    """Command of the profiler; default: its module."""
    mpi_rank: tuple[str, ...] = ()
    """Command of the wrapper between mpirun and a rank; default: its module."""
    cores_per_rank: int = 1
    """CPU cores of one rank, for workers without `resources.cpu`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that depend on the machine, such as the network interface."""
    has_rsh_agent: bool = False
    """Whether mpirun starts commands in other slots through the remote shell agent `$STOKER_ASK`."""
    ssh_options: tuple[str, ...] = ()
    """Options for the `ssh` with which mpirun connects to workers."""
    forward_env: tuple[str, ...] = ()
    """Names of variables that mpirun forwards from its own environment to the ranks, such as PATH."""
    output_file: str = ""
    """File that ranks write their output to instead of passing it through mpirun; empty: through mpirun.
    `{slot}` in its path stands for the worker of the rank."""
    secrets_dir: str = ""
    """Directory with one file per secret, for ranks that do not get secrets in their environment."""


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a slot; `env` is added to the existing environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    def to_shell(self) -> str:
        """Write the command as shell text, with everything quoted."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = " ".join([*assignments, shlex.join(self.argv)])
        return line if self.cwd is None else f"cd {shlex.quote(self.cwd)} && {line}"


@dataclass(frozen=True, slots=True)
class Standby:
    """A slot without a command, in which another slot starts processes; `env` is their environment."""

    env: Mapping[str, str] = field(default_factory=dict)


OBSERVER_ROLES = ("evaluator", "tensorboard")
"""Roles that read checkpoints while the job trains; the job neither waits for them nor fails with them."""


@dataclass(frozen=True, slots=True)
class Role:
    """A group of identical slots; the job succeeds when its lead role does."""

    name: str
    count: int
    is_lead: bool = False
    is_profiled: bool = True
    """Whether its slots run under the profiler; otherwise the topology starts the profiler elsewhere."""
    listens: bool = False
    """Whether its slots listen on ports of their own, which differ on a shared host."""
    restart: Literal["gang", "slot"] = "gang"
    """What a failed slot takes with it: the whole gang, or nothing, if it can join the others again."""
    is_spread: bool = False
    """Whether its slots are spread over the hosts of the workers; those of other roles are on the first host."""

    @property
    def is_observer(self) -> bool:
        """Whether the job continues when its slots fail."""
        return self.name in OBSERVER_ROLES


class Topology(Protocol):
    """The processes of a job, and the command of each."""

    traits: ClassVar[TopologyTraits]

    def roles(self, job: JobSpec) -> tuple[Role, ...]:
        """List the roles, each with its number of slots."""
        ...

    def command(self, job: JobSpec, slot: Slot, book: AddressBook) -> Command | Standby:
        """Return the command of a slot: argv, and the environment variables for the rendezvous."""
        ...


def get_topology(job: JobSpec) -> Topology:
    """Return the topology of a job."""
    return find_topology(job.topology)()


def list_slots(job: JobSpec) -> list[Slot]:
    """List all slots of a job."""
    return [Slot(role.name, index) for role in get_topology(job).roles(job) for index in range(role.count)]


def sum_prices(job: JobSpec) -> float | None:
    """Return the price per hour of all slots whose price the job states; None if it states none."""
    slots = [
        (job.resources_of(slot.index) if slot.role == "worker" else job.roles.get(slot.role, RoleSpec()).resources)
        for slot in list_slots(job)
    ]
    known = [resources.price_per_hour for resources in slots if resources.price_per_hour is not None]
    return math.fsum(known) if known else None


def lead_slots(job: JobSpec) -> frozenset[Slot]:
    """Return the slots whose success is the success of the job: those of the lead role, or all without one."""
    roles = get_topology(job).roles(job)
    lead_roles = [role for role in roles if role.is_lead] or roles
    return frozenset(Slot(role.name, index) for role in lead_roles for index in range(role.count))


def observer_slots(job: JobSpec) -> frozenset[Slot]:
    """Return the slots of observer roles, whose failure does not fail the job."""
    roles = [role for role in get_topology(job).roles(job) if role.is_observer]
    return frozenset(Slot(role.name, index) for role in roles for index in range(role.count))


def program_argv(program: ProgramSpec, python: str) -> list[str]:
    """Return the argv of a program."""
    return [*_entry_point(program, python), *program.args]


def _entry_point(program: ProgramSpec, python: str) -> list[str]:
    if program.command is not None:
        return list(program.command)
    if program.module is not None:
        return [python, "-m", program.module]
    return [python, str(program.script)]


def render_commands(job: JobSpec, book: AddressBook) -> dict[Slot, Command | Standby]:
    """Return the complete command of every slot: with environment variables, and under the profiler."""
    return {slot: render_command(job, slot, book) for slot in list_slots(job)}


def render_command(job: JobSpec, slot: Slot, book: AddressBook) -> Command | Standby:
    """Return the complete command of one slot."""
    topology = get_topology(job)
    command = topology.command(job, slot, book)
    env = {**slot_env(job, slot, book), **book.env, **command.env, **job.env}
    if isinstance(command, Standby):
        return Standby(env)
    is_profiled = any(role.name == slot.role and role.is_profiled for role in topology.roles(job))
    profiler = profiler_argv(job, book) if is_profiled else ()
    return replace(command, argv=(*profiler, *command.argv), env=env, cwd=job.program_of(slot.role).cwd)


def profiler_argv(job: JobSpec, book: AddressBook) -> tuple[str, ...]:
    """Return the arguments that run a program under the profiler; empty if the job disables it."""
    if job.profile.every <= 0:
        return ()
    argv = book.profiler or (book.python, "-m", "stoker.remote.profiler")
    return (*argv, "--every", f"{float(job.profile.every):g}", "--")


def threads_per_rank(job: JobSpec, worker: int, book: AddressBook) -> int:
    """Return the number of threads of a rank: its share of the CPU cores of its worker."""
    cpu = job.resources_of(worker).cpu
    return max(1, math.ceil(cpu) // job.ranks_of(worker) if cpu else book.cores_per_rank)


def slot_env(job: JobSpec, slot: Slot, book: AddressBook) -> dict[str, str]:
    """Return the environment variables of a slot, without empty ones."""
    worker = slot.index if slot.role == "worker" else 0
    cache = job.data.cache
    env = {
        "STOKER_JOB": job.name,
        "STOKER_SLOT": str(slot),
        "STOKER_ROLE": slot.role,
        "STOKER_INDEX": str(slot.index),
        "STOKER_DATA_TRAIN": job.data.train,
        "STOKER_DATA_VAL": job.data.val,
        "STOKER_DATA_VIA": job.data.via if job.data.via != "cluster" else None,  # where there is one, it has a URL here
        "STOKER_SAMPLING": job.data.sampling,
        "STOKER_CACHE_DIR": cache.dir,
        "STOKER_CACHE_SIZE": str(int(cache.size)) if cache.size else None,
        "STOKER_CHECKPOINT_DIR": job.checkpoint.dir,
        "STOKER_CHECKPOINT_KEEP": str(job.checkpoint.keep),
        "STOKER_GRACE_S": f"{float(job.grace):g}",
        "OMP_NUM_THREADS": str(threads_per_rank(job, worker, book)),
        "PYTHONUNBUFFERED": "1",
    }
    return {name: value for name, value in env.items() if value}
