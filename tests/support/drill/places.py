"""All places of a drill, by the name of their launcher."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.drill.cluster_places import RayPlace, SlurmPlace
from tests.support.drill.local_places import LocalPlace, MpiPlace
from tests.support.drill.place import Place
from tests.support.drill.ssh_places import SshMpiPlace, SshPlace
from tests.support.hosts import network
from tests.support.ray import ray_cluster
from tests.support.slurm import slurm_cluster


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
        case "ray":
            with ray_cluster(folder) as cluster:
                yield partial(RayPlace, cluster=cluster)
        case "slurm":
            with slurm_cluster(folder) as cluster:
                yield partial(SlurmPlace, cluster=cluster)
        case _:
            raise ValueError(name)
