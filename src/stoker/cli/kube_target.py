"""The cluster that `--on k8s[://context[/namespace]]` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.errors import InputError

if TYPE_CHECKING:
    from stoker.kube.client import KubeClient
    from stoker.kube.config import KubeTarget


def parse_target(on: str) -> KubeTarget:
    """Parse `k8s[://context[/namespace]]`; raise InputError for anything else."""
    from stoker.kube.config import KubeTarget

    kind, _, rest = on.partition("://")
    if kind != "k8s":
        raise InputError(
            f"--on {on}: this command requires a Kubernetes target", hint="use --on k8s[://context/namespace]"
        )
    return KubeTarget.parse(rest)


def connect(on: str) -> KubeClient:
    """Return a client of the cluster; a context manager that closes its connections."""
    from stoker.kube.client import KubeClient

    return KubeClient.for_target(parse_target(on))
