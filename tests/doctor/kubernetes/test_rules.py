"""Checks of the facts about a Kubernetes cluster: every failed check has a fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stoker.doctor.kubernetes.capacity import group_pods, sum_requests
from stoker.doctor.kubernetes.collect import render_objects
from stoker.doctor.kubernetes.findings import ClusterFacts, find_requirements, unknown_check
from stoker.doctor.kubernetes.rules import MISSING_PERMISSION, check_cluster, check_permissions
from stoker.errors import AccessDeniedError, ConflictError, InputError, StokerError, StorageFullError
from stoker.kube.client import ServerInfo
from stoker.kube.errors import RbacDeniedError, to_error
from stoker.kube.rbac import CREATE_NAMESPACE, Feature, list_permissions, select_features
from tests.doctor.kubernetes.clusters import (
    DENIED,
    GIB,
    GPU,
    NAMESPACE,
    NEW_CLAIM,
    TWO_NODES,
    check_job_with,
    claim,
    make_job,
    node,
    pod,
)


def test_cluster_without_issues() -> None:
    found = check_job_with(make_job(workers=2, resources={"gpu": 8, "cpu": 4, "memory": "8Gi"}))
    assert not [check for check in found.values() if check.fine is False]
    assert re.fullmatch(r"16 × GPU of unknown type on 2 nodes; 16 free", found["gpus"].found)
    assert found["capacity"].found == "2 × worker (4 CPUs, 8 GiB of memory, 8 GPUs): fits"


# --- API server and namespace


@pytest.mark.parametrize(
    ("info", "what", "says"),
    [
        (ServerInfo("v1", 0.01, 90.0), "clock", "1m30s ahead of"),
        (ServerInfo("v1", 0.01, -7.0), "clock", "7s behind"),
        (ServerInfo("v1", 2.0, 0.0), "cluster", "in 2s"),
    ],
)
def test_slow_or_skewed_api_server_is_a_warning(info: ServerInfo, what: str, says: str) -> None:
    check = check_job_with(make_job(), server_info=info)[what]
    assert check.fine is None
    assert says in check.found
    assert check.fix


def test_namespace() -> None:
    missing = check_job_with(make_job(), namespace_object=None)["namespace"]
    assert (missing.fine, missing.code) == (False, InputError.exit_code)
    assert missing.found == "namespace team not found"
    creating = make_job(kubernetes={"namespace": "team", "create_namespace": True})
    assert check_job_with(creating, namespace_object=None)["namespace"].fine is True
    assert (
        check_job_with(make_job(), namespace_object={**NAMESPACE, "status": {"phase": "Terminating"}})["namespace"].fine
        is False
    )
    strict = {"metadata": {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    warning = check_job_with(make_job(), namespace_object=strict)["namespace"]
    assert warning.fine is None
    assert "root" in warning.fix
    other = make_job(kubernetes={"namespace": "team", "user": 1000})
    assert check_job_with(other, namespace_object=strict)["namespace"].fine is True
    assert check_job_with(make_job(), namespace_object=DENIED)["namespace"] == unknown_check("namespace", DENIED)


def test_exactly_the_missing_verbs_are_reported() -> None:
    permissions = list_permissions(select_features(mpi=True) | {Feature.CLUSTER_CHECKS})
    allowed: dict[Any, bool | StokerError] = {
        (permission, verb): True for permission in permissions for verb in permission.verbs
    }
    (check,) = check_permissions(allowed)
    assert check.fine is True
    missing = {
        "watch jobs.batch",
        "patch jobs.batch",
        "get pods/log",
        "create pods/exec",
        "list nodes",
        "get namespaces",
    }
    for permission, verb in list(allowed):
        name = f"{verb} {permission}"
        if name in missing:
            allowed[permission, verb] = False
    checks = list(check_permissions(allowed))
    assert all(check.found.startswith(MISSING_PERMISSION) for check in checks)
    found = {check.found.removeprefix(MISSING_PERMISSION).partition(" (")[0]: check.fine for check in checks}
    assert found == {
        "patch, watch jobs.batch": False,
        "get pods/log": False,
        "create pods/exec": None,
        "get namespaces; list nodes": None,
    }


def test_permission_review_that_is_denied_is_reported_once() -> None:
    error = AccessDeniedError("the cluster does not know you", hint="log in again, as for kubectl")
    allowed: Any = {
        (permission, verb): error for permission in list_permissions({Feature.JOBS}) for verb in permission.verbs
    }
    (check,) = check_permissions(allowed)
    assert (check.fine, check.fix, check.code) == (False, error.hint, 5)
    (new,) = [check for check in check_permissions({(CREATE_NAMESPACE, "create"): False}) if check.fine is False]
    assert new.found == f"{MISSING_PERMISSION}create namespaces"


# --- Operators


def test_mpi_operator_is_required_only_for_mpi_jobs() -> None:
    single = check_job_with(make_job(topology="single"), kubeflow_versions={})["MPI operator"]
    assert single.fine is None
    assert not single.fix
    served = {"v1": frozenset({"mpijobs"}), "v2beta1": frozenset({"mpijobs", "mpijobs/status"})}
    assert check_job_with(make_job(), kubeflow_versions=served)["MPI operator"].fine is True


@pytest.mark.parametrize(
    ("served", "says"),
    [
        ({}, "not installed"),
        ({"v1": frozenset({"mpijobs"})}, "only as v1"),
        ({"v2beta1": frozenset({"others"})}, "not installed"),
    ],
)
def test_mpi_job_requires_the_mpi_operator(served: Any, says: str) -> None:
    job = make_job(topology="mpi", workers=2, resources={"gpu": 8})
    found = check_job_with(job, kubeflow_versions=served)
    assert found["MPI operator"].fine is False
    assert says in found["MPI operator"].found
    assert "mpi-operator" in found["MPI operator"].fix
    assert "2 × worker (8 GPUs)" in found["capacity"].found
    assert "1 × launcher" in found["capacity"].found


@pytest.mark.parametrize(
    ("found", "fine", "says"),
    [
        ({"kueue_versions": {}}, False, "Kueue is not installed"),
        ({"kueue_versions": {"v1beta1": frozenset({"localqueues"})}}, None, "served only as v1beta1"),
        (
            {"kueue_versions": {"v1beta2": frozenset({"localqueues"})}, "queue": None},
            False,
            "queue gpu not found in team",
        ),
        (
            {
                "kueue_versions": {"v1beta2": frozenset()},
                "queue": {"status": {"conditions": [{"type": "Active", "status": "False", "message": "stopped"}]}},
            },
            False,
            "gpu admits no jobs: stopped",
        ),
        (
            {"kueue_versions": {"v1beta2": frozenset()}, "queue": {"status": {"pendingWorkloads": 3}}},
            True,
            "3 jobs waiting",
        ),
        ({"kueue_versions": {"v1beta2": frozenset()}, "queue": DENIED}, None, DENIED.what),
    ],
)
def test_queues(found: Any, fine: bool | None, says: str) -> None:
    check = check_job_with(make_job(kubernetes={"namespace": "team", "queue": "gpu"}), **found)["queue"]
    assert check.fine is fine
    assert says in check.found


# --- Nodes


def test_gpus_are_counted_by_type_and_those_of_running_pods_are_not_free() -> None:
    nodes = [
        node("a", gpu_type="h100"),
        node("b", gpu_type="h100", gpu=4),
        node("c", gpu_type="t4", gpu=1),
        node("d", gpu=0),
    ]
    pods = [pod("a", **{GPU: "3"}), pod("b", **{GPU: "4"}), pod("c", phase="Succeeded", **{GPU: "1"})]
    objects, _ = render_objects(make_job())
    rows = check_cluster(
        make_job(),
        find_requirements(objects),
        ClusterFacts(namespace="team", nodes=nodes, pods=pods, namespace_object=NAMESPACE),
    )
    assert [check.found for check in rows if check.what == "gpus"] == [
        "12 × h100 on 2 nodes; 5 free",
        "1 × t4 on 1 node; 1 free",
    ]


def test_nodes_and_pods_that_cannot_be_listed() -> None:
    found = check_job_with(make_job(), nodes=DENIED)
    assert [found[what].fine for what in ("gpus", "capacity")] == [None, None]
    assert "unknown" in check_job_with(make_job(), pods=DENIED)["gpus"].found


@pytest.mark.parametrize(
    ("keys", "nodes", "fine", "says", "fix"),
    [
        ({"workers": 3, "resources": {"gpu": 8}}, TWO_NODES, False, "2 of 3 pods fit: worker (8 GPUs)", "workers="),
        ({"workers": {"min": 2, "max": 4}, "resources": {"gpu": 8}}, TWO_NODES, None, "2 of 4 pods fit", "workers="),
        ({"resources": {"gpu": 16}}, TWO_NODES, False, "requests 16 GPUs, the largest node it can use has 8 GPUs", ""),
        ({"resources": {"cpu": 32}}, TWO_NODES, False, "requests 32 CPUs", ""),
        (
            {"workers": [{"resources": {"gpu": 8}}, {"count": 2, "resources": {"gpu": 4}}]},
            TWO_NODES,
            True,
            ": fits",
            "",
        ),
        ({"workers": [{"resources": {"gpu": 1}}, {"resources": {"gpu": 16}}]}, TWO_NODES, False, "16 GPUs", ""),
        ({"resources": {"memory": "1Ti"}}, TWO_NODES, False, "has 64 GiB of memory", ""),
        (
            {"resources": {"gpu": 1, "gpu_type": "h100"}},
            (node("n1", gpu_type="t4"),),
            False,
            "available types: t4",
            "gpu_type",
        ),
        ({"resources": {"gpu": 1, "gpu_type": "h100"}}, (node("n1", gpu_type="h100"),), True, ": fits", ""),
        ({}, (), False, "no nodes", "autoscaler"),
        ({}, (node("n1", unschedulable=True),), False, "cordoned (n1)", "uncordon"),
        ({}, (node("n1", ready="Unknown"),), False, "not ready (n1)", "describe"),
        (
            {},
            (node("n1", taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}]),),
            False,
            "taint team=a:NoSchedule (n1)",
            "kubernetes.tolerations",
        ),
        ({}, (node("n1", taints=[{"key": "x", "effect": "PreferNoSchedule"}]),), True, ": fits", ""),
        (
            {"kubernetes": {"tolerations": [{"key": "team", "operator": "Exists"}]}},
            (node("n1", taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}]),),
            True,
            ": fits",
            "",
        ),
        (
            {"kubernetes": {"tolerations": [{"key": "team", "value": "b"}]}},
            (node("n1", taints=[{"key": "team", "value": "a", "effect": "NoExecute"}]),),
            False,
            "taint team=a:NoExecute",
            "",
        ),
        (
            {"resources": {"gpu": 1}},
            (node("n1", taints=[{"key": GPU, "value": "present", "effect": "NoSchedule"}]),),
            True,
            ": fits",
            "",
        ),
        (
            {"resources": {"cpu": 12}},
            (node("n1", cpu="8"), node("n2", taints=[{"key": "big", "effect": "NoSchedule"}])),
            False,
            "has 8 CPUs; other nodes have taint big:NoSchedule (n2)",
            "tolerations",
        ),
        (
            {"kubernetes": {"node_selector": {"pool": "a"}}},
            TWO_NODES,
            False,
            "missing label pool=a (n1, n2)",
            "node_selector",
        ),
        (
            {"kubernetes": {"node_selector": {"pool": "a"}}},
            (node("n", labels={"pool": "a"}),),
            True,
            ": fits",
            "",
        ),
    ],
)
def test_capacity(keys: dict[str, Any], nodes: Any, fine: bool | None, says: str, fix: str) -> None:
    check = check_job_with(make_job(**keys), nodes=nodes)["capacity"]
    assert check.fine is fine, check
    assert says in check.found
    assert fix in check.fix


def test_job_that_has_to_wait_for_other_jobs_is_a_warning() -> None:
    check = check_job_with(make_job(workers=2, resources={"gpu": 8}), pods=[pod("n1", **{GPU: "1"})])["capacity"]
    assert check.fine is None
    assert "now 1 of 2 pods fit: worker (8 GPUs)" in check.found


def test_pods_of_several_roles_share_nodes() -> None:
    roles = {"ps": {"count": 2, "resources": {"cpu": 10}}, "chief": {"resources": {"cpu": 10}}}
    job = make_job(topology="tf-ps", workers=1, resources={"gpu": 8, "cpu": 2}, roles=roles)
    check = check_job_with(job)["capacity"]
    assert check.fine is False
    assert re.search(r"of (2 pods fit: ps|1 pods? fit: chief) \(10 CPUs\)", check.found), check.found


def test_requests_of_a_pod_are_summed_like_the_scheduler_does() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "2", GPU: "1"}}},
            {"resources": {"requests": {"cpu": "1"}}},
        ],
        "initContainers": [
            {"resources": {"requests": {"cpu": "4", "memory": "1Gi"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}},
        ],
        "overhead": {"cpu": "50m"},
    }
    assert {name: float(amount) for name, amount in sum_requests(spec).items()} == {
        "cpu": 4.05,
        GPU: 1.0,
        "memory": float(GIB),
    }


def test_a_thousand_identical_tasks_are_few_groups() -> None:
    objects, _ = render_objects(make_job(topology="tf-ps", workers=1000, roles={"ps": {"count": 24}}))
    found = group_pods(objects)
    assert sum(group.count for group in found) == 1025
    assert len(found) < 8


# --- Quota


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "q"}, "spec": spec, "status": {"hard": hard, "used": used or {}}}


@pytest.mark.parametrize(
    ("hard", "used", "fine", "says"),
    [
        (
            {"requests.nvidia.com/gpu": "8"},
            {},
            False,
            "16 requests.nvidia.com/gpu needed, 8 requests.nvidia.com/gpu allowed",
        ),
        ({"requests.nvidia.com/gpu": "20"}, {"requests.nvidia.com/gpu": "8"}, None, "12 requests.nvidia.com/gpu left"),
        ({"requests.nvidia.com/gpu": "20"}, {"requests.nvidia.com/gpu": "4"}, True, "q is sufficient"),
        ({"limits.memory": "15Gi"}, {}, False, "16 GiB of limits.memory needed"),
        ({"cpu": "7900m"}, {}, False, "8 CPUs needed, 7.9 CPUs allowed"),
        ({"pods": "1"}, {}, False, "2 pods needed"),
        ({"count/jobs.batch": "0"}, {}, False, "1 count/jobs.batch needed"),
        ({"services": "5", "configmaps": "5"}, {"services": "1"}, True, "q is sufficient"),
        ({"requests.storage": "5Gi"}, {}, False, "10 GiB of requests.storage needed"),
    ],
)
def test_quotas(hard: dict[str, str], used: dict[str, str], fine: bool | None, says: str) -> None:
    job = make_job(
        workers=2,
        resources={"gpu": 8, "cpu": 4, "memory": "8Gi"},
        checkpoint={"dir": "/c", "claim": "c", "create": True, "size": "10Gi", "access": "rwx"},
    )
    check = check_job_with(job, quotas=[quota(hard, used)])["quota"]
    assert check.fine is fine, check
    assert says in check.found


def test_existing_claim_does_not_count_against_the_quota() -> None:
    found = check_job_with(
        make_job(checkpoint=NEW_CLAIM), claims={"c": claim()}, quotas=[quota({"requests.storage": "5Gi"})]
    )
    assert found["quota"].fine is True
    found = check_job_with(
        make_job(checkpoint=NEW_CLAIM), claims={"c": claim()}, quotas=[quota({"persistentvolumeclaims": "0"})]
    )
    assert found["quota"].fine is True


def test_quota_with_scopes_or_that_cannot_be_read_is_skipped() -> None:
    assert check_job_with(make_job(), quotas=[quota({"pods": "0"}, scopes=["BestEffort"])])["quota"].fine is None
    assert check_job_with(make_job(), quotas=DENIED)["quota"].fine is None


# --- References


@pytest.mark.parametrize(
    ("has", "fine", "says"),
    [
        (None, False, "Secret aws not found in team"),
        (frozenset({"other"}), False, "has no key token"),
        (frozenset({"token"}), True, "with token"),
        (DENIED, None, DENIED.what),
    ],
)
def test_secrets(has: Any, fine: bool | None, says: str) -> None:
    check = check_job_with(make_job(secret_env={"TOKEN": {"secret": "aws", "key": "token"}}), secrets={"aws": has})[
        "secret aws"
    ]
    assert check.fine is fine
    assert says in check.found


def test_everything_that_a_job_refers_to_is_required() -> None:
    job = make_job(
        secret_env={"TOKEN": {"secret": "aws", "key": "token"}},
        secret_files={"/google": {"secret": "google"}},
        kubernetes={"image_pull_secrets": ["registry"], "service_account": "runner", "priority_class": "high"},
    )
    found = find_requirements(render_objects(job)[0])
    assert found.secrets == {"aws": {"token"}, "google": frozenset(), "registry": frozenset()}
    assert (found.accounts, found.priorities) == ({"runner"}, {"high"})
    rows = check_job_with(job, accounts={"runner": None}, priorities={"high": None})
    assert rows["service account runner"].fine is rows["priority class high"].fine is False


def test_cache_of_the_namespace() -> None:
    job = make_job(data={"train": "https://store/train", "via": "cluster"})
    assert "stoker data cache" in check_job_with(job, cache=None)["cache"].fix
    assert check_job_with(job, cache={"kind": "Service"})["cache"].fine is True
    assert "cache" not in check_job_with(make_job())


# --- Objects that the API server rejects


def test_rejections_by_kind() -> None:
    psa = 'pods "pets" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true (…)'
    found = check_job_with(
        make_job(),
        dry_runs=4,
        rejections={
            "a pod of pets": AccessDeniedError(psa),
            "ConfigMap pets": RbacDeniedError("user bob is not allowed to create configmaps"),
        },
    )
    assert found["admission"].fine is False
    assert found["admission"].found.startswith("Pod Security restricted:latest rejects a pod of pets: runAsNonRoot")
    full = check_job_with(make_job(), dry_runs=1, rejections={"x": StorageFullError("quota q leaves no room")})["quota"]
    assert (full.fine, full.code) == (False, StorageFullError.exit_code)
    existing = check_job_with(make_job(), dry_runs=1, rejections={"Job pets": ConflictError("exists")})["admission"]
    assert (existing.fine, existing.found) == (None, "Job pets already exists")
    assert check_job_with(make_job(), dry_runs=4)["admission"].fine is True


def test_denials_of_admission_webhooks_are_reported_and_those_of_rbac_are_not() -> None:
    webhook = 'admission webhook "validation.gatekeeper.sh" denied the request: trainer is not allowed to run as root'
    rbac = (
        'configmaps is forbidden: User "bob" cannot create resource "configmaps" in API group "" in the namespace "t"'
    )
    for message, is_reported in ((webhook, True), (rbac, False)):
        error = to_error({"code": 403, "message": message}, "https://server")
        assert isinstance(error, AccessDeniedError)
        checks = check_job_with(make_job(), dry_runs=1, rejections={"Job pets": error})
        assert ("admission" in checks and checks["admission"].fine is False) is is_reported


def test_faults_of_the_launcher_are_reported_with_the_other_checks() -> None:
    found = check_job_with(make_job(image=None, resources={"gpu": 16}))
    assert found["image"].fine is False
    assert found["capacity"].fine is False
