"""What objects of any kind tell of themselves, and what events tell of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.kube.objects import Manifest

FINISHED_PHASES = ("Succeeded", "Failed")
"""Phases of a pod that has ended."""


def get_phase(one: Manifest) -> str:
    """Give the phase of a pod, a claim or a volume."""
    return str((one.get("status") or {}).get("phase") or "Pending")


def is_terminating(one: Manifest) -> bool:
    """Whether an object is being deleted."""
    return bool(one["metadata"].get("deletionTimestamp"))


def get_condition(one: Manifest, kind: str) -> Manifest:
    """Give a condition of an object; {}: it has none of that type."""
    found = [each for each in (one.get("status") or {}).get("conditions") or () if each.get("type") == kind]
    return found[0] if found else {}


def true_conditions(one: Manifest) -> frozenset[str]:
    """Give the conditions of an object that hold."""
    told = (one.get("status") or {}).get("conditions") or ()
    return frozenset(str(each["type"]) for each in told if each.get("status") == "True")


def has_condition(one: Manifest, kind: str) -> bool:
    """Whether an object has a condition, and it is true."""
    return kind in true_conditions(one)


# --- Events


def filter_events(one: Manifest, kind: str, events: Sequence[Manifest]) -> list[Manifest]:
    """Keep the events that are about an object: those of one namesake's life, where they say which."""
    mine = (one["metadata"].get("name"), one["metadata"].get("uid"))

    def is_own(event: Manifest) -> bool:
        about: Mapping[str, Any] = event.get("involvedObject") or {}
        same = all(mine[at] is None or about.get(key) in (None, mine[at]) for at, key in enumerate(("name", "uid")))
        return about.get("kind", kind) == kind and same

    return [event for event in events if is_own(event)]


def newest_first(events: Sequence[Manifest]) -> Iterator[Manifest]:
    """Give events, the newest first; of the same second, the one that came last."""
    return (events[at] for at in sorted(range(len(events)), key=lambda at: (_seen(events[at]), at), reverse=True))


def _seen(event: Manifest) -> str:
    """Give when an event was last seen, to the second: the API has two forms of writing times."""
    series = event.get("series") or {}
    told = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(told or (event.get("metadata") or {}).get("creationTimestamp") or "")[:19]
