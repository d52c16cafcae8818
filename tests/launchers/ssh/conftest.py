"""Fixtures of the ssh tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hosts import Network, network


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A network with two hosts, node1 and node2, each with an sshd."""
    with network(tmp_path_factory.mktemp("net")) as hosts:
        yield hosts
