"""What a job requires of a cluster, the facts that were found there, and helpers to build checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.capacity import PodGroup, group_pods
from stoker.errors import InputError, StokerError, UnavailableError
from stoker.kube.client import ServerInfo
from stoker.kube.objects import Manifest
from stoker.kube.rbac import Permission

T = TypeVar("T")
OrError: TypeAlias = T | StokerError
"""A value, or the error that prevented reading it."""
NO_SERVER_INFO = ServerInfo("", 0.0, None)
INVALID, UNAVAILABLE = InputError.exit_code, UnavailableError.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequirements:
    """What the objects of a job request and refer to."""

    groups: Sequence[PodGroup] = ()
    objects: Mapping[str, int] = field(default_factory=dict)
    """Number of objects to create, by kind."""
    new_claims: Mapping[str, Manifest] = field(default_factory=dict)
    """Claims that are created with the job."""
    secrets: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Secrets, with the keys that are required of each."""
    accounts: frozenset[str] = frozenset()
    priorities: frozenset[str] = frozenset()

    @property
    def mounts(self) -> dict[str, list[tuple[PodGroup, bool]]]:
        """The pod groups that mount each claim, and whether read-only."""
        mounts: dict[str, list[tuple[PodGroup, bool]]] = {}
        for group in self.groups:
            for name, read_only in group.claims.items():
                mounts.setdefault(name, []).append((group, read_only))
        return mounts


def find_requirements(objects: Sequence[Manifest]) -> JobRequirements:
    """Collect the requirements of a job from its rendered objects."""
    groups = group_pods(objects)
    secrets: dict[str, set[str]] = {}
    for spec in (group.spec for group in groups):
        for container in spec.get("containers") or ():
            for variable in container.get("env") or ():
                if ref := (variable.get("valueFrom") or {}).get("secretKeyRef"):
                    secrets.setdefault(ref["name"], set()).add(ref["key"])
        for volume in spec.get("volumes") or ():
            if ref := volume.get("secret"):
                secrets.setdefault(ref["secretName"], set())
        for ref in spec.get("imagePullSecrets") or ():
            secrets.setdefault(ref["name"], set())
    return JobRequirements(
        groups=groups,
        objects=Counter(manifest["kind"] for manifest in objects),
        new_claims={
            manifest["metadata"]["name"]: manifest
            for manifest in objects
            if manifest["kind"] == "PersistentVolumeClaim"
        },
        secrets={name: frozenset(keys) for name, keys in secrets.items()},
        accounts=frozenset(name for group in groups if (name := group.spec.get("serviceAccountName"))),
        priorities=frozenset(name for group in groups if (name := group.spec.get("priorityClassName"))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The facts collected from a cluster."""

    namespace: str
    server: str = ""
    server_info: ServerInfo = NO_SERVER_INFO
    allowed: Mapping[tuple[Permission, str], OrError[bool]] = field(default_factory=dict)
    namespace_object: OrError[Manifest | None] = None
    kubeflow_versions: OrError[Mapping[str, frozenset[str]]] = field(default_factory=dict)
    """The versions of the API group kubeflow.org, and the resources of each."""
    kueue_versions: OrError[Mapping[str, frozenset[str]]] = field(default_factory=dict)
    queue: OrError[Manifest | None] = None
    nodes: OrError[Sequence[Manifest]] = ()
    pods: OrError[Sequence[Manifest]] = ()
    """In all namespaces."""
    own_pods: OrError[Sequence[Manifest]] = ()
    quotas: OrError[Sequence[Manifest]] = ()
    classes: OrError[Sequence[Manifest]] = ()
    volumes: OrError[Sequence[Manifest]] = ()
    claims: Mapping[str, OrError[Manifest | None]] = field(default_factory=dict)
    claim_events: Mapping[str, OrError[Sequence[Manifest]]] = field(default_factory=dict)
    secrets: Mapping[str, OrError[frozenset[str] | None]] = field(default_factory=dict)
    """The keys of each Secret, never a value."""
    accounts: Mapping[str, OrError[Manifest | None]] = field(default_factory=dict)
    priorities: Mapping[str, OrError[Manifest | None]] = field(default_factory=dict)
    cache: OrError[Manifest | None] = None
    rejections: Mapping[str, StokerError] = field(default_factory=dict)
    """The objects that the API server rejected in a dry run, with the error."""
    dry_runs: int = 0
    """The number of objects tested in a dry run."""


# --- Building checks


def unknown_check(what: str, error: StokerError) -> Check:
    """Return a check that could not be made, and why."""
    return Check(what, None, f"unknown: {error.what}")


def failed_check(what: str, found: str, fix: str) -> Check:
    """Return a failed check: something that the job requires and the cluster does not provide."""
    return Check(what, False, found, fix, code=INVALID)
