"""200 concurrent requests for half a minute: no error with a PyTorch checkpoint, nor with a SavedModel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.model_servers import model_serve_command
from tests.support.post_load import run_post_load
from tests.support.trees import image_bytes

CLIENTS, SECONDS = 200, 30


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_many_concurrent_requests_succeed(
    framework: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    if framework == "torch":
        model = request.getfixturevalue("trained") / "checkpoints"
        path, body = "/classify", image_bytes(3, size=(320, 240))
    else:
        model = request.getfixturevalue("saved_models") / "half_plus_two"
        path, body = "/v1/models/half_plus_two:predict", json.dumps({"instances": [1.0, 2.0]}).encode()
    with model_serve_command(model, log=tmp_path / "log") as (process, client):
        result = run_post_load(f"{client.url}{path}", body, clients=CLIENTS, seconds=SECONDS)
        metrics = client.get("/metrics").body.decode()
        assert process.poll() is None
    assert result.errors == {}, (tmp_path / "log").read_text()
    assert len(result.latencies_s) > CLIENTS
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert int(lines["stoker_model_batches_total"]) < int(lines["stoker_model_batched_requests_total"])
    for name, value in (("p50_ms", result.percentile_ms(50)), ("p99_ms", result.percentile_ms(99))):
        record_property(name, round(value, 1))
        print(framework, name, round(value, 1))  # noqa: T201
    print(framework, "requests/s", round(result.requests_per_s))  # noqa: T201
