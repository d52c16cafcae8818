"""Fixtures: a real two-node cluster, and a namespace for each test."""

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
    with two_node_cluster(tmp_path_factory.mktemp("k8s")) as path:
        yield path


@pytest.fixture
def cluster(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeClient]:
    """A client of the cluster, with a new namespace."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    with KubeClient.for_target(KubeTarget(), namespace=f"test-{secrets.token_hex(3)}") as client:
        client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": client.namespace}})
        yield client
        client.delete("Namespace", client.namespace)
