"""RBAC permissions that stoker commands need; the generated Roles and the doctor's permission checks derive from them.

Least privilege: everything in one namespace, no access to Secrets, no permission to grant permissions.
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
_SUBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
VERSION = "rbac.authorization.k8s.io/v1"
GROUP = "rbac.authorization.k8s.io"


class Feature(StrEnum):
    """What a permission is needed for."""

    JOBS = "jobs"
    MPI = "jobs with topology mpi"
    INGRESS = "jobs with a role that has an ingress"
    EXEC = "stoker job exec, forward and shell, stoker volume inspect, and the doctor's probe"
    VOLUME = "stoker volume"
    CACHE = "stoker data cache"
    NAMESPACE_CHECKS = "the doctor's checks of the namespace"
    QUEUE_CHECKS = "the doctor's checks of the queue"
    CLUSTER_CHECKS = "the doctor's checks of nodes and storage"


REQUIRED_FEATURES = frozenset({Feature.JOBS, Feature.MPI, Feature.INGRESS})
"""Without these permissions a job fails."""
OPTIONAL_FEATURES = frozenset({Feature.NAMESPACE_CHECKS, Feature.QUEUE_CHECKS, Feature.CLUSTER_CHECKS})
"""Without these permissions the doctor skips checks."""
DEFAULT_FEATURES = frozenset({Feature.JOBS, Feature.EXEC, Feature.VOLUME, Feature.CACHE, Feature.NAMESPACE_CHECKS})


class Permission(NamedTuple):
    """Verbs on a resource."""

    feature: Feature
    resource: str
    verbs: tuple[str, ...]
    group: str = ""
    cluster_scoped: bool = False
    """Whether it needs a ClusterRole: the resource has no namespace, or all namespaces are meant."""

    def __str__(self) -> str:
        name, slash, subresource = self.resource.partition("/")
        return f"{name}{f'.{self.group}' if self.group else ''}{slash}{subresource}"


_READ = ("get", "list", "watch")
# Server-side apply needs `patch`, and `create` if the object does not exist.
_WRITE = ("get", "list", "create", "patch", "delete")
_DELETE_ALL = ("deletecollection",)
# exec and port-forward are requested with GET or POST, depending on the versions of client and server.
_CONNECT = ("create", "get")

PERMISSIONS = (
    Permission(Feature.JOBS, "jobs", (*_WRITE, "watch"), "batch"),
    Permission(Feature.JOBS, "configmaps", _WRITE),
    Permission(Feature.JOBS, "services", _WRITE),
    Permission(Feature.JOBS, "persistentvolumeclaims", ("get", "list", "create")),
    Permission(Feature.JOBS, "pods", (*_READ, "delete")),
    Permission(Feature.JOBS, "pods/log", ("get",)),
    Permission(Feature.JOBS, "events", ("list",)),
    Permission(Feature.MPI, "mpijobs", (*_WRITE, "watch"), "kubeflow.org"),
    Permission(Feature.INGRESS, "ingresses", ("create", "patch"), "networking.k8s.io"),
    Permission(Feature.EXEC, "pods", ("create",)),
    Permission(Feature.EXEC, "pods/exec", _CONNECT),
    Permission(Feature.EXEC, "pods/portforward", _CONNECT),
    Permission(Feature.VOLUME, "persistentvolumeclaims", ("patch", "delete")),
    Permission(Feature.CACHE, "deployments", (*_WRITE, *_DELETE_ALL), "apps"),
    Permission(Feature.CACHE, "statefulsets", (*_WRITE, *_DELETE_ALL), "apps"),
    Permission(Feature.CACHE, "jobs", _DELETE_ALL, "batch"),
    *(
        Permission(Feature.CACHE, resource, _DELETE_ALL)
        for resource in ("configmaps", "persistentvolumeclaims", "services")
    ),
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
"""Needed with `kubernetes.create_namespace` if the namespace does not exist."""


def select_features(*, mpi: bool = False, queue: bool = False, ingress: bool = False) -> frozenset[Feature]:
    """Return the features that a user of such jobs needs."""
    conditional = {Feature.MPI: mpi, Feature.QUEUE_CHECKS: queue, Feature.INGRESS: ingress}
    return DEFAULT_FEATURES | {feature for feature, is_used in conditional.items() if is_used}


def list_permissions(features: Collection[Feature]) -> list[Permission]:
    """List the permissions that features need."""
    return [permission for permission in PERMISSIONS if permission.feature in features]


def build_rbac(
    namespace: str,
    who: str,
    *,
    features: Collection[Feature] = DEFAULT_FEATURES,
    create_namespace: bool = False,
) -> list[Manifest]:
    """Build the Role and RoleBinding that let a user run jobs in a namespace; `who` as in `parse_subject`.

    `Feature.CLUSTER_CHECKS` adds a ClusterRole that can read nodes and storage. `create_namespace` adds the Namespace,
    so that the user needs no permission to create one.
    """
    permissions = list_permissions(features)
    namespaced = list(_build_rules([permission for permission in permissions if not permission.cluster_scoped]))
    cluster_wide = list(_build_rules([permission for permission in permissions if permission.cluster_scoped]))
    subjects = [parse_subject(who, namespace)]
    role_ref = _build_role_ref("Role", NAME)
    objects = [build_object("v1", "Namespace", namespace, {})] if create_namespace else []
    objects += [
        build_object(VERSION, "Role", NAME, {}, namespace=namespace, rules=namespaced),
        build_object(VERSION, "RoleBinding", NAME, {}, namespace=namespace, roleRef=role_ref, subjects=subjects),
    ]
    if cluster_wide:
        name = f"{NAME}-{namespace}"
        role_ref = _build_role_ref("ClusterRole", name)
        objects += [
            build_object(VERSION, "ClusterRole", name, {}, rules=cluster_wide),
            build_object(VERSION, "ClusterRoleBinding", name, {}, roleRef=role_ref, subjects=subjects),
        ]
    return objects


def parse_subject(who: str, namespace: str) -> Manifest:
    """Parse a subject: `alice`, `group:vision`, `serviceaccount:runner` or `serviceaccount:ci/runner`."""
    kind, colon, name = who.partition(":")
    if not colon or kind.lower() not in ("user", "group", "serviceaccount"):  # a user name may contain a colon
        kind, name = "user", who
    if kind.lower() == "serviceaccount":
        *prefix, account = name.split("/")
        if len(prefix) <= 1 and all(_SUBJECT_NAME.fullmatch(part) for part in (*prefix, account)):
            return {"kind": "ServiceAccount", "name": account, "namespace": prefix[0] if prefix else namespace}
    elif name:
        return {"apiGroup": GROUP, "kind": kind.capitalize(), "name": name}
    hint = "use a user name, group:NAME or serviceaccount:[NAMESPACE/]NAME"
    raise InputError(f"{who!r} is not a valid RBAC subject", hint=hint)


def _build_rules(permissions: list[Permission]) -> Iterator[Manifest]:
    """Yield RBAC rules; resources of one group with the same verbs share a rule."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for permission in permissions:
        known = verbs.setdefault((permission.group, permission.resource), [])
        known += [verb for verb in permission.verbs if verb not in known]
    rows = sorted((group, sorted(allowed), resource) for (group, resource), allowed in verbs.items())
    for (group, allowed), group_rows in groupby(rows, key=lambda row: row[:2]):
        yield {"apiGroups": [group], "resources": [resource for *_, resource in group_rows], "verbs": allowed}


def _build_role_ref(kind: str, name: str) -> Manifest:
    return {"apiGroup": GROUP, "kind": kind, "name": name}
