"""Conditions and events of objects, in every format in which the API writes them."""

from __future__ import annotations

from typing import Any

from stoker.kube.conditions import filter_events, get_condition, has_condition, newest_first


def event(message: str, **fields: Any) -> dict[str, Any]:
    return {"message": message, **fields}


def test_newest_first_reads_every_time_field() -> None:
    events = [
        event("fine", eventTime="2026-11-16T10:00:02.900000Z"),
        event("coarse", lastTimestamp="2026-11-16T10:00:02Z"),
        event("series", eventTime="2026-11-16T09:00:00.1Z", series={"lastObservedTime": "2026-11-16T10:00:03.5Z"}),
        event("created", metadata={"creationTimestamp": "2026-11-16T10:00:01Z"}),
    ]
    assert [each["message"] for each in newest_first(events)] == ["series", "coarse", "fine", "created"]


def test_filter_events_compares_kind_name_and_uid() -> None:
    claim = {"metadata": {"name": "data", "uid": "1"}}
    involved = [
        {"kind": "PersistentVolumeClaim", "name": "data", "uid": "1"},
        {"kind": "PersistentVolumeClaim", "name": "data", "uid": "2"},
        {"kind": "Pod", "name": "data", "uid": "1"},
        {"name": "data"},
    ]
    events = [event(str(number), involvedObject=each) for number, each in enumerate(involved)]
    assert [each["message"] for each in filter_events(claim, "PersistentVolumeClaim", events)] == ["0", "3"]


def test_conditions() -> None:
    obj = {"status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Old", "status": "True"}]}}
    assert get_condition(obj, "Ready")["status"] == "False"
    assert get_condition(obj, "New") == {}
    assert (has_condition(obj, "Ready"), has_condition(obj, "Old"), has_condition({}, "Ready")) == (False, True, False)
