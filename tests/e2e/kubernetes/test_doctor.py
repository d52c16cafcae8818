"""`stoker doctor --on k8s` on a real cluster: real faults, each told apart, all in one run, and nothing left behind."""

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
SECRET = "not-for-the-screen"

Doctor = Callable[..., tuple[int, dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def doctor(cluster: KubeClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run the doctor for a job in the test's namespace; give its exit code and its rows by subject."""

    def run(*words: str, **keys: Any) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        file = tmp_path / "job.yaml"
        base = {"name": "pets", "topology": "single", "image": BUSYBOX, "program": {"command": ["true"]}}
        file.write_text(yaml.safe_dump({**base, **keys}))
        given = [str(file)] if keys else []
        capsys.readouterr()
        code = stoker("doctor", "--on", f"k8s:///{cluster.namespace}", "--json", *given, *words)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert SECRET not in out + err
        found: dict[str, list[dict[str, Any]]] = {}
        for one in json.loads(out):
            found.setdefault(one["what"], []).append(one)
        assert all(one["fix"] for rows in found.values() for one in rows if one["fine"] is False)
        return code, found

    return run


def bad(found: dict[str, list[dict[str, Any]]]) -> set[str]:
    return {what for what, rows in found.items() if any(one["fine"] is False for one in rows)}


def test_a_job_that_would_run(doctor: Doctor, cluster: KubeClient) -> None:
    code, found = doctor(resources={"gpu": 1})
    assert (code, bad(found)) == (0, set())
    for what in ("cluster", "clock", "namespace", "permissions", "quota", "admission", "image", "DNS"):
        assert found[what][0]["fine"] is True, found[what]
    assert "Kubernetes v1." in found["cluster"][0]["found"]
    wait_until(lambda: not cluster.list_objects("Pod", {PART_LABEL: "doctor"}))


def test_without_a_job_the_cluster_is_told(doctor: Doctor) -> None:
    code, found = doctor()
    assert code == 0
    assert "image" not in found


def test_gpus_of_all_nodes_are_counted(doctor: Doctor, cluster: KubeClient) -> None:
    nodes = cluster.list_objects("Node")
    many = sum(int(one["status"]["allocatable"].get("nvidia.com/gpu", 0)) for one in nodes)
    (row,) = doctor()[1]["gpus"]
    assert row["found"].startswith(f"{many} × ")
    assert f" on {len(nodes)} nodes; " in row["found"]
    assert many == 8 * len(nodes)
    code, found = doctor(workers=len(nodes) + 1, topology="torchrun", program={"module": "this"}, resources={"gpu": 8})
    assert code == 2
    detail = found["capacity"][0]["found"]
    assert f"{len(nodes)} of {len(nodes) + 1} pods" in detail
    assert "worker (8 GPUs)" in detail
    detail = doctor(resources={"gpu": 16})[1]["capacity"][0]["found"]
    assert "16 GPUs" in detail
    assert "has 8 GPUs" in detail


@pytest.mark.parametrize(
    ("image", "policy", "says"),
    [
        ("nowhere.invalid/nothing:1", "IfNotPresent", "cannot pull image"),
        ("docker.io/library/nothing:1", "Never", "is not on the node"),
        (IMAGE, "IfNotPresent", "has no sh"),
    ],
)
def test_images(doctor: Doctor, cluster: KubeClient, image: str, policy: str, says: str) -> None:
    code, found = doctor(image=image, kubernetes={"image_pull_policy": policy})
    assert (code, bad(found)) == (2, {"image"})
    assert says in found["image"][0]["found"]
    assert found["DNS"][0]["fine"] is None
    wait_until(lambda: not cluster.list_objects("Pod", {PART_LABEL: "doctor"}))


def test_all_faults_are_told_at_once(doctor: Doctor, cluster: KubeClient) -> None:
    hard = {"requests.nvidia.com/gpu": "1", "pods": "10"}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": hard}})
    wait_until(lambda: (cluster.get("ResourceQuota", "small") or {}).get("status", {}).get("hard"))
    data = {"stringData": {"token": SECRET}}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "aws"}, **data})
    code, found = doctor(
        resources={"gpu": 2},
        checkpoint={"dir": "/c", "claim": "nothing"},
        secret_env={"A": {"secret": "aws", "key": "other"}, "B": {"secret": "absent", "key": "x"}},
        data={"train": "https://store/train", "via": "cluster"},
        kubernetes={"queue": "gpu", "service_account": "nobody", "priority_class": "none"},
    )
    assert code == 5
    assert bad(found) >= {
        "quota",
        "queue",
        "claim nothing",
        "secret aws",
        "secret absent",
        "service account nobody",
        "priority class none",
        "cache",
    }
    assert "2 requests.nvidia.com/gpu needed, 1 requests.nvidia.com/gpu allowed" in found["quota"][0]["found"]
    assert "other" in found["secret aws"][0]["found"]


def test_a_namespace_that_is_not_there(doctor: Doctor, cluster: KubeClient) -> None:
    code, found = doctor("--on", f"k8s:///{cluster.namespace}-not", resources={"gpu": 1})
    assert (code, bad(found)) == (2, {"namespace"})
    assert found["image"][0]["fine"] is None
    code, found = doctor(
        "--on", f"k8s:///{cluster.namespace}-not", "--set", "kubernetes.create_namespace=true", resources={"gpu": 1}
    )
    assert (code, bad(found)) == (0, set())
    assert cluster.get("Namespace", f"{cluster.namespace}-not") is None


def test_a_namespace_that_refuses_root(doctor: Doctor, cluster: KubeClient) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.patch("Namespace", cluster.namespace, {"metadata": {"labels": labels}})
    code, found = doctor(resources={"cpu": 1})
    assert (code, bad(found)) == (2, {"admission"})
    assert "Pod Security restricted" in found["admission"][0]["found"]
    assert "runAsNonRoot" in found["admission"][0]["found"]
    code, found = doctor(kubernetes={"user": 1000})
    assert (code, bad(found)) == (0, set())


def test_claims_and_who_mounts_them(doctor: Doctor, cluster: KubeClient) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "none"}
    cluster.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "one"}, "spec": spec})
    many = {"topology": "torchrun", "program": {"module": "this"}, "workers": 2}
    _, found = doctor(volumes=[{"claim": "one", "path": "/d"}], **many)
    assert "2 pods" in found["claim one"][0]["found"]
    assert found["claim one"][0]["fine"] is False
    _, found = doctor(volumes=[{"claim": "one", "path": "/d"}])
    assert found["claim one"][0]["found"].startswith("is pending: ")
    made = {"dir": "/c", "claim": "new", "create": True, "size": "1Pi"}
    _, found = doctor(checkpoint=made)
    assert "would stay pending" in found["claim new"][0]["found"]


# --- Rights


@pytest.fixture
def account(cluster: KubeClient, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Be a service account without any rights, for whoever reads the settings from here on."""
    name = f"runner-{secrets.token_hex(3)}"
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    notes = {"kubernetes.io/service-account.name": name}
    kind = "kubernetes.io/service-account-token"
    metadata = {"name": name, "annotations": notes}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind})
    wait_until(lambda: (cluster.get("Secret", name) or {}).get("data", {}).get("token"))
    data = (cluster.get("Secret", name) or {})["data"]
    config = yaml.safe_load(kubeconfig.read_text())
    (entry,) = config["clusters"]
    entry["cluster"].pop("certificate-authority", None)
    entry["cluster"]["certificate-authority-data"] = data["ca.crt"]
    config["users"] = [
        {"name": one["name"], "user": {"token": b64decode(data["token"]).decode()}} for one in config["users"]
    ]
    path = tmp_path / "limited.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    yield name
    for one in ("ClusterRoleBinding", "ClusterRole"):
        cluster.delete(one, f"stoker-{cluster.namespace}")


def missing(found: dict[str, list[dict[str, Any]]], fine: bool | None) -> set[tuple[str, str]]:
    """Read from the rows which verbs of what are missing."""
    rows = [
        one["found"]
        for one in found["permissions"]
        if one["fine"] is fine and one["found"].startswith(MISSING_PERMISSION)
    ]
    parts = [part for row in rows for part in row.removeprefix(MISSING_PERMISSION).partition(" (")[0].split("; ")]
    return {(verb, what) for verbs, what in (part.rsplit(" ", 1) for part in parts) for verb in verbs.split(", ")}


def listed(*some: Feature) -> set[tuple[str, str]]:
    return {(verb, str(right)) for right in list_permissions(some) for verb in right.verbs}


def test_who_has_no_rights_is_told_each_of_them(doctor: Doctor, account: str) -> None:
    code, found = doctor(resources={"gpu": 1})
    assert code == 5
    assert bad(found) == {"permissions"}
    assert missing(found, False) == listed(Feature.JOBS)
    other = listed(Feature.EXEC, Feature.VOLUME, Feature.CACHE, Feature.NAMESPACE_CHECKS, Feature.CLUSTER_CHECKS)
    assert missing(found, None) == other
    assert {found[what][0]["fine"] for what in ("namespace", "gpus", "capacity", "quota", "storage", "image")} == {None}


def test_who_lacks_two_verbs_is_told_those(doctor: Doctor, cluster: KubeClient, account: str) -> None:
    role, binding = build_rbac(cluster.namespace, f"serviceaccount:{account}")
    (jobs,) = [rule for rule in role["rules"] if "jobs" in rule["resources"]]
    jobs["verbs"] = [verb for verb in jobs["verbs"] if verb not in ("patch", "watch")]
    cluster.apply(role)
    cluster.apply(binding)
    wait_until(lambda: missing(doctor()[1], False) == {("patch", "jobs.batch"), ("watch", "jobs.batch")})


def test_the_role_is_enough_and_nothing_more(doctor: Doctor, cluster: KubeClient, account: str) -> None:
    objects = build_rbac(
        cluster.namespace, f"serviceaccount:{account}", features=DEFAULT_FEATURES | {Feature.CLUSTER_CHECKS}
    )
    for one in objects:
        cluster.apply(one)
    wait_until(lambda: not missing(doctor()[1], False))
    code, found = doctor(resources={"gpu": 1}, secret_env={"A": {"secret": "aws", "key": "token"}})
    assert found["permissions"][0]["fine"] is True
    assert not missing(found, None)
    assert (code, bad(found)) == (2, {"image"})  # by the probe, for nobody may read secrets
    assert "Secret aws" in found["image"][0]["found"]
    assert doctor(resources={"gpu": 1})[0] == 0
    limited = KubeClient.for_target(KubeTarget(None, cluster.namespace))
    assert not limited.is_allowed("get", "secrets")
    assert not limited.is_allowed("create", "serviceaccounts", subresource="token")
    assert not limited.is_allowed("create", "rolebindings", group="rbac.authorization.k8s.io")
    assert not limited.is_allowed("delete", "nodes", cluster_scoped=True)
    assert not limited.is_allowed("list", "pods", cluster_scoped=True)
    elsewhere = KubeClient.for_target(KubeTarget(None, "default"))
    assert not any(
        elsewhere.is_allowed(verb, right.resource.partition("/")[0], group=right.group)
        for right in list_permissions(DEFAULT_FEATURES)
        for verb in right.verbs
    )
    limited.close()
    elsewhere.close()


def test_the_role_lets_commands_run_in_pods(cluster: KubeClient, account: str) -> None:
    for one in build_rbac(
        cluster.namespace, f"serviceaccount:{account}", features=DEFAULT_FEATURES - OPTIONAL_FEATURES
    ):
        cluster.apply(one)
    limited = KubeClient.for_target(KubeTarget(None, cluster.namespace))
    wait_until(lambda: limited.is_allowed("create", "pods"))
    container = {"name": "main", "image": BUSYBOX, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "100"]}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    limited.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    wait_until(lambda: (limited.get("Pod", "p") or {})["status"]["phase"] == "Running")
    assert limited.exec_in_pod("p", ["echo", "hello"]).stdout == b"hello\n"
    assert limited.delete("Pod", "p", grace_s=0)
    limited.close()
