"""Fixtures of the Ray tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ray import (
    RayTestCluster,
    ray_cluster,
)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayTestCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as nodes:
        yield nodes
