"""How the processes of a job find each other: a topology gives each slot its command, once addresses are known.

A topology knows which processes exist; a launcher knows where they run. `Slot`, `AddressBook` and `Command` are all
that passes between them. Pure: no clock, no network, no file.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from stoker.core.registry import Registry
from stoker.jobs.spec import Job, Program


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One process that we start."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}/{self.index}"

    @property
    def filename(self) -> str:
        """Name its files."""
        return f"{self.role}-{self.index}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Read `worker/0`."""
        role, _, index = text.partition("/")
        return cls(role, int(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressBook:
    """What a launcher tells a topology of the places where slots run."""

    hosts: Mapping[Slot, str]
    port: int | str
    ports: Mapping[Slot, int] = field(default_factory=dict)
    """Where slots that share a host must each listen at a port of their own."""
    python: str = "python3"
    profiler: tuple[str, ...] = ()
    """How the profiler is started, where it is not by its module's name."""
    mpi_rank: tuple[str, ...] = ()
    """The same for what stands between mpirun and a rank."""
    cores: int = 1
    """Of one worker, where the job does not say."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What programs need there to find each other, such as the network interface."""
    has_ask: bool = False
    """Whether a slot has commands started in others by the program `$STOKER_ASK`."""
    ssh: tuple[str, ...] = ()
    """Options of the `ssh` by which mpirun reaches workers, where it does so itself."""
    handed: tuple[str, ...] = ()
    """Variables of mpirun's own place that ranks elsewhere need as they are there, such as PATH."""
    output: str = ""
    """The file that ranks print into, where mpirun is not to carry it."""
    secrets: str = ""
    """The folder in which ranks find secrets, a file for each, where nobody else gives them any."""


@dataclass(frozen=True, slots=True)
class Command:
    """What a slot runs; `env` is added to the environment that is there."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    def to_sh(self) -> str:
        """Write it for a shell, everything quoted."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        line = " ".join([*words, shlex.join(self.argv)])
        return line if self.cwd is None else f"cd {shlex.quote(self.cwd)} && {line}"


@dataclass(frozen=True, slots=True)
class Standby:
    """A slot in which another slot starts the work; `env` is what that finds there."""

    env: Mapping[str, str] = field(default_factory=dict)


ONLOOKERS = ("evaluator", "tensorboard")
"""Roles that read checkpoints beside the training, and are never waited for."""


@dataclass(frozen=True, slots=True)
class Role:
    """Slots that do the same; the success of a `lead` role ends the job."""

    name: str
    count: int
    lead: bool = False
    profiled: bool = True
    """Whether the profiler goes around its slots; else the topology has it elsewhere."""

    @property
    def looks_on(self) -> bool:
        """Whether the job goes on when its slots fail."""
        return self.name in ONLOOKERS


class Topology(Protocol):
    """Which processes a job has, and what each of them runs."""

    def roles(self, job: Job) -> tuple[Role, ...]:
        """List the roles, each with how many slots it has."""
        ...

    def command(self, job: Job, slot: Slot, book: AddressBook) -> Command | Standby:
        """Tell what a slot runs: argv, and the variables by which it finds the others."""
        ...


TOPOLOGIES: Registry[type[Topology]] = Registry(
    "topology",
    {
        "mpi": "stoker.jobs.topologies.mpi:Mpi",
        "single": "stoker.jobs.topologies.single:Single",
        "torchrun": "stoker.jobs.topologies.torchrun:Torchrun",
        "tf-ps": "stoker.jobs.topologies.tensorflow:TfPs",
        "tf-mirrored": "stoker.jobs.topologies.tensorflow:TfMirrored",
    },
)


def topology_of(job: Job) -> Topology:
    """Give the topology that a job names."""
    return TOPOLOGIES.get(job.topology)()


def slots_of(job: Job) -> list[Slot]:
    """List every slot of a job."""
    return [Slot(role.name, index) for role in topology_of(job).roles(job) for index in range(role.count)]


def lead_slots(job: Job) -> frozenset[Slot]:
    """Tell whose success is the job's: the lead role's slots, or all where no role leads."""
    roles = topology_of(job).roles(job)
    leading = [role for role in roles if role.lead] or roles
    return frozenset(Slot(role.name, index) for role in leading for index in range(role.count))


def onlookers(job: Job) -> frozenset[Slot]:
    """Tell whose failure the job bears: what looks on beside the training."""
    roles = [role for role in topology_of(job).roles(job) if role.looks_on]
    return frozenset(Slot(role.name, index) for role in roles for index in range(role.count))


def program_words(program: Program, python: str) -> list[str]:
    """Write a program as an argv of its own."""
    return [*_start(program, python), *program.args]


def _start(program: Program, python: str) -> list[str]:
    if program.command is not None:
        return list(program.command)
    if program.module is not None:
        return [python, "-m", program.module]
    return [python, str(program.script)]


def commands(job: Job, book: AddressBook) -> dict[Slot, Command | Standby]:
    """Give every slot's whole command: the topology's, with the variables of the contract, under the profiler."""
    return {slot: command_of(job, slot, book) for slot in slots_of(job)}


def command_of(job: Job, slot: Slot, book: AddressBook) -> Command | Standby:
    """Give one slot's whole command."""
    topology = topology_of(job)
    command = topology.command(job, slot, book)
    env = {**contract(job, slot, book), **book.env, **command.env, **job.env}
    if isinstance(command, Standby):
        return Standby(env)
    profiled = any(role.name == slot.role and role.profiled for role in topology.roles(job))
    profiler = profiler_words(job, book) if profiled else ()
    return replace(command, argv=(*profiler, *command.argv), env=env, cwd=job.program_of(slot.role).cwd)


def profiler_words(job: Job, book: AddressBook) -> tuple[str, ...]:
    """Give what stands before a program that is profiled; nothing where the job wants none."""
    if job.profile.every <= 0:
        return ()
    words = book.profiler or (book.python, "-m", "stoker.telemetry.profiler")
    return (*words, "--every", f"{float(job.profile.every):g}", "--")


def contract(job: Job, slot: Slot, book: AddressBook) -> dict[str, str]:
    """Give the variables that every slot finds; empty ones are left away."""
    cores = math.ceil(job.resources.cpu) if job.resources.cpu else book.cores
    cache = job.data.cache
    given = {
        "STOKER_JOB": job.name,
        "STOKER_SLOT": str(slot),
        "STOKER_ROLE": slot.role,
        "STOKER_INDEX": str(slot.index),
        "STOKER_DATA_TRAIN": job.data.train,
        "STOKER_DATA_VAL": job.data.val,
        "STOKER_DATA_VIA": job.data.via,
        "STOKER_SAMPLING": job.data.sampling,
        "STOKER_CACHE_DIR": cache.dir,
        "STOKER_CACHE_SIZE": str(int(cache.size)) if cache.size else None,
        "STOKER_CHECKPOINT_DIR": job.checkpoint.dir,
        "STOKER_CHECKPOINT_KEEP": str(job.checkpoint.keep),
        "STOKER_GRACE_S": f"{float(job.grace):g}",
        "OMP_NUM_THREADS": str(max(1, cores // job.ranks_per_worker)),
        "PYTHONUNBUFFERED": "1",
    }
    return {name: value for name, value in given.items() if value}
