"""The rights that our commands need: no more than is listed, and none that gives rights or reads secrets."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from stoker.errors import InputError
from stoker.kube.quantity import parse_quantity
from stoker.kube.rbac import (
    DEFAULT_FEATURES,
    PERMISSIONS,
    Feature,
    build_rbac,
    list_permissions,
    parse_subject,
    select_features,
)


def granted(objects: list[dict[str, Any]], kind: str = "Role") -> set[tuple[str, str, str]]:
    """Give what the rules of a role allow: verb, group, resource."""
    (role,) = [one for one in objects if one["kind"] == kind]
    return {
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def listed(wanted: frozenset[Feature], *, everywhere: bool = False) -> set[tuple[str, str, str]]:
    some = [right for right in list_permissions(wanted) if right.cluster_scoped == everywhere]
    return {(verb, right.group, right.resource) for right in some for verb in right.verbs}


@pytest.mark.parametrize(
    "wanted", [DEFAULT_FEATURES, select_features(mpi=True, queue=True, ingress=True), frozenset({Feature.JOBS})]
)
def test_a_role_allows_what_is_listed_and_nothing_more(wanted: frozenset[Feature]) -> None:
    assert granted(build_rbac("team", "alice", features=wanted)) == listed(wanted)


def test_no_rule_has_a_wildcard_gives_rights_or_reads_secrets() -> None:
    role = granted(build_rbac("team", "alice", features=frozenset(Feature)))
    resources = {resource for _, _, resource in role}
    assert not resources & {"secrets", "*", "roles", "rolebindings", "serviceaccounts/token"}
    assert not {verb for verb, _, _ in role} & {"*", "impersonate", "bind", "escalate"}
    assert ("create", "", "namespaces") not in role


def test_kinds_of_operators_are_only_there_for_who_uses_them() -> None:
    assert not {group for _, group, _ in granted(build_rbac("team", "alice"))} & {"kubeflow.org", "kueue.x-k8s.io"}
    assert ("create", "kubeflow.org", "mpijobs") in granted(
        build_rbac("team", "alice", features=select_features(mpi=True))
    )


def test_what_is_in_no_namespace_is_read_only_and_asked_for_apart() -> None:
    assert [one["kind"] for one in build_rbac("team", "alice")] == ["Role", "RoleBinding"]
    objects = build_rbac("team", "alice", features=DEFAULT_FEATURES | {Feature.CLUSTER_CHECKS})
    assert [one["kind"] for one in objects] == ["Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"]
    outside = granted(objects, "ClusterRole")
    assert outside == listed(frozenset({Feature.CLUSTER_CHECKS}), everywhere=True)
    assert {verb for verb, _, _ in outside} <= {"get", "list"}
    assert granted(objects) == listed(DEFAULT_FEATURES)


def test_binding_role_and_namespace_belong_together() -> None:
    objects = build_rbac("team", "serviceaccount:runner", create_namespace=True)
    space, role, binding = objects
    assert (space["kind"], space["metadata"]["name"]) == ("Namespace", "team")
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "team"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "runner", "namespace": "team"}]


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("alice", "User", "alice"),
        ("alice@example.com", "User", "alice@example.com"),
        ("system:serviceaccount:a:b", "User", "system:serviceaccount:a:b"),
        ("user:group:x", "User", "group:x"),
        ("group:vision", "Group", "vision"),
        ("serviceaccount:ci/runner", "ServiceAccount", "runner"),
    ],
)
def test_who_is_meant(text: str, kind: str, name: str) -> None:
    found = parse_subject(text, "team")
    assert (found["kind"], found["name"]) == (kind, name)


@pytest.mark.parametrize("text", ["", "serviceaccount:", "serviceaccount:a/b/c", "serviceaccount:/b", "user:"])
def test_nobody_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names nobody"):
        parse_subject(text, "team")


def test_every_right_is_listed_once() -> None:
    every = [(verb, right.group, right.resource, right.cluster_scoped) for right in PERMISSIONS for verb in right.verbs]
    assert len(every) == len(set(every))


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8", 8),
        (3, 3),
        ("1500m", "1.5"),
        ("16Gi", 16 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("500M", 500 * 10**6),
        ("2k", 2000),
        ("1e3", 1000),
        ("1E", 10**18),
        ("12E6", 12 * 10**6),
        ("100n", "1E-7"),
        ("0", 0),
    ],
)
def test_quantities(text: str, amount: str | int) -> None:
    assert parse_quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "Gi", "1 GB", "ten", "1mi3"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)
