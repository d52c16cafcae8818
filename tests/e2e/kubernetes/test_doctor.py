"""`stoker doctor --on k8s` on a real cluster: every fault in one report, and nothing left behind."""

from __future__ import annotations

import json
import secrets
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.doctor.kubernetes.rules import MISSING_PERMISSION
from stoker.kube.client import KubeClient
from stoker.kube.config import KubeTarget
from stoker.kube.objects import PART_LABEL
from stoker.kube.rbac import DEFAULT_FEATURES, OPTIONAL_FEATURES, Feature, build_rbac, list_permissions
from tests.e2e.kubernetes.pods import BUSYBOX, IMAGE
from tests.support.trees import stoker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)
SECRET = "must-not-be-printed"

Doctor = Callable[..., tuple[int, dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def doctor(cluster: KubeClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run the doctor for a job in the test's namespace; return its exit code and its checks by subject."""

    def run(*words: str, **keys: Any) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        file = tmp_path / "job.yaml"
        base = {"name": "pets", "topology": "single", "image": BUSYBOX, "program": {"command": ["true"]}}
        file.write_text(yaml.safe_dump({**base, **keys}))
        arguments = [str(file)] if keys else []
        capsys.readouterr()
        code = stoker("doctor", "--on", f"k8s:///{cluster.namespace}", "--json", *arguments, *words)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert SECRET not in out + err
        checks: dict[str, list[dict[str, Any]]] = {}
        for check in json.loads(out):
            checks.setdefault(check["what"], []).append(check)
        assert all(check["fix"] for rows in checks.values() for check in rows if check["fine"] is False)
        return code, checks

    return run


def get_failed(checks: dict[str, list[dict[str, Any]]]) -> set[str]:
    return {what for what, rows in checks.items() if any(check["fine"] is False for check in rows)}


def test_job_that_can_run(doctor: Doctor, cluster: KubeClient) -> None:
    code, checks = doctor(resources={"gpu": 1})
    assert (code, get_failed(checks)) == (0, set())
    for what in ("cluster", "clock", "namespace", "permissions", "quota", "admission", "image", "DNS"):
        assert checks[what][0]["fine"] is True, checks[what]
    assert "Kubernetes v1." in checks["cluster"][0]["found"]
    wait_until(lambda: not cluster.list_objects("Pod", {PART_LABEL: "doctor"}))


def test_checks_of_the_cluster_without_a_job(doctor: Doctor) -> None:
    code, checks = doctor()
    assert code == 0
    assert "image" not in checks


def test_gpus_of_all_nodes_are_counted(doctor: Doctor, cluster: KubeClient) -> None:
    nodes = cluster.list_objects("Node")
    gpus = sum(int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in nodes)
    (row,) = doctor()[1]["gpus"]
    assert row["found"].startswith(f"{gpus} × GPU of unknown type on {len(nodes)} nodes; ")
    assert gpus == 8 * len(nodes)
    code, checks = doctor(workers=len(nodes) + 1, topology="torchrun", program={"module": "this"}, resources={"gpu": 8})
    assert code == 2
    detail = checks["capacity"][0]["found"]
    assert f"{len(nodes)} of {len(nodes) + 1} pods fit: worker (8 GPUs)" in detail
    detail = doctor(resources={"gpu": 16})[1]["capacity"][0]["found"]
    assert "requests 16 GPUs, the largest node it can use has 8 GPUs" in detail


@pytest.mark.parametrize(
    ("image", "policy", "fragment"),
    [
        ("nowhere.invalid/nothing:1", "IfNotPresent", "cannot pull image"),
        ("docker.io/library/nothing:1", "Never", "is not on the node"),
        (IMAGE, "IfNotPresent", "has no sh"),
    ],
)
def test_images(doctor: Doctor, cluster: KubeClient, image: str, policy: str, fragment: str) -> None:
    code, checks = doctor(image=image, kubernetes={"image_pull_policy": policy})
    assert (code, get_failed(checks)) == (2, {"image"})
    assert fragment in checks["image"][0]["found"]
    assert checks["DNS"][0]["fine"] is None
    wait_until(lambda: not cluster.list_objects("Pod", {PART_LABEL: "doctor"}))


def test_all_faults_are_reported_at_once(doctor: Doctor, cluster: KubeClient) -> None:
    hard = {"requests.nvidia.com/gpu": "1", "pods": "10"}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}})
    wait_until(lambda: (cluster.get("ResourceQuota", "small") or {}).get("status", {}).get("hard"))
    data = {"stringData": {"token": SECRET}}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "aws"}, **data})
    code, checks = doctor(
        resources={"gpu": 2},
        checkpoint={"dir": "/c", "claim": "nothing"},
        secret_env={"A": {"secret": "aws", "key": "other"}, "B": {"secret": "absent", "key": "x"}},
        data={"train": "https://store/train", "via": "cluster"},
        kubernetes={"queue": "gpu", "service_account": "nobody", "priority_class": "none"},
    )
    assert code == 5
    assert get_failed(checks) >= {
        "quota",
        "queue",
        "claim nothing",
        "secret aws",
        "secret absent",
        "service account nobody",
        "priority class none",
        "cache",
    }
    assert "2 requests.nvidia.com/gpu needed, 1 requests.nvidia.com/gpu allowed" in checks["quota"][0]["found"]
    assert "has no key other" in checks["secret aws"][0]["found"]


def test_missing_namespace(doctor: Doctor, cluster: KubeClient) -> None:
    code, checks = doctor("--on", f"k8s:///{cluster.namespace}-not", resources={"gpu": 1})
    assert (code, get_failed(checks)) == (2, {"namespace"})
    assert checks["image"][0]["fine"] is None
    code, checks = doctor(
        "--on", f"k8s:///{cluster.namespace}-not", "--set", "kubernetes.create_namespace=true", resources={"gpu": 1}
    )
    assert (code, get_failed(checks)) == (0, set())
    assert cluster.get("Namespace", f"{cluster.namespace}-not") is None


def test_restricted_namespace_rejects_root(doctor: Doctor, cluster: KubeClient) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.patch("Namespace", cluster.namespace, {"metadata": {"labels": labels}})
    code, checks = doctor(resources={"cpu": 1})
    assert (code, get_failed(checks)) == (2, {"admission"})
    assert "Pod Security restricted" in checks["admission"][0]["found"]
    assert "runAsNonRoot" in checks["admission"][0]["found"]
    code, checks = doctor(kubernetes={"user": 1000})
    assert (code, get_failed(checks)) == (0, set())


def test_claims(doctor: Doctor, cluster: KubeClient) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "none"}
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "one"}, "spec": spec})
    many = {"topology": "torchrun", "program": {"module": "this"}, "workers": 2}
    _, checks = doctor(volumes=[{"claim": "one", "path": "/d"}], **many)
    assert "only one node can mount it, but 2 pods" in checks["claim one"][0]["found"]
    assert checks["claim one"][0]["fine"] is False
    _, checks = doctor(volumes=[{"claim": "one", "path": "/d"}])
    assert checks["claim one"][0]["found"].startswith("is pending: ")
    made = {"dir": "/c", "claim": "new", "create": True, "size": "1Pi"}
    _, checks = doctor(checkpoint=made)
    assert "would stay pending" in checks["claim new"][0]["found"]


# --- Permissions


@pytest.fixture
def account(cluster: KubeClient, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Point KUBECONFIG to a service account without permissions."""
    name = f"runner-{secrets.token_hex(3)}"
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    annotations = {"kubernetes.io/service-account.name": name}
    kind = "kubernetes.io/service-account-token"
    metadata = {"name": name, "annotations": annotations}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind})
    wait_until(lambda: (cluster.get("Secret", name) or {}).get("data", {}).get("token"))
    data = (cluster.get("Secret", name) or {})["data"]
    config = yaml.safe_load(kubeconfig.read_text())
    (entry,) = config["clusters"]
    entry["cluster"].pop("certificate-authority", None)
    entry["cluster"]["certificate-authority-data"] = data["ca.crt"]
    config["users"] = [
        {"name": user["name"], "user": {"token": b64decode(data["token"]).decode()}} for user in config["users"]
    ]
    path = tmp_path / "limited.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    yield name
    for role_kind in ("ClusterRoleBinding", "ClusterRole"):
        cluster.delete(role_kind, f"stoker-{cluster.namespace}")


def get_missing(checks: dict[str, list[dict[str, Any]]], fine: bool | None) -> set[tuple[str, str]]:
    """Return the missing permissions of the checks: verb and resource."""
    rows = [
        check["found"]
        for check in checks["permissions"]
        if check["fine"] is fine and check["found"].startswith(MISSING_PERMISSION)
    ]
    parts = [part for row in rows for part in row.removeprefix(MISSING_PERMISSION).partition(" (")[0].split("; ")]
    return {(verb, what) for verbs, what in (part.rsplit(" ", 1) for part in parts) for verb in verbs.split(", ")}


def list_needed(*features: Feature) -> set[tuple[str, str]]:
    return {(verb, str(permission)) for permission in list_permissions(features) for verb in permission.verbs}


def test_every_missing_permission_is_reported(doctor: Doctor, account: str) -> None:
    code, checks = doctor(resources={"gpu": 1})
    assert code == 5
    assert get_failed(checks) == {"permissions"}
    assert get_missing(checks, False) == list_needed(Feature.JOBS)
    other = list_needed(Feature.EXEC, Feature.VOLUME, Feature.CACHE, Feature.NAMESPACE_CHECKS, Feature.CLUSTER_CHECKS)
    assert get_missing(checks, None) == other
    assert {checks[what][0]["fine"] for what in ("namespace", "gpus", "capacity", "quota", "storage", "image")} == {
        None
    }


def test_two_missing_verbs_are_reported(doctor: Doctor, cluster: KubeClient, account: str) -> None:
    role, binding = build_rbac(cluster.namespace, f"serviceaccount:{account}")
    (jobs,) = [rule for rule in role["rules"] if "jobs" in rule["resources"]]
    jobs["verbs"] = [verb for verb in jobs["verbs"] if verb not in ("patch", "watch")]
    cluster.apply(role)
    cluster.apply(binding)
    wait_until(lambda: get_missing(doctor()[1], False) == {("patch", "jobs.batch"), ("watch", "jobs.batch")})


def test_role_is_sufficient_and_minimal(doctor: Doctor, cluster: KubeClient, account: str) -> None:
    objects = build_rbac(
        cluster.namespace, f"serviceaccount:{account}", features=DEFAULT_FEATURES | {Feature.CLUSTER_CHECKS}
    )
    for obj in objects:
        cluster.apply(obj)
    wait_until(lambda: not get_missing(doctor()[1], False))
    code, checks = doctor(resources={"gpu": 1}, secret_env={"A": {"secret": "aws", "key": "token"}})
    assert checks["permissions"][0]["fine"] is True
    assert not get_missing(checks, None)
    assert (code, get_failed(checks)) == (2, {"image"})  # found by the probe, since the role cannot read Secrets
    assert "Secret aws not found" in checks["image"][0]["found"]
    assert doctor(resources={"gpu": 1})[0] == 0
    limited = KubeClient.for_target(KubeTarget(None, cluster.namespace))
    assert not limited.is_allowed("get", "secrets")
    assert not limited.is_allowed("create", "serviceaccounts", subresource="token")
    assert not limited.is_allowed("create", "rolebindings", group="rbac.authorization.k8s.io")
    assert not limited.is_allowed("delete", "nodes", cluster_scoped=True)
    assert not limited.is_allowed("list", "pods", cluster_scoped=True)
    elsewhere = KubeClient.for_target(KubeTarget(None, "default"))
    assert not any(
        elsewhere.is_allowed(verb, permission.resource.partition("/")[0], group=permission.group)
        for permission in list_permissions(DEFAULT_FEATURES)
        for verb in permission.verbs
    )
    limited.close()
    elsewhere.close()


def test_role_allows_exec_in_pods(cluster: KubeClient, account: str) -> None:
    for obj in build_rbac(
        cluster.namespace, f"serviceaccount:{account}", features=DEFAULT_FEATURES - OPTIONAL_FEATURES
    ):
        cluster.apply(obj)
    limited = KubeClient.for_target(KubeTarget(None, cluster.namespace))
    wait_until(lambda: limited.is_allowed("create", "pods"))
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "100"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    limited.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    wait_until(lambda: (limited.get("Pod", "p") or {})["status"]["phase"] == "Running")
    assert limited.exec_in_pod("p", ["echo", "hello"]).stdout == b"hello\n"
    assert limited.delete("Pod", "p", grace_s=0)
    limited.close()
