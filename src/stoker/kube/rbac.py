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
from stoker.kube.objects import Manifest, manifest

NAME = "stoker"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
VERSION = "rbac.authorization.k8s.io/v1"
GROUP = "rbac.authorization.k8s.io"


class Part(StrEnum):
    """What a right is for."""

    JOB = "jobs"
    MPI = "jobs of topology mpi"
    INGRESS = "jobs with a role that has an ingress"
    INSIDE = "stoker job exec, forward and shell, stoker volume inspect, and the doctor's probe"
    VOLUME = "stoker volume"
    CACHE = "stoker data cache"
    LOOK = "what the doctor tells of a namespace"
    QUEUE = "what the doctor tells of a queue"
    NODES = "what the doctor tells of nodes and storage"


REQUIRED = frozenset({Part.JOB, Part.MPI, Part.INGRESS})
"""Without these rights a job fails."""
OPTIONAL = frozenset({Part.LOOK, Part.QUEUE, Part.NODES})
"""Without these rights something is not known."""
EVERYDAY = frozenset({Part.JOB, Part.INSIDE, Part.VOLUME, Part.CACHE, Part.LOOK})


class Right(NamedTuple):
    """What may be done with a kind of objects."""

    part: Part
    resource: str
    verbs: tuple[str, ...]
    group: str = ""
    everywhere: bool = False
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

RIGHTS = (
    Right(Part.JOB, "jobs", (*_OWN, "watch"), "batch"),
    Right(Part.JOB, "configmaps", _OWN),
    Right(Part.JOB, "services", _OWN),
    Right(Part.JOB, "persistentvolumeclaims", ("get", "list", "create")),
    Right(Part.JOB, "pods", (*_READ, "delete")),
    Right(Part.JOB, "pods/log", ("get",)),
    Right(Part.JOB, "events", ("list",)),
    Right(Part.MPI, "mpijobs", (*_OWN, "watch"), "kubeflow.org"),
    Right(Part.INGRESS, "ingresses", ("create", "patch"), "networking.k8s.io"),
    Right(Part.INSIDE, "pods", ("create",)),
    Right(Part.INSIDE, "pods/exec", _TALK),
    Right(Part.INSIDE, "pods/portforward", _TALK),
    Right(Part.VOLUME, "persistentvolumeclaims", ("patch", "delete")),
    Right(Part.CACHE, "deployments", (*_OWN, *_ALL), "apps"),
    Right(Part.CACHE, "statefulsets", (*_OWN, *_ALL), "apps"),
    Right(Part.CACHE, "jobs", _ALL, "batch"),
    *(Right(Part.CACHE, resource, _ALL) for resource in ("configmaps", "persistentvolumeclaims", "services")),
    Right(Part.LOOK, "namespaces", ("get",)),
    Right(Part.LOOK, "resourcequotas", ("list",)),
    Right(Part.LOOK, "serviceaccounts", ("get",)),
    Right(Part.QUEUE, "localqueues", ("get",), "kueue.x-k8s.io"),
    Right(Part.NODES, "nodes", ("list",), everywhere=True),
    Right(Part.NODES, "storageclasses", ("list",), "storage.k8s.io", everywhere=True),
    Right(Part.NODES, "persistentvolumes", ("list",), everywhere=True),
    Right(Part.NODES, "priorityclasses", ("get",), "scheduling.k8s.io", everywhere=True),
)
NEW_NAMESPACE = Right(Part.JOB, "namespaces", ("create",), everywhere=True)
"""Where `kubernetes.create_namespace` has one to make."""


def parts(*, mpi: bool = False, queue: bool = False, ingress: bool = False) -> frozenset[Part]:
    """Give the parts that somebody uses who runs jobs of this kind."""
    more = {Part.MPI: mpi, Part.QUEUE: queue, Part.INGRESS: ingress}
    return EVERYDAY | {part for part, is_used in more.items() if is_used}


def rights(wanted: Collection[Part]) -> list[Right]:
    """List the rights of some parts."""
    return [right for right in RIGHTS if right.part in wanted]


def rbac(
    namespace: str,
    who: str,
    *,
    wanted: Collection[Part] = EVERYDAY,
    create_namespace: bool = False,
) -> list[Manifest]:
    """Give what lets somebody run jobs in a namespace: a Role and its binding; `who` as `subject` reads it.

    With `Part.NODES`, a ClusterRole too, which reads what the doctor tells of nodes and storage. A namespace that is to
    be made is made along with them: then who runs jobs needs no right to make any.
    """
    listed = rights(wanted)
    inside = list(_rules([right for right in listed if not right.everywhere]))
    outside = list(_rules([right for right in listed if right.everywhere]))
    to = [subject(who, namespace)]
    objects = [manifest("v1", "Namespace", namespace, {})] if create_namespace else []
    objects += [
        manifest(VERSION, "Role", NAME, {}, namespace=namespace, rules=inside),
        manifest(VERSION, "RoleBinding", NAME, {}, namespace=namespace, roleRef=_ref("Role", NAME), subjects=to),
    ]
    if outside:
        name = f"{NAME}-{namespace}"
        objects += [
            manifest(VERSION, "ClusterRole", name, {}, rules=outside),
            manifest(VERSION, "ClusterRoleBinding", name, {}, roleRef=_ref("ClusterRole", name), subjects=to),
        ]
    return objects


def subject(who: str, namespace: str) -> Manifest:
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


def _rules(listed: list[Right]) -> Iterator[Manifest]:
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
