"""The rank of this process among the processes that read an epoch, from the variables of torchrun, Open MPI or PMI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stoker.errors import InputError

# By launcher: the variables that hold the rank, the world size and the local world size.
_RANK_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
}


class Rank(NamedTuple):
    """Rank `number` of `world_size`, with `local_world_size` ranks on this machine."""

    number: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Rank:
        """Return the rank that torchrun, Open MPI or a PMI launcher set; rank 0 of 1 if none of them did."""
        for launcher, (number, world_size, local_world_size) in _RANK_VARIABLES.items():
            if number not in environ and world_size not in environ:
                continue
            if number not in environ or world_size not in environ:
                missing = number if number not in environ else world_size
                raise InputError(
                    f"{missing} is not set", hint=f"{launcher} sets {number} and {world_size}: set both or neither"
                )
            rank = cls(
                number=_parse_number(environ, number),
                world_size=_parse_number(environ, world_size),
                local_world_size=max(1, _parse_number(environ, local_world_size, 1)),
            )
            if rank.number >= rank.world_size:
                raise InputError(f"{number}={rank.number} must be less than {world_size}={rank.world_size}")
            return rank
        return cls()


def _parse_number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name}={text} must be an integer >= 0")
    return int(text)
