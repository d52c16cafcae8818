"""Addresses and responses of Ray clusters."""

from __future__ import annotations

import pytest

from stoker.errors import AccessDeniedError, InputError
from stoker.launchers.ray.cluster import RayCluster, parse_free, parse_total, resolve_address
from stoker.launchers.ray.placement import count_fitting
from tests.support.ray import (
    fake_dashboard,
)


def test_resolve_address() -> None:
    assert resolve_address("head", {}) == "http://head:8265"
    assert resolve_address("head:80", {"RAY_ADDRESS": "auto"}) == "http://head:80"
    assert resolve_address(None, {"RAY_ADDRESS": "https://a.example/ray/"}) == "https://a.example/ray"
    assert resolve_address(None, {"RAY_ADDRESS": "ray://head:10001"}) == "http://head:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "ray://head"}) == "http://head:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "10.0.0.1:6379"}) == "http://10.0.0.1:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "auto"}) == "http://127.0.0.1:8265"
    assert resolve_address(None, {"RAY_ADDRESS": "local"}) is None
    with pytest.raises(InputError, match="'head:http'"):
        resolve_address("head:http", {})


def test_free_and_total_resources_per_node() -> None:
    text = "1.0/4.0 CPU (0.5 used of 2.0 reserved in placement groups)\n0.0/2.0 GPU\n1.00GiB/8.00GiB memory"
    assert parse_free(text) == {"CPU": 1.5, "GPU": 2.0, "memory": 7 * 2**30}
    assert parse_total(text) == {"CPU": 4.0, "GPU": 2.0, "memory": 8 * 2**30}
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0, "GPU": 8.0}]
    assert count_fitting(nodes, {"CPU": 2}, "PACK") == 2
    assert count_fitting(nodes, {"CPU": 1, "GPU": 1}, "PACK") == 3
    assert count_fitting(nodes, {"CPU": 1}, "STRICT_SPREAD") == 3
    assert count_fitting(nodes, {"CPU": 1}, "STRICT_PACK") == 3


def test_rejected_token_is_an_access_error(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = pytest.importorskip("ray.exceptions")

    def fail(*args: object, **options: object) -> None:
        raise exceptions.AuthenticationError("no")

    with fake_dashboard(200, {"ray_version": "2.60.0"}) as target:
        cluster = RayCluster(f"http://{target}")
        monkeypatch.setattr(cluster._client, "_do_request", fail)
        for request in (lambda: cluster.put("key", {}), cluster.nodes, lambda: cluster.state("job")):
            with pytest.raises(AccessDeniedError, match="token"):
                request()
