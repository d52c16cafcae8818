"""Read phases, conditions and events of Kubernetes objects. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.kube.objects import Manifest

FINISHED_PHASES = ("Succeeded", "Failed")
"""Phases of a pod whose containers have terminated."""


def get_phase(obj: Manifest) -> str:
    """Return the phase of a pod, a claim or a volume; Pending if it has none yet."""
    return str((obj.get("status") or {}).get("phase") or "Pending")


def is_terminating(obj: Manifest) -> bool:
    """Whether an object is being deleted."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def get_condition(obj: Manifest, kind: str) -> Manifest:
    """Return the condition of a type; {} if the object has none."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def true_conditions(obj: Manifest) -> frozenset[str]:
    """Return the types of an object's conditions whose status is True."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return frozenset(str(condition["type"]) for condition in conditions if condition.get("status") == "True")


def has_condition(obj: Manifest, kind: str) -> bool:
    """Whether the condition of a type is True."""
    return kind in true_conditions(obj)


# --- Events


def filter_events(obj: Manifest, kind: str, events: Sequence[Manifest]) -> list[Manifest]:
    """Return the events about an object, by kind, name and uid; a missing field of an event matches."""
    expected = {"name": obj["metadata"].get("name"), "uid": obj["metadata"].get("uid")}

    def is_about(event: Manifest) -> bool:
        involved: Mapping[str, Any] = event.get("involvedObject") or {}
        same = all(value is None or involved.get(key) in (None, value) for key, value in expected.items())
        return involved.get("kind", kind) == kind and same

    return [event for event in events if is_about(event)]


def newest_first(events: Sequence[Manifest]) -> Iterator[Manifest]:
    """Yield events, newest first; of the same second, the one listed last comes first."""
    order = sorted(range(len(events)), key=lambda index: (_last_seen(events[index]), index), reverse=True)
    return (events[index] for index in order)


def _last_seen(event: Manifest) -> str:
    """Return when an event was last observed, to the second: the API writes times in two formats."""
    series = event.get("series") or {}
    time = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(time or (event.get("metadata") or {}).get("creationTimestamp") or "")[:19]
