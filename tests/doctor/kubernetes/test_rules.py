"""What was found in a Kubernetes cluster, judged: every fault has its sentence and its fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from stoker.core.spec import decode
from stoker.doctor.checks import Check
from stoker.doctor.kubernetes.capacity import group_pods, sum_requests
from stoker.doctor.kubernetes.collect import probe_images, render_objects
from stoker.doctor.kubernetes.findings import ClusterFacts, find_requirements
from stoker.doctor.kubernetes.probe import ImageProbe, build_probe_pod, check_image_probe, is_finished
from stoker.doctor.kubernetes.rules import check_cluster, check_permissions
from stoker.errors import AccessDeniedError, ConflictError, InputError, StokerError, StorageFullError, UnavailableError
from stoker.jobs.spec import Job
from stoker.kube.client import ServerInfo
from stoker.kube.errors import NOT_ALLOWED
from stoker.kube.rbac import CREATE_NAMESPACE, Feature, list_permissions, select_features
from tests.support.servers import free_port
from tests.support.trees import stoker

GPU = "nvidia.com/gpu"
DENIED = AccessDeniedError("user bob may not list nodes")
GIB = 1 << 30


def job_of(**keys: Any) -> Job:
    base = {
        "name": "pets",
        "image": "acme/trainer:v1",
        "program": {"module": "this"},
        "kubernetes": {"namespace": "team"},
    }
    return decode({**base, **keys}, Job)


def node(
    name: str, *, cpu: str = "16", memory: str = "64Gi", gpu: int = 8, kind: str = "", **more: Any
) -> dict[str, Any]:
    has = {"cpu": cpu, "memory": memory, "pods": "110", **({GPU: str(gpu)} if gpu else {})}
    labels = {"cloud.google.com/gke-accelerator": kind} if kind else {}
    labels |= more.pop("labels", {})
    ready = {"type": "Ready", "status": more.pop("ready", "True")}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": more,
        "status": {"allocatable": has, "conditions": [ready]},
    }


def pod(on: str, *, phase: str = "Running", claim: str = "", **requests: str) -> dict[str, Any]:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    spec = {"nodeName": on, "containers": [{"resources": {"requests": requests}}], "volumes": volumes}
    return {"metadata": {"name": f"pod-on-{on}"}, "spec": spec, "status": {"phase": phase}}


TWO = (node("n1"), node("n2"))
SPACE = {"metadata": {"name": "team", "labels": {}}, "status": {"phase": "Active"}}


def judged(job: Job, **found: Any) -> dict[str, Check]:
    """Judge a job in a cluster in which all is well but for what is given."""
    objects, checks = render_objects(job)
    given = {"nodes": TWO, "space": SPACE, "hello": ServerInfo("v1.37.0", 0.01, 0.0), **found}
    look = ClusterFacts(namespace="team", server="https://k", **given)
    rows = [*check_cluster(job, find_requirements(objects), look), *checks]
    return {one.what: one for one in sorted(rows, key=lambda one: one.fine is not False, reverse=True)}


def test_a_cluster_in_which_all_is_well() -> None:
    found = judged(job_of(workers=2, resources={"gpu": 8, "cpu": 4, "memory": "8Gi"}))
    assert not [one for one in found.values() if one.fine is False]
    assert found["gpus"].found == "16 × of no named type on 2 nodes; 16 free"
    assert found["room"].found == "2 × worker (4 CPUs, 8 GiB of memory, 8 GPUs): there is room"


# --- The API server and the namespace


@pytest.mark.parametrize(
    ("hello", "what", "says"),
    [
        (ServerInfo("v1", 0.01, 90.0), "clock", "1m30s ahead of"),
        (ServerInfo("v1", 0.01, -7.0), "clock", "7s behind"),
        (ServerInfo("v1", 2.0, 0.0), "cluster", "answers in 2s"),
    ],
)
def test_an_odd_api_server_fails_nothing(hello: ServerInfo, what: str, says: str) -> None:
    one = judged(job_of(), hello=hello)[what]
    assert one.fine is None
    assert says in one.found
    assert one.fix


def test_namespaces() -> None:
    missing = judged(job_of(), space=None)["namespace"]
    assert (missing.fine, missing.code) == (False, InputError.exit_code)
    assert "there is no namespace team" in missing.found
    made = job_of(kubernetes={"namespace": "team", "create_namespace": True})
    assert judged(made, space=None)["namespace"].fine is True
    assert judged(job_of(), space={**SPACE, "status": {"phase": "Terminating"}})["namespace"].fine is False
    strict = {"metadata": {"name": "team", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    odd = judged(job_of(), space=strict)["namespace"]
    assert odd.fine is None
    assert "root" in odd.fix
    other = job_of(kubernetes={"namespace": "team", "user": 1000})
    assert judged(other, space=strict)["namespace"].fine is True
    assert judged(job_of(), space=DENIED)["namespace"] == Check("namespace", None, f"not known: {DENIED.what}")


def test_exactly_the_missing_verbs_are_named() -> None:
    all_of = list_permissions(select_features(mpi=True) | {Feature.CLUSTER_CHECKS})
    allowed: dict[Any, bool | StokerError] = {(right, verb): True for right in all_of for verb in right.verbs}
    (fine,) = check_permissions(allowed)
    assert fine.fine is True
    lacks = {"watch jobs.batch", "patch jobs.batch", "get pods/log", "create pods/exec", "list nodes", "get namespaces"}
    for right, verb in list(allowed):
        name = f"{verb} {right}"
        if name in lacks:
            allowed[right, verb] = False
    found = {one.found: one.fine for one in check_permissions(allowed)}
    assert found == {
        "may not patch, watch jobs.batch": False,
        "may not get pods/log": False,
        "may not create pods/exec": None,
        "may not get namespaces; list nodes: no job needs it, but less can be told": None,
    }


def test_who_may_not_ask_is_told_once() -> None:
    error = AccessDeniedError("the cluster does not know you", hint="log in again, as for kubectl")
    allowed: Any = {(right, verb): error for right in list_permissions({Feature.JOBS}) for verb in right.verbs}
    (one,) = check_permissions(allowed)
    assert (one.fine, one.fix, one.code) == (False, error.hint, 5)
    (new,) = [one for one in check_permissions({(CREATE_NAMESPACE, "create"): False}) if one.fine is False]
    assert "may not create namespaces" in new.found


# --- Operators


def test_an_operator_is_only_needed_by_who_uses_it() -> None:
    single = judged(job_of(topology="single"), operator={})["MPI operator"]
    assert single.fine is None
    assert not single.fix
    served = {"v1": frozenset({"mpijobs"}), "v2beta1": frozenset({"mpijobs", "mpijobs/status"})}
    assert judged(job_of(), operator=served)["MPI operator"].fine is True


@pytest.mark.parametrize(
    ("served", "says"),
    [
        ({}, "there is no MPIJob here"),
        ({"v1": frozenset({"mpijobs"})}, "MPIJob is served as v1 alone"),
        ({"v2beta1": frozenset({"others"})}, "there is no MPIJob here"),
    ],
)
def test_jobs_of_mpi_need_their_operator(served: Any, says: str) -> None:
    job = job_of(topology="mpi", workers=2, resources={"gpu": 8})
    found = judged(job, operator=served)
    assert found["MPI operator"].fine is False
    assert says in found["MPI operator"].found
    assert "mpi-operator" in found["MPI operator"].fix
    assert "2 × worker (8 GPUs)" in found["room"].found
    assert "1 × launcher" in found["room"].found


@pytest.mark.parametrize(
    ("found", "fine", "says"),
    [
        ({"kueue": {}}, False, "no Kueue"),
        ({"kueue": {"v1beta1": frozenset({"localqueues"})}}, None, "v1beta1 alone"),
        ({"kueue": {"v1beta2": frozenset({"localqueues"})}, "queue": None}, False, "no queue gpu in team"),
        (
            {
                "kueue": {"v1beta2": frozenset()},
                "queue": {"status": {"conditions": [{"type": "Active", "status": "False", "message": "stopped"}]}},
            },
            False,
            "admits nothing: stopped",
        ),
        ({"kueue": {"v1beta2": frozenset()}, "queue": {"status": {"pendingWorkloads": 3}}}, True, "3 jobs waiting"),
        ({"kueue": {"v1beta2": frozenset()}, "queue": DENIED}, None, "not known"),
    ],
)
def test_queues(found: Any, fine: bool | None, says: str) -> None:
    one = judged(job_of(kubernetes={"namespace": "team", "queue": "gpu"}), **found)["queue"]
    assert one.fine is fine
    assert says in one.found


# --- Nodes


def test_gpus_are_counted_by_kind_and_what_pods_have_is_not_free() -> None:
    nodes = [node("a", kind="h100"), node("b", kind="h100", gpu=4), node("c", kind="t4", gpu=1), node("d", gpu=0)]
    pods = [pod("a", **{GPU: "3"}), pod("b", **{GPU: "4"}), pod("c", phase="Succeeded", **{GPU: "1"})]
    objects, _ = render_objects(job_of())
    rows = check_cluster(
        job_of(),
        find_requirements(objects),
        ClusterFacts(namespace="team", nodes=nodes, pods=pods, namespace_object=SPACE),
    )
    assert [one.found for one in rows if one.what == "gpus"] == [
        "12 × h100 on 2 nodes; 5 free",
        "1 × t4 on 1 node; 1 free",
    ]


def test_gpus_that_nobody_may_count() -> None:
    found = judged(job_of(), nodes=DENIED)
    assert [found[what].fine for what in ("gpus", "room")] == [None, None]
    assert "not known" in judged(job_of(), pods=DENIED)["gpus"].found


@pytest.mark.parametrize(
    ("keys", "nodes", "fine", "says", "fix"),
    [
        ({"workers": 3, "resources": {"gpu": 8}}, TWO, False, "room for 2 of 3 × worker (8 GPUs)", "workers="),
        ({"workers": {"min": 2, "max": 4}, "resources": {"gpu": 8}}, TWO, None, "room for 2 of 4", "workers="),
        ({"resources": {"gpu": 16}}, TWO, False, "asks for 16 GPUs, and the largest node that it may use has 8", ""),
        ({"resources": {"cpu": 32}}, TWO, False, "asks for 32 CPUs", ""),
        ({"resources": {"memory": "1Ti"}}, TWO, False, "has 64 GiB of memory", ""),
        ({"resources": {"gpu": 1, "gpu_type": "h100"}}, (node("n1", kind="t4"),), False, "(there are: t4)", "gpu_type"),
        ({"resources": {"gpu": 1, "gpu_type": "h100"}}, (node("n1", kind="h100"),), True, "there is room", ""),
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
        ({}, (node("n1", taints=[{"key": "x", "effect": "PreferNoSchedule"}]),), True, "there is room", ""),
        (
            {"kubernetes": {"tolerations": [{"key": "team", "operator": "Exists"}]}},
            (node("n1", taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}]),),
            True,
            "there is room",
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
            "there is room",
            "",
        ),
        (
            {"resources": {"cpu": 12}},
            (node("n1", cpu="8"), node("n2", taints=[{"key": "big", "effect": "NoSchedule"}])),
            False,
            "others have taint big:NoSchedule (n2)",
            "tolerations",
        ),
        ({"kubernetes": {"node_selector": {"pool": "a"}}}, TWO, False, "no label pool=a (n1, n2)", "node_selector"),
        (
            {"kubernetes": {"node_selector": {"pool": "a"}}},
            (node("n", labels={"pool": "a"}),),
            True,
            "there is room",
            "",
        ),
    ],
)
def test_room(keys: dict[str, Any], nodes: Any, fine: bool | None, says: str, fix: str) -> None:
    one = judged(job_of(**keys), nodes=nodes)["room"]
    assert one.fine is fine, one
    assert says in one.found
    assert fix in one.fix


def test_what_others_have_now_makes_a_job_wait_but_not_fail() -> None:
    one = judged(job_of(workers=2, resources={"gpu": 8}), pods=[pod("n1", **{GPU: "1"})])["room"]
    assert one.fine is None
    assert "room for 1 of 2 × worker (8 GPUs) now" in one.found


def test_pods_of_several_roles_share_nodes() -> None:
    roles = {"ps": {"count": 2, "resources": {"cpu": 10}}, "chief": {"resources": {"cpu": 10}}}
    job = job_of(topology="tf-ps", workers=1, resources={"gpu": 8, "cpu": 2}, roles=roles)
    one = judged(job)["room"]
    assert one.fine is False
    assert "of 2 × ps (10 CPUs)" in one.found or "of 1 × chief (10 CPUs)" in one.found


def test_what_a_pod_asks_for_is_what_the_scheduler_counts() -> None:
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
    assert {name: float(many) for name, many in sum_requests(spec).items()} == {
        "cpu": 4.05,
        GPU: 1.0,
        "memory": float(GIB),
    }


def test_a_thousand_tasks_are_a_few_groups() -> None:
    objects, _ = render_objects(job_of(topology="tf-ps", workers=1000, roles={"ps": {"count": 24}}))
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
            "16 requests.nvidia.com/gpu wanted, 8 requests.nvidia.com/gpu allowed",
        ),
        ({"requests.nvidia.com/gpu": "20"}, {"requests.nvidia.com/gpu": "8"}, None, "12 requests.nvidia.com/gpu left"),
        ({"requests.nvidia.com/gpu": "20"}, {"requests.nvidia.com/gpu": "4"}, True, "leaves room"),
        ({"limits.memory": "15Gi"}, {}, False, "16 GiB of limits.memory wanted"),
        ({"cpu": "7900m"}, {}, False, "8 CPUs wanted, 7.9 CPUs allowed"),
        ({"pods": "1"}, {}, False, "2 pods wanted"),
        ({"count/jobs.batch": "0"}, {}, False, "1 count/jobs.batch wanted"),
        ({"services": "5", "configmaps": "5"}, {"services": "1"}, True, "leaves room"),
        ({"requests.storage": "5Gi"}, {}, False, "10 GiB of requests.storage wanted"),
    ],
)
def test_quotas(hard: dict[str, str], used: dict[str, str], fine: bool | None, says: str) -> None:
    job = job_of(
        workers=2,
        resources={"gpu": 8, "cpu": 4, "memory": "8Gi"},
        checkpoint={"dir": "/c", "claim": "c", "create": True, "size": "10Gi", "access": "rwx"},
    )
    one = judged(job, quotas=[quota(hard, used)])["quota"]
    assert one.fine is fine, one
    assert says in one.found


def test_a_claim_that_is_there_is_not_counted_again() -> None:
    found = judged(job_of(checkpoint=MADE), claims={"c": claim()}, quotas=[quota({"requests.storage": "5Gi"})])
    assert found["quota"].fine is True
    found = judged(job_of(checkpoint=MADE), claims={"c": claim()}, quotas=[quota({"persistentvolumeclaims": "0"})])
    assert found["quota"].fine is True


def test_quotas_that_count_some_pods_or_are_not_to_be_seen_are_not_judged() -> None:
    assert judged(job_of(), quotas=[quota({"pods": "0"}, scopes=["BestEffort"])])["quota"].fine is None
    assert judged(job_of(), quotas=DENIED)["quota"].fine is None


# --- Storage


def storage_class(
    name: str, *, default: bool = False, provisioner: str = "efs.csi.aws.com", mode: str = "Immediate"
) -> Any:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": notes}, "provisioner": provisioner, "volumeBindingMode": mode}


def claim(mode: str = "ReadWriteOnce", phase: str = "Bound", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "c", **more},
        "spec": {"accessModes": [mode], "storageClassName": "late"},
        "status": {"phase": phase, "accessModes": [mode], "capacity": {"storage": "10Gi"}},
    }


MADE = {"dir": "/c", "claim": "c", "create": True, "size": "10Gi"}
THERE = {"dir": "/c", "claim": "c"}
EVERYWHERE = [{"claim": "c", "path": "/d"}]


def volume(name: str, size: str, phase: str = "Available") -> dict[str, Any]:
    spec = {"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce", "ReadWriteMany"]}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("keys", "found", "fine", "says"),
    [
        ({"checkpoint": THERE}, {}, False, "there is no claim c in team"),
        ({"checkpoint": THERE}, {"claims": {"c": claim()}}, True, "10 GiB, rwo; 1 pod would mount it"),
        ({"checkpoint": THERE}, {"claims": {"c": claim(deletionTimestamp="now")}}, False, "is being deleted"),
        ({"checkpoint": THERE}, {"claims": {"c": claim(phase="Lost")}}, False, "lost its volume"),
        ({"checkpoint": THERE}, {"claims": {"c": DENIED}}, None, "not known"),
        (
            {"checkpoint": THERE},
            {
                "claims": {"c": claim(phase="Pending")},
                "claim_events": {"c": [{"message": "no volumes", "metadata": {}}]},
            },
            False,
            "has no volume yet: no volumes",
        ),
        (
            {"checkpoint": THERE},
            {"claims": {"c": claim(phase="Pending")}, "classes": [storage_class("late", mode="WaitForFirstConsumer")]},
            True,
            "with its first pod",
        ),
        (
            {"checkpoint": THERE},
            {
                "claims": {"c": claim(phase="Pending")},
                "classes": [storage_class("late", mode="WaitForFirstConsumer")],
                "claim_events": {"c": [{"type": "Warning", "message": "zone is full", "metadata": {}}]},
            },
            False,
            "zone is full",
        ),
        (
            {"checkpoint": THERE},
            {"claims": {"c": claim()}, "own_pods": [pod("n1", claim="c")]},
            None,
            "pod-on-n1 on n1",
        ),
        ({"volumes": EVERYWHERE, "workers": 4}, {"claims": {"c": claim()}}, False, "for one node, and 4 pods mount it"),
        (
            {"volumes": EVERYWHERE, "workers": 4},
            {"claims": {"c": claim("ReadWriteMany")}},
            True,
            "4 pods would mount it",
        ),
        ({"volumes": EVERYWHERE, "workers": 2}, {"claims": {"c": claim("ReadWriteOncePod")}}, False, "for one pod"),
        ({"volumes": EVERYWHERE, "workers": 2}, {"claims": {"c": claim("ReadOnlyMany")}}, None, "2 pods"),
        (
            {"volumes": [{**EVERYWHERE[0], "read_only": True}], "workers": 2},
            {"claims": {"c": claim("ReadOnlyMany")}},
            True,
            "2 pods",
        ),
        ({"checkpoint": THERE, "workers": 4}, {"claims": {"c": claim()}}, True, "1 pod would mount it"),
        ({"checkpoint": MADE}, {"classes": [storage_class("std", default=True)]}, True, "of class std"),
        ({"checkpoint": MADE}, {"classes": [storage_class("std")]}, False, "no storage class is the default"),
        ({"checkpoint": MADE}, {"volumes": [volume("small", "1Gi"), volume("v", "10Gi")]}, True, "from the volume v"),
        ({"checkpoint": MADE}, {"volumes": [volume("v", "10Gi", phase="Bound")]}, False, "would wait for ever"),
        (
            {"checkpoint": {**MADE, "access": "rwx"}},
            {"classes": [storage_class("gp3", default=True, provisioner="ebs.csi.aws.com")]},
            False,
            "is to be rwx, and volumes of class gp3 are for one node",
        ),
        ({"checkpoint": MADE}, {"classes": DENIED}, None, "is not known"),
        ({"checkpoint": MADE}, {"claims": {"c": claim()}}, True, "10 GiB, rwo"),
    ],
)
def test_claims(keys: dict[str, Any], found: dict[str, Any], fine: bool | None, says: str) -> None:
    one = judged(job_of(**keys), **found)["claim c"]
    assert one.fine is fine, one
    assert says in one.found
    assert bool(one.fix) or one.fine is not False


def test_storage_classes() -> None:
    assert judged(job_of())["storage"].fine is None
    odd = judged(job_of(), classes=[storage_class("b"), storage_class("a")])["storage"]
    assert (odd.fine, odd.found) == (None, "classes: a, b; none is the default")
    one = judged(job_of(), classes=[storage_class("b", default=True), storage_class("a")])["storage"]
    assert (one.fine, one.found) == (True, "b is the default class; also a")
    old, new = storage_class("old", default=True), storage_class("new", default=True)
    old["metadata"]["creationTimestamp"], new["metadata"]["creationTimestamp"] = "2025-01-01", "2026-01-01"
    assert judged(job_of(), classes=[old, new])["storage"].found == "new is the default class; also old"


def test_what_a_former_claim_of_that_name_could_not_have_is_no_fault() -> None:
    late = [storage_class("late", mode="WaitForFirstConsumer")]
    about = {"kind": "PersistentVolumeClaim", "name": "c", "uid": "former"}
    event = {"type": "Warning", "message": "zone is full", "metadata": {}, "involvedObject": about}
    given = {"claims": {"c": claim(phase="Pending", uid="now")}, "claim_events": {"c": [event]}, "classes": late}
    assert judged(job_of(checkpoint=THERE), **given)["claim c"].fine is True
    about["uid"] = "now"
    assert judged(job_of(checkpoint=THERE), **given)["claim c"].fine is False


# --- What is named


@pytest.mark.parametrize(
    ("has", "fine", "says"),
    [
        (None, False, "there is no secret aws in team"),
        (frozenset({"other"}), False, "has no key token"),
        (frozenset({"token"}), True, "with token"),
        (DENIED, None, "not known"),
    ],
)
def test_secrets(has: Any, fine: bool | None, says: str) -> None:
    one = judged(job_of(secret_env={"TOKEN": {"secret": "aws", "key": "token"}}), secrets={"aws": has})["secret aws"]
    assert one.fine is fine
    assert says in one.found


def test_all_that_a_job_names_is_wanted() -> None:
    job = job_of(
        secret_env={"TOKEN": {"secret": "aws", "key": "token"}},
        secret_files={"/google": {"secret": "google"}},
        kubernetes={"image_pull_secrets": ["registry"], "service_account": "runner", "priority_class": "high"},
    )
    found = find_requirements(render_objects(job)[0])
    assert found.secrets == {"aws": {"token"}, "google": frozenset(), "registry": frozenset()}
    assert (found.accounts, found.priorities) == ({"runner"}, {"high"})
    rows = judged(job, accounts={"runner": None}, priorities={"high": None})
    assert rows["service account runner"].fine is rows["priority class high"].fine is False


def test_the_cache_of_the_namespace() -> None:
    job = job_of(data={"train": "https://store/train", "via": "cluster"})
    assert "stoker data cache" in judged(job, cache=None)["cache"].fix
    assert judged(job, cache={"kind": "Service"})["cache"].fine is True
    assert "cache" not in judged(job_of())


# --- What would be refused


def test_refusals_are_told_apart() -> None:
    psa = 'pods "pets" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true (…)'
    found = judged(
        job_of(),
        tried=4,
        refusals={
            "a pod of pets": AccessDeniedError(psa),
            "ConfigMap pets": AccessDeniedError(f"user bob {NOT_ALLOWED} create configmaps"),
        },
    )
    assert found["admission"].fine is False
    assert found["admission"].found.startswith("Pod Security restricted:latest refuses a pod of pets: runAsNonRoot")
    full = judged(job_of(), tried=1, refusals={"x": StorageFullError("quota q leaves no room")})["quota"]
    assert (full.fine, full.code) == (False, StorageFullError.exit_code)
    there = judged(job_of(), tried=1, refusals={"Job pets": ConflictError("exists")})["admission"]
    assert (there.fine, there.found) == (None, "Job pets is there already")
    assert judged(job_of(), tried=4)["admission"].fine is True


def test_what_the_launcher_refuses_is_told_with_the_rest() -> None:
    found = judged(job_of(image=None, resources={"gpu": 16}))
    assert found["image"].fine is False
    assert found["room"].fine is False


# --- The probe


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return of_pod([{"name": "main", "image": "acme/trainer:v1", "state": state}])


def over(code: int, message: str = "", reason: str = "Completed") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message, "reason": reason}}
    return of_pod([{"name": "main", "state": state}], phase="Succeeded" if code == 0 else "Failed")


def of_pod(states: list[dict[str, Any]], phase: str = "Pending", on: str | None = "n1") -> dict[str, Any]:
    spec = {"restartPolicy": "Never", "containers": [], **({"nodeName": on} if on else {})}
    return {"metadata": {"name": "p"}, "spec": spec, "status": {"phase": phase, "containerStatuses": states}}


@pytest.mark.parametrize(
    ("pod", "image", "says", "dns"),
    [
        (over(0, "dns=ok\n"), True, "is pulled and starts on n1", True),
        (over(0, "dns=failed\n"), True, "is pulled", False),
        (over(0, "dns=none\n"), True, "is pulled", None),
        (of_pod([{"name": "main", "state": {"running": {}}}], "Running"), True, "is pulled", False),
        (waiting("ErrImagePull", "failed to resolve: acme/x: not found"), False, "no such image", None),
        (waiting("ImagePullBackOff", "failed to pull: 401 Unauthorized"), False, "wants a login", None),
        (waiting("ErrImagePull", "failed: dial tcp: lookup r: no such host"), False, "cannot be reached", None),
        (waiting("InvalidImageName", "couldn't parse"), False, "is no name of an image", None),
        (waiting("ErrImageNeverPull"), False, "is not on the node", None),
        (waiting("CreateContainerConfigError", 'secret "aws" not found'), False, "there is no Secret aws", None),
        (over(128, 'exec: "sh": executable file not found in $PATH', "StartError"), False, "has no sh", None),
        (over(128, "exec /bin/sh: no such file or directory", "StartError"), False, "has no sh", None),
        (over(255, "exec format error", "Error"), False, "fails with code 255: exec format error", None),
        (waiting("ContainerCreating"), None, "was not pulled within", None),
        (of_pod([], on=None), None, "no node took the probe", None),
        (of_pod([], "Failed"), None, "the probe was ended", None),
    ],
)
def test_probes(pod: dict[str, Any], image: bool | None, says: str, dns: bool | None) -> None:
    rows = {one.what: one for one in check_image_probe(ImageProbe("acme/trainer:v1", pod, waited_s=120))}
    assert rows["image"].fine is image, rows
    assert says in rows["image"].found
    assert rows.get("DNS", Check("DNS", None, "")).fine is dns
    assert all(one.fix for one in rows.values() if one.fine is False)


def test_a_probe_is_waited_for_no_longer_than_it_takes() -> None:
    assert is_finished(over(0))
    assert is_finished(waiting("ErrImagePull"))
    assert not is_finished(waiting("ContainerCreating"))
    assert not is_finished(of_pod([{"name": "main", "state": {"running": {}}}], "Running"))


def test_the_probe_is_as_the_jobs_pods_but_small_and_holds_nothing() -> None:
    job = job_of(
        resources={"gpu": 8, "gpu_type": "h100"},
        checkpoint=THERE,
        env={"A": "1"},
        secret_env={"TOKEN": {"secret": "aws", "key": "token"}},
        secret_files={"/google": {"secret": "google"}},
        kubernetes={"image_pull_secrets": ["registry"], "user": 1000, "priority_class": "high"},
    )
    (group,) = find_requirements(render_objects(job)[0]).groups
    made = build_probe_pod(group.spec, "acme/trainer:v1", "p", "team", 120, secrets=False)
    spec, (container,) = made["spec"], made["spec"]["containers"]
    assert spec["affinity"] == group.spec["affinity"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["priorityClassName"] == "high"
    assert spec["securityContext"] == group.spec["securityContext"]
    assert GPU not in container["resources"]["limits"]
    assert {"name": "A", "value": "1"} in container["env"]
    assert not [one for one in container["env"] if "valueFrom" in one]
    kinds = {kind for one in spec["volumes"] for kind in one}
    assert not kinds & {"persistentVolumeClaim", "secret", "configMap"}
    more = build_probe_pod(group.spec, "acme/trainer:v1", "p", "team", 120, secrets=True)["spec"]["containers"][0][
        "env"
    ]
    assert [one["name"] for one in more if "valueFrom" in one] == ["TOKEN"]


# --- No cluster


@pytest.mark.parametrize(
    ("error", "is_deleted"), [(UnavailableError("no answer came"), True), (StorageFullError("no room"), False)]
)
def test_a_probe_that_may_have_been_made_is_deleted(error: StokerError, is_deleted: bool) -> None:
    cluster = MagicMock(namespace="team")
    cluster.create.side_effect = error
    spec = {"containers": [{"image": "acme/trainer:v1"}]}
    (probe,), left = probe_images(cluster, {"acme/trainer:v1": spec}, with_secrets=False)
    assert probe.rejection is error
    assert not left
    assert cluster.delete.called is is_deleted


def kubeconfig(path: Path, server: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_an_api_server_that_is_away_is_one_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{free_port()}")
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert stoker("doctor", "--on", "k8s") == 5
    out, err = capsys.readouterr()
    first, *rest = [line for line in out.splitlines() if not line.startswith(" ")]
    assert first.startswith("✗ cluster")
    assert "does not answer" in first
    assert all(line.startswith("– ") for line in rest)
    assert "Traceback" not in err


def test_a_context_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", "https://127.0.0.1:1")))
    assert stoker("doctor", "--on", "k8s://other/team") == 2
