"""All places of a drill, by the name of their launcher."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.drill.local_places import LocalPlace, MpiPlace
from tests.support.drill.place import Place
from tests.support.drill.ssh_places import SshMpiPlace, SshPlace
from tests.support.hosts import network


@contextmanager
def open_places(name: str, folder: Path) -> Iterator[Callable[[random.Random], Place]]:
    """Start what a launcher needs, once for all drills on it; yield what makes its place for one drill."""
    match name:
        case "local":
            yield LocalPlace
        case "mpi":
            yield MpiPlace
        case "ssh" | "ssh-mpi":
            with network(folder) as net:
                yield partial(SshPlace if name == "ssh" else SshMpiPlace, net=net)
        case _:
            raise ValueError(name)
