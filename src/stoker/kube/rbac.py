"""Which rights our commands need, in one place: the Role for who runs jobs and the doctor's questions are made from it.

Least privilege: all in one namespace, nothing that reads a secret, no right to give rights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from stoker.errors import InputError
from stoker.kube.objects import Manifest, build_object

NAME = "stoker"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
VERSION = "rbac.authorization.k8s.io/v1"
GROUP = "rbac.authorization.k8s.io"


class Feature(StrEnum):
    """What a right is for."""

    JOBS = "jobs"
    MPI = "jobs of topology mpi"
    INGRESS = "jobs with a role that has an ingress"
    EXEC = "stoker job exec, forward and shell, stoker volume inspect, and the doctor's probe"
    VOLUME = "stoker volume"
    CACHE = "stoker data cache"
    NAMESPACE_CHECKS = "what the doctor tells of a namespace"
    QUEUE_CHECKS = "what the doctor tells of a queue"
    CLUSTER_CHECKS = "what the doctor tells of nodes and storage"


REQUIRED_FEATURES = frozenset({Feature.JOBS, Feature.MPI, Feature.INGRESS})
"""Without these rights a job fails."""
OPTIONAL_FEATURES = frozenset({Feature.NAMESPACE_CHECKS, Feature.QUEUE_CHECKS, Feature.CLUSTER_CHECKS})
"""Without these rights something is not known."""
DEFAULT_FEATURES = frozenset({Feature.JOBS, Feature.EXEC, Feature.VOLUME, Feature.CACHE, Feature.NAMESPACE_CHECKS})


class Permission(NamedTuple):
    """What may be done with a kind of objects."""

    feature: Feature
    resource: str
    verbs: tuple[str, ...]
    group: str = ""
    cluster_scoped: bool = False
    """Whether it is about what is in no namespace, or in any."""

    def __str__(self) -> str:
        name, slash, inner = self.resource.partition("/")
        return f"{name}{f'.{self.group}' if self.group else ''}{slash}{inner}"


_READ = ("get", "list", "watch")
# Server-side apply is `patch`, and `create` where there is nothing yet.
_OWN = ("get", "list", "create", "patch", "delete")
_ALL = ("deletecollection",)
# A connection through which both sides talk is asked for with GET or with POST, by client and server.
_TALK = ("create", "get")

PERMISSIONS = (
    Permission(Feature.JOBS, "jobs", (*_OWN, "watch"), "batch"),
    Permission(Feature.JOBS, "configmaps", _OWN),
    Permission(Feature.JOBS, "services", _OWN),
    Permission(Feature.JOBS, "persistentvolumeclaims", ("get", "list", "create")),
    Permission(Feature.JOBS, "pods", (*_READ, "delete")),
    Permission(Feature.JOBS, "pods/log", ("get",)),
    Permission(Feature.JOBS, "events", ("list",)),
    Permission(Feature.MPI, "mpijobs", (*_OWN, "watch"), "kubeflow.org"),
    Permission(Feature.INGRESS, "ingresses", ("create", "patch"), "networking.k8s.io"),
    Permission(Feature.EXEC, "pods", ("create",)),
    Permission(Feature.EXEC, "pods/exec", _TALK),
    Permission(Feature.EXEC, "pods/portforward", _TALK),
    Permission(Feature.VOLUME, "persistentvolumeclaims", ("patch", "delete")),
    Permission(Feature.CACHE, "deployments", (*_OWN, *_ALL), "apps"),
    Permission(Feature.CACHE, "statefulsets", (*_OWN, *_ALL), "apps"),
    Permission(Feature.CACHE, "jobs", _ALL, "batch"),
    *(Permission(Feature.CACHE, resource, _ALL) for resource in ("configmaps", "persistentvolumeclaims", "services")),
    Permission(Feature.NAMESPACE_CHECKS, "namespaces", ("get",)),
    Permission(Feature.NAMESPACE_CHECKS, "resourcequotas", ("list",)),
    Permission(Feature.NAMESPACE_CHECKS, "serviceaccounts", ("get",)),
    Permission(Feature.QUEUE_CHECKS, "localqueues", ("get",), "kueue.x-k8s.io"),
    Permission(Feature.CLUSTER_CHECKS, "nodes", ("list",), cluster_scoped=True),
    Permission(Feature.CLUSTER_CHECKS, "storageclasses", ("list",), "storage.k8s.io", cluster_scoped=True),
    Permission(Feature.CLUSTER_CHECKS, "persistentvolumes", ("list",), cluster_scoped=True),
    Permission(Feature.CLUSTER_CHECKS, "priorityclasses", ("get",), "scheduling.k8s.io", cluster_scoped=True),
)
CREATE_NAMESPACE = Permission(Feature.JOBS, "namespaces", ("create",), cluster_scoped=True)
"""Where `kubernetes.create_namespace` has one to make."""


def select_features(*, mpi: bool = False, queue: bool = False, ingress: bool = False) -> frozenset[Feature]:
    """Give the parts that somebody uses who runs jobs of this kind."""
    more = {Feature.MPI: mpi, Feature.QUEUE_CHECKS: queue, Feature.INGRESS: ingress}
    return DEFAULT_FEATURES | {part for part, is_used in more.items() if is_used}


def list_permissions(features: Collection[Feature]) -> list[Permission]:
    """List the rights of some parts."""
    return [right for right in PERMISSIONS if right.feature in features]


def build_rbac(
    namespace: str,
    who: str,
    *,
    features: Collection[Feature] = DEFAULT_FEATURES,
    create_namespace: bool = False,
) -> list[Manifest]:
    """Give what lets somebody run jobs in a namespace: a Role and its binding; `who` as `subject` reads it.

    With `Part.NODES`, a ClusterRole too, which reads what the doctor tells of nodes and storage. A namespace that is to
    be made is made along with them: then who runs jobs needs no right to make any.
    """
    listed = list_permissions(features)
    inside = list(_rules([right for right in listed if not right.cluster_scoped]))
    outside = list(_rules([right for right in listed if right.cluster_scoped]))
    to = [parse_subject(who, namespace)]
    objects = [build_object("v1", "Namespace", namespace, {})] if create_namespace else []
    objects += [
        build_object(VERSION, "Role", NAME, {}, namespace=namespace, rules=inside),
        build_object(VERSION, "RoleBinding", NAME, {}, namespace=namespace, roleRef=_ref("Role", NAME), subjects=to),
    ]
    if outside:
        name = f"{NAME}-{namespace}"
        objects += [
            build_object(VERSION, "ClusterRole", name, {}, rules=outside),
            build_object(VERSION, "ClusterRoleBinding", name, {}, roleRef=_ref("ClusterRole", name), subjects=to),
        ]
    return objects


def parse_subject(who: str, namespace: str) -> Manifest:
    """Read who is meant: `alice`, `group:vision`, `serviceaccount:runner` (of this namespace, or `ci/runner`)."""
    kind, colon, name = who.partition(":")
    if not colon or kind.lower() not in ("user", "group", "serviceaccount"):  # a user's name may have a colon in it
        kind, name = "user", who
    if kind.lower() == "serviceaccount":
        *space, account = name.split("/")
        if len(space) <= 1 and all(_LABEL.fullmatch(one) for one in (*space, account)):
            return {"kind": "ServiceAccount", "name": account, "namespace": space[0] if space else namespace}
    elif name:
        return {"apiGroup": GROUP, "kind": kind.capitalize(), "name": name}
    hint = "give a user's name, group:NAME or serviceaccount:[NAMESPACE/]NAME"
    raise InputError(f"{who!r} names nobody", hint=hint)


def _rules(listed: list[Permission]) -> Iterator[Manifest]:
    """Write rights as rules: resources of one group with the same verbs together."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for right in listed:
        known = verbs.setdefault((right.group, right.resource), [])
        known += [verb for verb in right.verbs if verb not in known]
    rows = sorted((group, sorted(given), resource) for (group, resource), given in verbs.items())
    for (group, given), some in groupby(rows, key=lambda row: row[:2]):
        yield {"apiGroups": [group], "resources": [resource for *_, resource in some], "verbs": given}


def _ref(kind: str, name: str) -> Manifest:
    return {"apiGroup": GROUP, "kind": kind, "name": name}
