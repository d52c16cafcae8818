"""A real cluster for these tests: the one that $STOKER_TEST_KUBECONFIG names, or one that is started for them."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.kube.client import Cluster
from stoker.kube.config import Place

SHARED = Path(__file__).parents[4] / "shared" / "k8s"
PROGRAMS = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
GIVEN = "STOKER_TEST_KUBECONFIG"


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster of two nodes on which pods really run."""
    if given := os.environ.get(GIVEN):
        yield Path(given)
        return
    if not (PROGRAMS / "kubelet").exists() or not SHARED.is_dir():
        pytest.skip(f"no Kubernetes programs in {PROGRAMS} (set KUBEBUILDER_ASSETS)")
    home = tmp_path_factory.mktemp("k8s")
    env = {**os.environ, "K8S_HOME": str(home), "NODES": "2", "KUBEBUILDER_ASSETS": str(PROGRAMS)}
    subprocess.run([SHARED / "up.sh", "full"], env=env, check=True, timeout=180)
    yield home / "run/pki/admin.kubeconfig"
    subprocess.run([SHARED / "down.sh"], env=env, check=False, timeout=120)


@pytest.fixture
def cluster(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, with a namespace of the test's own."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    found = Cluster.at(Place(), namespace=f"test-{secrets.token_hex(3)}")
    found.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": found.namespace}})
    yield found
    found.delete("Namespace", found.namespace)
    found.close()
