"""Real Kubernetes clusters for tests, if the programs for one are installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.errors import MissingError
from stoker.kube.client import KubeClient
from tests.support.paths import SHARED

PROGRAMS = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
PATH = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
"""A PATH with kubectl."""
KUBECONFIG_VARIABLE = "STOKER_TEST_KUBECONFIG"
"""The variable with the kubeconfig of a cluster that is already running."""
NO_KUBERNETES = "no Kubernetes programs"


@contextmanager
def two_node_cluster(home: Path) -> Iterator[Path]:
    """Start a cluster of two nodes that runs pods, and yield its kubeconfig."""
    if kubeconfig := os.environ.get(KUBECONFIG_VARIABLE):
        yield Path(kubeconfig)
        return
    if not (PROGRAMS / "kubelet").exists() or not SHARED.is_dir():
        pytest.skip(f"{NO_KUBERNETES} in {PROGRAMS} (set KUBEBUILDER_ASSETS)")
    env = {**os.environ, "K8S_HOME": str(home), "NODES": "2", "KUBEBUILDER_ASSETS": str(PROGRAMS)}
    subprocess.run([SHARED / "k8s/up.sh", "full"], env=env, check=True, timeout=180)
    try:
        yield home / "run/pki/admin.kubeconfig"
    finally:
        subprocess.run([SHARED / "k8s/down.sh"], env=env, check=False, timeout=120)


def has_mpi_operator(cluster: KubeClient) -> bool:
    """Whether a cluster has the MPI operator's CRD."""
    try:
        cluster.list_objects("MPIJob")
    except MissingError:
        return False
    return True
