"""What a job wants of a cluster and what was found there, as values; and the words that all verdicts share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.capacity import Group, groups
from stoker.errors import InputError, StokerError, UnavailableError
from stoker.kube.client import Hello
from stoker.kube.objects import Manifest
from stoker.kube.rbac import Right

T = TypeVar("T")
Found: TypeAlias = T | StokerError
"""What was found, or why it could not be looked at."""
HELLO = Hello("", 0.0, None)
BAD, DOWN = InputError.exit_code, UnavailableError.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What the objects of a job name and ask for."""

    groups: Sequence[Group] = ()
    objects: Mapping[str, int] = field(default_factory=dict)
    """How many of each kind are made."""
    made: Mapping[str, Manifest] = field(default_factory=dict)
    """Claims that are made with the job."""
    secrets: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Secrets, and the keys that are wanted of each."""
    accounts: frozenset[str] = frozenset()
    priorities: frozenset[str] = frozenset()

    @property
    def mounts(self) -> dict[str, list[tuple[Group, bool]]]:
        """Who mounts each claim, and whether only to read."""
        found: dict[str, list[tuple[Group, bool]]] = {}
        for group in self.groups:
            for name, reads in group.claims.items():
                found.setdefault(name, []).append((group, reads))
        return found


def wants(objects: Sequence[Manifest]) -> Wants:
    """Read from rendered objects what a job needs to find."""
    found = groups(objects)
    secrets: dict[str, set[str]] = {}
    for spec in (group.spec for group in found):
        for container in spec.get("containers") or ():
            for variable in container.get("env") or ():
                if ref := (variable.get("valueFrom") or {}).get("secretKeyRef"):
                    secrets.setdefault(ref["name"], set()).add(ref["key"])
        for volume in spec.get("volumes") or ():
            if ref := volume.get("secret"):
                secrets.setdefault(ref["secretName"], set())
        for ref in spec.get("imagePullSecrets") or ():
            secrets.setdefault(ref["name"], set())
    return Wants(
        groups=found,
        objects=Counter(one["kind"] for one in objects),
        made={one["metadata"]["name"]: one for one in objects if one["kind"] == "PersistentVolumeClaim"},
        secrets={name: frozenset(keys) for name, keys in secrets.items()},
        accounts=frozenset(one for group in found if (one := group.spec.get("serviceAccountName"))),
        priorities=frozenset(one for group in found if (one := group.spec.get("priorityClassName"))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was found in a cluster."""

    namespace: str
    server: str = ""
    hello: Hello = HELLO
    allowed: Mapping[tuple[Right, str], Found[bool]] = field(default_factory=dict)
    space: Found[Manifest | None] = None
    operator: Found[Mapping[str, frozenset[str]]] = field(default_factory=dict)
    """The versions of the API group kubeflow.org, and the kinds of each."""
    kueue: Found[Mapping[str, frozenset[str]]] = field(default_factory=dict)
    queue: Found[Manifest | None] = None
    nodes: Found[Sequence[Manifest]] = ()
    pods: Found[Sequence[Manifest]] = ()
    """Of all namespaces."""
    own_pods: Found[Sequence[Manifest]] = ()
    quotas: Found[Sequence[Manifest]] = ()
    classes: Found[Sequence[Manifest]] = ()
    volumes: Found[Sequence[Manifest]] = ()
    claims: Mapping[str, Found[Manifest | None]] = field(default_factory=dict)
    claim_events: Mapping[str, Found[Sequence[Manifest]]] = field(default_factory=dict)
    secrets: Mapping[str, Found[frozenset[str] | None]] = field(default_factory=dict)
    """The keys of each, never a value."""
    accounts: Mapping[str, Found[Manifest | None]] = field(default_factory=dict)
    priorities: Mapping[str, Found[Manifest | None]] = field(default_factory=dict)
    cache: Found[Manifest | None] = None
    refusals: Mapping[str, StokerError] = field(default_factory=dict)
    """What the API server said no to, of objects that it was only asked about."""
    tried: int = 0
    """About how many it was asked."""


# --- Words


def unknown(what: str, error: StokerError) -> Check:
    """Tell that something could not be looked at, and why."""
    return Check(what, None, f"not known: {error.what}")


def missing(what: str, found: str, fix: str) -> Check:
    """Tell of what the job names or needs and the cluster does not have."""
    return Check(what, False, found, fix, code=BAD)


def some(names: Sequence[str]) -> str:
    """Name a few of many."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
