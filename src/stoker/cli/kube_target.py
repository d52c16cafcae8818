"""The cluster that `--on` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.kube.client import Cluster
    from stoker.kube.config import Place


def place_of(on: str) -> Place:
    """Read `k8s[://context[/namespace]]`; anything else is no cluster."""
    from stoker.kube.config import Place

    kind, _, rest = on.partition("://")
    if kind != "k8s":
        raise InputError(f"`--on {on}` is no cluster", hint="write --on k8s or --on k8s://context/namespace")
    return Place.parse(rest)


def cluster_at(on: str) -> Cluster:
    """Open the cluster of a place, to be closed again: it is a context manager."""
    from stoker.kube.client import Cluster

    return Cluster.at(place_of(on))
