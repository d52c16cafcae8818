"""A real cluster for these tests, and a namespace of its own for each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.kube.client import KubeClient
from stoker.kube.config import KubeTarget
from tests.support.kubernetes import two_node_cluster


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with two_node_cluster(tmp_path_factory.mktemp("k8s")) as found:
        yield found


@pytest.fixture
def cluster(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeClient]:
    """The cluster, with a namespace of the test's own."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    with KubeClient.for_target(KubeTarget(), namespace=f"test-{secrets.token_hex(3)}") as found:
        found.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": found.namespace}})
        yield found
        found.delete("Namespace", found.namespace)
