"""The API keeps to its OpenAPI document, and no request makes it fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stoker.dashboard.routes import API, STREAM_PATH
from stoker.jobs.run_folder import RunFolder
from tests.support.dashboards import Dashboard

schemathesis = pytest.importorskip("schemathesis")


def test_no_request_makes_the_api_fail(dashboard: Dashboard, run: RunFolder) -> None:
    document = dashboard.get("/api/openapi.json").json
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {STREAM_PATH, *(route.path for route in API)}
    schema = schemathesis.openapi.from_dict(document)
    tested = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == STREAM_PATH:  # it does not end
            continue
        tested.append(operation.path)

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy())
        def check(case: Any) -> None:
            for run_id in (case.path_parameters.get("run"), run.id):
                if run_id is not None:
                    case.path_parameters["run"] = run_id
                response = case.call(base_url=dashboard.url)
                assert response.status_code < 500, (case, response.text)
                if response.status_code == 200:
                    case.validate_response(response)

        check()
    assert len(tested) == len(API)
