"""RBAC: generated Roles grant what is listed and no more, and never secrets or permissions."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import InputError
from stoker.kube.rbac import (
    DEFAULT_FEATURES,
    PERMISSIONS,
    Feature,
    build_rbac,
    list_permissions,
    parse_subject,
    select_features,
)


def get_granted(objects: list[dict[str, Any]], kind: str = "Role") -> set[tuple[str, str, str]]:
    """Return what the rules of a role grant: verb, group, resource."""
    (role,) = [obj for obj in objects if obj["kind"] == kind]
    return {
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def get_expected(features: frozenset[Feature], *, cluster_scoped: bool = False) -> set[tuple[str, str, str]]:
    """Return what features need: verb, group, resource."""
    permissions = [each for each in list_permissions(features) if each.cluster_scoped == cluster_scoped]
    return {(verb, each.group, each.resource) for each in permissions for verb in each.verbs}


@pytest.mark.parametrize(
    "features", [DEFAULT_FEATURES, select_features(mpi=True, queue=True, ingress=True), frozenset({Feature.JOBS})]
)
def test_role_grants_exactly_the_listed_permissions(features: frozenset[Feature]) -> None:
    assert get_granted(build_rbac("team", "alice", features=features)) == get_expected(features)


def test_role_has_no_wildcard_no_secrets_and_no_escalation() -> None:
    role = get_granted(build_rbac("team", "alice", features=frozenset(Feature)))
    resources = {resource for _, _, resource in role}
    assert not resources & {"secrets", "*", "roles", "rolebindings", "serviceaccounts/token"}
    assert not {verb for verb, _, _ in role} & {"*", "impersonate", "bind", "escalate"}
    assert ("create", "", "namespaces") not in role


def test_operator_resources_are_granted_only_if_used() -> None:
    assert not {group for _, group, _ in get_granted(build_rbac("team", "alice"))} & {"kubeflow.org", "kueue.x-k8s.io"}
    role = get_granted(build_rbac("team", "alice", features=select_features(mpi=True)))
    assert ("create", "kubeflow.org", "mpijobs") in role


def test_cluster_role_is_separate_and_read_only() -> None:
    assert [obj["kind"] for obj in build_rbac("team", "alice")] == ["Role", "RoleBinding"]
    objects = build_rbac("team", "alice", features=DEFAULT_FEATURES | {Feature.CLUSTER_CHECKS})
    assert [obj["kind"] for obj in objects] == ["Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"]
    cluster_role = get_granted(objects, "ClusterRole")
    assert cluster_role == get_expected(frozenset({Feature.CLUSTER_CHECKS}), cluster_scoped=True)
    assert {verb for verb, _, _ in cluster_role} <= {"get", "list"}
    assert get_granted(objects) == get_expected(DEFAULT_FEATURES)


def test_role_binding_refers_to_role_and_namespace() -> None:
    namespace, role, binding = build_rbac("team", "serviceaccount:runner", create_namespace=True)
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", "team")
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
def test_parse_subject(text: str, kind: str, name: str) -> None:
    subject = parse_subject(text, "team")
    assert (subject["kind"], subject["name"]) == (kind, name)


@pytest.mark.parametrize("text", ["", "serviceaccount:", "serviceaccount:a/b/c", "serviceaccount:/b", "user:"])
def test_invalid_subject(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_subject(text, "team")
    assert repr(text) in caught.value.what
    assert "serviceaccount:[NAMESPACE/]NAME" in str(caught.value.hint)


def test_every_permission_is_listed_once() -> None:
    listed = [(verb, each.group, each.resource, each.cluster_scoped) for each in PERMISSIONS for verb in each.verbs]
    assert len(listed) == len(set(listed))
