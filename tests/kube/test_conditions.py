"""What objects and their events tell, in whichever of its forms the API writes it."""

from __future__ import annotations

from typing import Any

from stoker.kube.conditions import filter_events, get_condition, has_condition, newest_first


def event(message: str, **more: Any) -> dict[str, Any]:
    return {"message": message, **more}


def test_the_newest_event_comes_first_in_whichever_form_it_tells_its_time() -> None:
    events = [
        event("fine", eventTime="2026-11-16T10:00:02.900000Z"),
        event("coarse", lastTimestamp="2026-11-16T10:00:02Z"),
        event("again", eventTime="2026-11-16T09:00:00.1Z", series={"lastObservedTime": "2026-11-16T10:00:03.5Z"}),
        event("made", metadata={"creationTimestamp": "2026-11-16T10:00:01Z"}),
    ]
    assert [one["message"] for one in newest_first(events)] == ["again", "coarse", "fine", "made"]


def test_events_of_namesakes_are_told_apart() -> None:
    one = {"metadata": {"name": "data", "uid": "1"}}
    about = [
        {"kind": "PersistentVolumeClaim", "name": "data", "uid": "1"},
        {"kind": "PersistentVolumeClaim", "name": "data", "uid": "2"},
        {"kind": "Pod", "name": "data", "uid": "1"},
        {"name": "data"},
    ]
    events = [event(str(at), involvedObject=each) for at, each in enumerate(about)]
    assert [each["message"] for each in filter_events(one, "PersistentVolumeClaim", events)] == ["0", "3"]


def test_conditions() -> None:
    one = {"status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Old", "status": "True"}]}}
    assert get_condition(one, "Ready")["status"] == "False"
    assert get_condition(one, "New") == {}
    assert (has_condition(one, "Ready"), has_condition(one, "Old"), has_condition({}, "Ready")) == (False, True, False)
