"""Creation of a run's objects: number and order of API calls, objects of others, and Kueue."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import ConflictError, MissingError
from stoker.jobs.launcher import LAUNCHERS
from stoker.launchers.kubernetes.lifecycle import create_objects
from tests.launchers.contract import job_of


class FakeClient:
    """An empty cluster that accepts everything and records the calls."""

    def __init__(self, missing_group: str = "") -> None:
        self.calls: list[tuple[str, str]] = []
        self._missing_group = missing_group

    def get(self, kind: str, name: str) -> None:
        self.calls.append(("get", kind))

    def create(self, obj: Any) -> Any:
        if ("create", "Job") in self.calls:
            assert obj["metadata"]["ownerReferences"][0]["uid"] == "u"
        self.calls.append(("create", obj["kind"]))
        return {**obj, "metadata": {**obj["metadata"], "uid": "u"}}

    def apply(self, obj: Any) -> Any:
        raise AssertionError("apply would overwrite an existing object of that name")

    def patch(self, kind: str, name: str, patch: Any) -> None:
        self.calls.append(("patch", kind))

    def delete(self, kind: str, name: str) -> None:
        self.calls.append(("delete", kind))

    def list_api_versions(self, group: str) -> dict[str, frozenset[str]]:
        return {} if self._missing_group == group else {"v1beta2": frozenset()}


def create(client: FakeClient, **keys: Any) -> list[tuple[str, str]]:
    """Create the objects of a torchrun job; return the calls."""
    job = job_of(**{"program": {"module": "a"}, "image": "x", "topology": "torchrun", "workers": 2, **keys})
    create_objects(client, LAUNCHERS.get("k8s")().render(job).objects)  # type: ignore[arg-type]
    return client.calls


def test_number_of_calls_does_not_depend_on_the_number_of_workers() -> None:
    claim = {"dir": "/c", "claim": "c", "create": True, "size": "1Gi"}
    two, thousand = (create(FakeClient(), workers=workers) for workers in (2, 1000))
    assert two == thousand
    assert len(two) == 5
    two, thousand = (create(FakeClient(), workers=workers, checkpoint=claim) for workers in (2, 1000))
    assert len(two) == len(thousand) == 8


def test_job_is_resumed_only_after_all_objects_exist() -> None:
    calls = create(FakeClient())
    assert calls[0] == ("get", "Job")  # a previous job of the name
    assert calls[1] == ("create", "Job")  # suspended
    assert calls[-1] == ("patch", "Job")  # resumed


def test_existing_object_of_others_is_not_overwritten() -> None:
    class OccupiedClient(FakeClient):
        def create(self, obj: Any) -> Any:
            if obj["kind"] == "ConfigMap":
                raise ConflictError("exists")
            return super().create(obj)

    client = OccupiedClient()
    with pytest.raises(ConflictError, match="ConfigMap small already exists"):
        create(client)
    assert client.calls[-1] == ("delete", "Job")


def test_queue_without_kueue_creates_nothing() -> None:
    client = FakeClient(missing_group="kueue.x-k8s.io")
    with pytest.raises(MissingError, match=r"queue gpus.*Kueue is not installed") as caught:
        create(client, kubernetes={"queue": "gpus"})
    assert "kubernetes.queue" in str(caught.value.hint)
    assert client.calls == [("get", "Job")]


def test_queued_job_is_resumed_by_kueue() -> None:
    assert ("patch", "Job") not in create(FakeClient(), kubernetes={"queue": "gpus"})
