"""Fixtures of the Slurm tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slurm import SlurmTestCluster, slurm_cluster


@pytest.fixture(scope="package")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmTestCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started_cluster: SlurmTestCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmTestCluster:
    """The cluster, which programs of Slurm find."""
    monkeypatch.setenv("SLURM_CONF", str(started_cluster.config))
    return started_cluster
