"""Volumes on a real cluster: create, inspect while pods mount them, expand and delete; nothing is left behind."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pty
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.kube import claims, volumes
from stoker.kube.client import KubeClient
from stoker.kube.errors import NOT_ALLOWED
from stoker.kube.objects import JOB_LABEL, MANAGED_BY, PART_LABEL, RUN_LABEL, Manifest
from tests.support.signals import restore_signals
from tests.support.trees import stoker
from tests.support.waiting import wait_until

BUSYBOX = "docker.io/library/busybox:local"
INSPECTORS = {PART_LABEL: "inspector"}


@pytest.fixture
def client(cluster: KubeClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeClient]:
    """The cluster; deletes the namespace's PersistentVolumes afterwards."""
    monkeypatch.setattr(claims, "BIND_TIMEOUT_S", 4.0)
    yield cluster
    for pod in cluster.list_objects("Pod"):
        cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)
    for claim in cluster.list_objects("PersistentVolumeClaim"):
        cluster.delete("PersistentVolumeClaim", claim["metadata"]["name"])
    for volume in list_own_volumes(cluster):
        cluster.delete("PersistentVolume", volume["metadata"]["name"])


@pytest.fixture
def storage_class(client: KubeClient) -> Iterator[str]:
    """A StorageClass with volume expansion and WaitForFirstConsumer."""
    name = f"test-{secrets.token_hex(3)}"
    client.create(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
            "allowVolumeExpansion": True,
        }
    )
    yield name
    client.delete("StorageClass", name)


def list_own_volumes(cluster: KubeClient) -> list[Manifest]:
    prefix = f"{cluster.namespace}/"
    return [
        volume
        for volume in cluster.list_objects("PersistentVolume", MANAGED_BY)
        if volume["metadata"]["annotations"][volumes.CLAIM_ANNOTATION].startswith(prefix)
    ]


def on(cluster: KubeClient) -> str:
    return f"k8s:///{cluster.namespace}"


def create(cluster: KubeClient, folder: Path, *more: str) -> None:
    words = ("--size", "1Gi", "--host-path", str(folder), "--on", on(cluster))
    assert stoker("volume", "create", "data", *words, *more) == 0


def inspect(cluster: KubeClient, *words: object) -> int:
    return stoker("volume", "inspect", "data", *words, "--image", BUSYBOX, "--on", on(cluster))


def build_mounting_pod(name: str, script: str, **labels: str) -> Manifest:
    """Build a pod that mounts the claim and runs a script in it."""
    container = {
        "name": "main",
        "image": BUSYBOX,
        "command": ["sh", "-c", script],
        "workingDir": "/data",
        "volumeMounts": [{"name": "v", "mountPath": "/data"}],
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def get_phase(cluster: KubeClient, name: str) -> str:
    pod = cluster.get("Pod", name)
    return str(pod["status"]["phase"]) if pod else "deleted"


def run_writer(cluster: KubeClient, script: str) -> None:
    """Run a script in a pod that mounts the claim, and wait for it."""
    cluster.create(build_mounting_pod("writer", script))
    wait_until(lambda: get_phase(cluster, "writer") in ("Succeeded", "Failed"), timeout_s=60)
    assert get_phase(cluster, "writer") == "Succeeded"


def test_life_cycle_of_a_host_path_volume(
    client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create(client, tmp_path / "disk")
    assert (
        f"created: volume data is bound to PersistentVolume stoker.{client.namespace}.data (1 GiB)"
        in capfd.readouterr().out
    )
    create(client, tmp_path / "disk")
    assert capfd.readouterr().out.startswith("unchanged: ")
    run_writer(
        client,
        "mkdir -p run/deep && echo hello > run/a.txt && head -c 3000000 /dev/urandom > run/deep/model.pt && "
        "ln -s deep/model.pt run/latest && ln -s /data/run/a.txt run/absolute && mkfifo run/pipe && "
        "echo odd > './-rf $(touch x) ;' && echo secret > run/closed && chmod 000 run/closed && chown 1234 run/closed",
    )
    monkeypatch.chdir(tmp_path)

    assert inspect(client) == 0
    listing = capfd.readouterr().out
    assert "run" in listing
    assert "-rf $(touch x) ;" in listing

    assert inspect(client, "cat", "-rf $(touch x) ;") == 2  # parsed as an option
    capfd.readouterr()
    assert inspect(client, "cat", "/-rf $(touch x) ;") == 0
    assert capfd.readouterr().out == "odd\n"
    assert not (tmp_path / "disk/x").exists()
    assert inspect(client, "cat", "run/closed") == 0
    assert capfd.readouterr().out == "secret\n"

    assert inspect(client, "get", "run/latest", "model.pt") == 0
    model = tmp_path / "disk/run/deep/model.pt"
    assert Path("model.pt").read_bytes() == model.read_bytes()
    assert inspect(client, "get", "run") == 0
    assert "absolute" in (err := capfd.readouterr().err)
    assert "3 files, 2.9 MiB" in err
    assert hashlib.sha256(Path("run/latest").read_bytes()).digest() == hashlib.sha256(model.read_bytes()).digest()
    assert sorted(os.listdir("run")) == ["a.txt", "closed", "deep", "latest"]

    assert inspect(client, "get", "run") == 2
    assert "--force" in capfd.readouterr().err
    assert inspect(client, "cat", "run") == 2
    assert "'run' is a directory" in capfd.readouterr().err
    assert inspect(client, "cat", "run/pipe") == 2
    assert "'run/pipe' is a fifo" in capfd.readouterr().err
    assert inspect(client, "ls", "../../etc") == 2
    assert "'../../etc': no such file or directory" in capfd.readouterr().err

    assert client.list_objects("Pod", INSPECTORS) == []
    assert not list(tmp_path.glob(".*"))
    assert stoker("volume", "delete", "data", "--on", on(client), "--yes") == 2
    assert "delete pod writer" in capfd.readouterr().err
    client.delete("Pod", "writer", grace_s=0)
    assert stoker("volume", "delete", "data", "--on", on(client)) == 2
    assert "--yes" in capfd.readouterr().err
    assert stoker("volume", "delete", "data", "--on", on(client), "--yes") == 0
    assert f" data is kept in {tmp_path / 'disk'} on the nodes" in capfd.readouterr().err
    assert client.list_objects("PersistentVolumeClaim") == []
    assert list_own_volumes(client) == []
    assert model.exists()
    assert stoker("volume", "delete", "data", "--on", on(client), "--yes") == 2
    assert "volume 'data' not found" in capfd.readouterr().err


def test_volume_mounted_by_a_job_is_neither_inspected_nor_deleted(
    client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    create(client, tmp_path / "disk")
    client.create(build_mounting_pod("train-0", "sleep 600", **{JOB_LABEL: "train", RUN_LABEL: "train-abc"}))
    wait_until(lambda: get_phase(client, "train-0") == "Running", timeout_s=60)
    capfd.readouterr()

    assert inspect(client) == 2
    err = capfd.readouterr().err
    assert "pod train-0 of job train" in err
    assert "stoker job stop train-abc" in err
    assert stoker("volume", "delete", "data", "--yes", "--on", on(client)) == 2
    assert "pod train-0 of job train" in capfd.readouterr().err
    assert client.list_objects("Pod", INSPECTORS) == []

    assert stoker("volume", "list", "--on", on(client)) == 0
    assert "train-0 (train)" in capfd.readouterr().out
    assert stoker("volume", "list", "--json", "--on", on(client)) == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert listed["mounted_by"] == [{"pod": "train-0", "job": "train", "run": "train-abc"}]

    client.delete("Pod", "train-0", grace_s=0)
    wait_until(lambda: get_phase(client, "train-0") == "deleted", timeout_s=60)
    assert inspect(client) == 0


def test_shared_volume_is_inspected_while_a_job_mounts_it(
    client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    create(client, tmp_path / "disk", "--access", "rwx")
    client.create(build_mounting_pod("train-0", "echo 1 > loss; sleep 600", **{JOB_LABEL: "train"}))
    wait_until(lambda: (tmp_path / "disk/loss").exists(), timeout_s=60)
    capfd.readouterr()
    assert inspect(client, "cat", "loss") == 0
    assert capfd.readouterr().out == "1\n"


def test_volumes_of_a_file_are_bound_expanded_and_deleted(
    client: KubeClient, storage_class: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [f"{client.namespace}-{number}" for number in range(2)]
    objects = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                "storageClassName": storage_class,
                "hostPath": {"path": str(tmp_path / name)},
            },
        }
        for name, size in zip(names, ("5Gi", "2Gi"), strict=True)
    ]
    (tmp_path / "pv.yaml").write_text(yaml.safe_dump_all(objects))
    words = ("--pv", str(tmp_path / "pv.yaml"), "--size", "1Gi", "--access", "rwx", "--on", on(client))
    for result in ("created", "unchanged"):
        assert stoker("volume", "create", "data", *words, "--json") == 0
        info = json.loads(capfd.readouterr().out)
        assert (info["result"], info["phase"], info["volume"], info["access"]) == (result, "Bound", names[1], "rwx")

    assert stoker("volume", "create", "data", "--size", "2Gi", "--on", on(client)) == 0
    assert capfd.readouterr().out.startswith("expanded: ")
    expanded = client.get("PersistentVolumeClaim", "data")
    assert expanded is not None
    assert expanded["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert stoker("volume", "create", "data", "--size", "1Gi", "--access", "rwo", "--on", on(client)) == 2
    err = capfd.readouterr().err
    assert "access rwx, not rwo" in err
    assert "2Gi and cannot shrink to 1Gi" in err

    assert stoker("volume", "delete", "data", "--yes", "--on", on(client)) == 0
    assert [name for name in names if client.get("PersistentVolume", name)] == []


def test_volume_of_others_is_used_and_not_deleted(
    client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"{client.namespace}-theirs"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(tmp_path / "disk")},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    theirs = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    client.create(theirs)
    try:
        (tmp_path / "pv.yaml").write_text(yaml.safe_dump(theirs))
        words = ("--pv", str(tmp_path / "pv.yaml"), "--on", on(client))
        assert stoker("volume", "create", "data", *words) == 0
        assert "is bound" in capfd.readouterr().out
        assert stoker("volume", "delete", "data", "--yes", "--on", on(client)) == 0
        assert f"PersistentVolume {name} and its data are kept" in capfd.readouterr().err
        assert client.get("PersistentVolume", name) is not None
        wait_until(lambda: (client.get("PersistentVolume", name) or {})["status"]["phase"] == "Released")
        assert stoker("volume", "create", "data", *words) == 2
        assert f"kubectl delete pv {name}" in capfd.readouterr().err
    finally:
        client.delete("PersistentVolume", name)


def test_nothing_is_created_if_the_dry_run_fails(
    client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"{client.namespace}-invalid"
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPth": {"path": "/x"}}
    invalid = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    (tmp_path / "pv.yaml").write_text(yaml.safe_dump(invalid))
    assert stoker("volume", "create", "data", "--pv", str(tmp_path / "pv.yaml"), "--on", on(client)) == 2
    assert "hostPth" in capfd.readouterr().err
    assert client.get("PersistentVolume", name) is None
    assert client.list_objects("PersistentVolumeClaim") == []


def test_storage_classes(client: KubeClient, storage_class: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert stoker("volume", "create", "data", "--size", "1Gi", "--storage-class", "no-such", "--on", on(client)) == 2
    err = capfd.readouterr().err
    assert "'no-such' not found; known: " in err
    assert storage_class in err
    assert (
        stoker(
            "volume",
            "create",
            "data",
            "--size",
            "1Gi",
            "--storage-class",
            storage_class,
            "--on",
            on(client),
            "--dry-run",
        )
        == 0
    )
    planned = yaml.safe_load(capfd.readouterr().out)
    assert planned["spec"]["storageClassName"] == storage_class
    assert client.list_objects("PersistentVolumeClaim") == []
    assert (
        stoker("volume", "create", "data", "--size", "1Gi", "--storage-class", storage_class, "--on", on(client)) == 0
    )
    assert "WaitForFirstConsumer" in capfd.readouterr().out
    assert inspect(client) == 2
    assert "volume data is not bound yet" in capfd.readouterr().err
    assert stoker("volume", "delete", "data", "--yes", "--on", on(client)) == 0
    assert "no data" in capfd.readouterr().err


def test_missing_namespace(client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = f"k8s:///{client.namespace}-no"
    for words in (
        ("list",),
        ("create", "data", "--size", "1Gi", "--host-path", str(tmp_path / "disk")),
    ):
        assert stoker("volume", *words, "--on", target) == 2
        assert f"namespace '{client.namespace}-no' not found" in capfd.readouterr().err
    assert client.get("PersistentVolume", f"stoker.{client.namespace}-no.data") is None


@pytest.mark.parametrize(
    ("image", "fragment"),
    [
        ("registry.invalid/nothing:1", "cannot pull image registry.invalid/nothing:1"),
        ("docker.io/library/hostpy:local", '"sleep": executable file not found'),
    ],
)
def test_inspector_that_does_not_start(
    image: str, fragment: str, client: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    create(client, tmp_path / "disk")
    words = ("--image", image, "--timeout", "6s", "--on", on(client))
    assert stoker("volume", "inspect", "data", *words) == 5
    assert fragment in capfd.readouterr().err
    assert client.list_objects("Pod", INSPECTORS) == []


def create_sparse_file(folder: Path) -> None:
    """Create a sparse file that takes hours to copy and no disk space."""
    folder.mkdir()
    with (folder / "huge").open("wb") as file:
        file.truncate(200 * 2**30)


def start_inspect(cluster: KubeClient, *words: object, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "stoker", "volume", "inspect", "data", *map(str, words)]
    line += ["--image", BUSYBOX, "--on", on(cluster)]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=cwd, preexec_fn=restore_signals, **pipes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("what", ["huge", "."])
def test_interrupted_copy_leaves_nothing_behind(
    number: signal.Signals, what: str, client: KubeClient, tmp_path: Path
) -> None:
    create(client, tmp_path / "disk")
    folder = tmp_path / "to"
    folder.mkdir()
    create_sparse_file(tmp_path / "disk")
    copying = start_inspect(client, "get", what, "copy", cwd=folder)
    try:
        wait_until(
            lambda: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > 2**20, timeout_s=60
        )
        copying.send_signal(number)
        assert copying.wait(30) == 130
    finally:
        copying.kill()
    assert copying.stderr is not None
    assert "interrupted" in copying.stderr.read()
    copying.stderr.close()
    assert os.listdir(folder) == []
    assert client.list_objects("Pod", INSPECTORS) == []


def test_pod_of_a_killed_inspector_has_a_deadline(client: KubeClient, tmp_path: Path) -> None:
    create(client, tmp_path / "disk")
    create_sparse_file(tmp_path / "disk")
    copying = start_inspect(client, "cat", "huge", cwd=tmp_path)
    wait_until(
        lambda: [pod for pod in client.list_objects("Pod", INSPECTORS) if pod["status"]["phase"] == "Running"],
        timeout_s=60,
    )
    copying.kill()
    copying.communicate()
    (pod,) = client.list_objects("Pod", INSPECTORS)
    assert 0 < pod["spec"]["activeDeadlineSeconds"] <= 12 * 3600


def test_full_local_disk(client: KubeClient, tmp_path: Path) -> None:
    create(client, tmp_path / "disk")
    run_writer(client, "head -c 300000 /dev/zero > some")
    line = [sys.executable, "-m", "stoker", "volume", "inspect", "data", "cat", "some"]
    with open("/dev/full", "wb") as full:
        words = [*line, "--image", BUSYBOX, "--on", on(client)]
        completed = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert completed.returncode == 5
    assert "No space left on device" in completed.stderr
    assert client.list_objects("Pod", INSPECTORS) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")
@pytest.mark.parametrize("writable", [True, False])
def test_shell(writable: bool, client: KubeClient, tmp_path: Path) -> None:
    create(client, tmp_path / "disk")
    run_writer(client, "echo before > a")
    outer, inner = pty.openpty()
    words = [
        "volume",
        "inspect",
        "data",
        "shell",
        *(["--write"] if writable else []),
        "--image",
        BUSYBOX,
        "--on",
        on(client),
    ]
    line = [sys.executable, "-m", "stoker", *words]
    shell = subprocess.Popen(line, stdin=inner, stdout=inner, stderr=inner, close_fds=True, start_new_session=True)
    os.close(inner)
    os.write(outer, b"cat a; echo after > b; exit 3\n")
    output, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(outer, 4096)
        except OSError:  # the other side is gone
            break
        output += part
    os.close(outer)
    assert shell.wait(30) == 3, output
    assert b"before" in output
    assert (tmp_path / "disk/b").exists() is writable, output
    assert client.list_objects("Pod", INSPECTORS) == []


def test_missing_permissions(
    client: KubeClient,
    kubeconfig: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create(client, tmp_path / "disk")
    rules = [
        {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "list", "create", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "create", "delete"]},
    ]
    reader = {"name": "reader", "namespace": client.namespace}
    group = "rbac.authorization.k8s.io"
    token = {**reader, "annotations": {"kubernetes.io/service-account.name": "reader"}}
    for obj in (
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": reader},
        {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token", "metadata": token},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": reader, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": reader,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", **reader}],
        },
    ):
        client.create(obj)
    wait_until(lambda: "token" in ((client.get("Secret", "reader") or {}).get("data") or {}))
    secret = (client.get("Secret", "reader") or {})["data"]["token"]
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"] = [
        {"name": user["name"], "user": {"token": base64.b64decode(secret).decode()}} for user in config["users"]
    ]
    for entry in config["clusters"]:
        if path := entry["cluster"].get("certificate-authority"):
            entry["cluster"]["certificate-authority"] = str(kubeconfig.parent / path)
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    capfd.readouterr()

    assert inspect(client) == 5
    assert "pods/exec" in capfd.readouterr().err
    assert client.list_objects("Pod", INSPECTORS) == []
    assert stoker("volume", "create", "more", "--size", "1Gi", "--storage-class", "any", "--on", on(client)) == 0
    assert "storage classes were not checked: you are not allowed to list them" in capfd.readouterr().err.lower()
    assert stoker("volume", "create", "mine", "--size", "1Gi", "--host-path", "/x", "--on", on(client)) == 5
    assert f"{NOT_ALLOWED} get persistentvolumes" in capfd.readouterr().err
    assert stoker("volume", "delete", "data", "--yes", "--on", on(client)) == 5
    err = capfd.readouterr().err
    assert "it is not known whether its data" in err
    assert f"{NOT_ALLOWED} delete persistentvolumeclaims" in err
