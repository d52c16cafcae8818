"""The traits of topologies, and the registry of topologies.

Everything outside `topologies/` that depends on a job's topology reads its traits and the data of its roles; nothing
compares names. The checks of a job file need the traits, so this module does not import the job file, and the registry
imports a topology only when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.core.registry import Registry
from stoker.core.spec import InvalidFieldError
from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.jobs.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTraits:
    """What the job file may set for a role besides the workers."""

    min_count: int = 0
    max_count: int | None = 1
    """The maximum number of slots; None: any number."""
    has_gpus: bool = True
    """Whether its slots can request GPUs."""
    program: str = ""
    """The program that its slots run; empty: one of the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyTraits:
    """What launchers and checks must know about a topology, as data."""

    runs_ranks: bool = False
    """Whether a worker runs one rank per GPU, which can form a `torch.distributed` process group; otherwise it is one
    process that uses all GPUs of the worker."""
    max_workers: int | None = None
    """The maximum number of workers; None: any number."""
    supports_elastic: bool = False
    """Whether workers can join and leave while the job runs."""
    supports_commands: bool = True
    """Whether it runs any program; otherwise only Python scripts and modules."""
    has_rendezvous: bool = False
    """Whether workers meet at the address of the first worker, and then succeed or fail together."""
    has_standby_workers: bool = False
    """Whether `mpirun` in another slot starts the ranks of all workers, with the same command for each."""
    has_address_per_slot: bool = False
    """Whether every slot has an address of its own, by which the others know it from the start."""
    extra_roles: Mapping[str, RoleTraits] = field(default_factory=dict)
    """The roles that it can have besides the workers."""
    required_modules: tuple[str, ...] = ()
    """Python modules that its own commands import."""
    needs_open_mpi: bool = False
    """Whether every machine needs the programs of Open MPI 4."""
    reserved_env: tuple[str, ...] = ()
    """Environment variables that it sets, and a job file must not."""


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


def find_topology(name: str) -> type[Topology]:
    """Return the topology of this name; raise InvalidFieldError if there is none, as for any invalid key of a job."""
    try:
        return TOPOLOGIES.get(name)
    except InputError:
        raise InvalidFieldError from None


def list_traits() -> dict[str, TopologyTraits]:
    """Return the traits of all topologies by name."""
    return {name: TOPOLOGIES.get(name).traits for name in TOPOLOGIES.names()}
