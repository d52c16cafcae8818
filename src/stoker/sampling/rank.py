"""Which of the readers of an epoch one process is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stoker.errors import InputError

# Of each starter: rank, world, and how many ranks share the machine.
_RANK_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
}


class Rank(NamedTuple):
    """Rank `rank` of `world`, with `local_world` ranks on this machine."""

    number: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Rank:
        """Take the seat that torchrun, Open MPI or a PMI starter gave; alone where none did."""
        for starter, (rank, world, local) in _RANK_VARIABLES.items():
            if rank not in environ and world not in environ:
                continue
            if rank not in environ or world not in environ:
                lacking = rank if rank not in environ else world
                raise InputError(f"{lacking} is not set", hint=f"{starter} sets {rank} and {world}: set both or none")
            seat = cls(
                _parse_number(environ, rank), _parse_number(environ, world), max(1, _parse_number(environ, local, 1))
            )
            if seat.number >= seat.world_size:
                raise InputError(f"{rank}={seat.number} is not below {world}={seat.world_size}")
            return seat
        return cls()


def _parse_number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name}={text} is not a number of 0 or more")
    return int(text)
