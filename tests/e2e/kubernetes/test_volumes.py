"""Volumes on a real cluster: made, looked into while real pods wrote and mount them, deleted; and nothing is left."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from stoker.kube import claims, volumes
from stoker.kube.client import KubeClient
from stoker.kube.objects import JOB_LABEL, MANAGED_BY, PART_LABEL, RUN_LABEL, Manifest
from tests.support.trees import stoker

BUSYBOX = "docker.io/library/busybox:local"
INSPECTORS = {PART_LABEL: "inspector"}


@pytest.fixture
def here(cluster: KubeClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeClient]:
    """A namespace whose PersistentVolumes go with it."""
    monkeypatch.setattr(claims, "SETTLE_S", 4.0)
    yield cluster
    for one in cluster.list_objects("Pod"):
        cluster.delete("Pod", one["metadata"]["name"], grace_s=0)
    for one in cluster.list_objects("PersistentVolumeClaim"):
        cluster.delete("PersistentVolumeClaim", one["metadata"]["name"])
    for one in made_volumes(cluster):
        cluster.delete("PersistentVolume", one["metadata"]["name"])


@pytest.fixture
def kind(here: KubeClient) -> Iterator[str]:
    """A storage class of the test's own, which lets claims grow and is never bound before a pod."""
    name = f"test-{secrets.token_hex(3)}"
    here.create(
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
    here.delete("StorageClass", name)


def until(condition: Callable[[], object], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def made_volumes(cluster: KubeClient) -> list[Manifest]:
    every = cluster.list_objects("PersistentVolume", MANAGED_BY)
    beginning = f"{cluster.namespace}/"
    return [one for one in every if one["metadata"]["annotations"][volumes.CLAIM_ANNOTATION].startswith(beginning)]


def on(cluster: KubeClient) -> str:
    return f"k8s:///{cluster.namespace}"


def make(cluster: KubeClient, folder: Path, *more: str) -> None:
    words = ("--size", "1Gi", "--host-path", str(folder), "--on", on(cluster))
    assert stoker("volume", "create", "data", *words, *more) == 0


def inspect(cluster: KubeClient, *words: object) -> int:
    return stoker("volume", "inspect", "data", *words, "--image", BUSYBOX, "--on", on(cluster))


def mounting(name: str, script: str, **labels: str) -> Manifest:
    """A pod that mounts the claim and does something there."""
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


def phase(cluster: KubeClient, name: str) -> str:
    found = cluster.get("Pod", name)
    return str(found["status"]["phase"]) if found else "gone"


def write(cluster: KubeClient, script: str) -> None:
    """Have a pod write into the claim, to its end."""
    cluster.create(mounting("writer", script))
    until(lambda: phase(cluster, "writer") in ("Succeeded", "Failed"), seconds=60)
    assert phase(cluster, "writer") == "Succeeded"


def test_made_written_looked_into_and_deleted(
    here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(here, tmp_path / "disk")
    assert (
        f"created: volume data is bound to PersistentVolume stoker.{here.namespace}.data (1 GiB)"
        in capfd.readouterr().out
    )
    make(here, tmp_path / "disk")
    assert capfd.readouterr().out.startswith("unchanged: ")
    write(
        here,
        "mkdir -p run/deep && echo hello > run/a.txt && head -c 3000000 /dev/urandom > run/deep/model.pt && "
        "ln -s deep/model.pt run/latest && ln -s /data/run/a.txt run/absolute && mkfifo run/pipe && "
        "echo odd > './-rf $(touch x) ;' && echo secret > run/closed && chmod 000 run/closed && chown 1234 run/closed",
    )
    monkeypatch.chdir(tmp_path)

    assert inspect(here) == 0
    shown = capfd.readouterr().out
    assert "run" in shown
    assert "-rf $(touch x) ;" in shown

    assert inspect(here, "cat", "-rf $(touch x) ;") == 2  # taken for an option
    capfd.readouterr()
    assert inspect(here, "cat", "/-rf $(touch x) ;") == 0
    assert capfd.readouterr().out == "odd\n"
    assert not (tmp_path / "disk/x").exists()
    assert inspect(here, "cat", "run/closed") == 0
    assert capfd.readouterr().out == "secret\n"

    assert inspect(here, "get", "run/latest", "model.pt") == 0
    model = tmp_path / "disk/run/deep/model.pt"
    assert Path("model.pt").read_bytes() == model.read_bytes()
    assert inspect(here, "get", "run") == 0
    assert "absolute" in (told := capfd.readouterr().err)
    assert "Copied 3 files, 2.9 MiB, to run" in told
    assert hashlib.sha256(Path("run/latest").read_bytes()).digest() == hashlib.sha256(model.read_bytes()).digest()
    assert sorted(os.listdir("run")) == ["a.txt", "closed", "deep", "latest"]

    assert inspect(here, "get", "run") == 2
    assert "run: is there already" in capfd.readouterr().err
    assert inspect(here, "cat", "run") == 2
    assert "'run' is a folder" in capfd.readouterr().err
    assert inspect(here, "cat", "run/pipe") == 2
    assert "'run/pipe' is a fifo" in capfd.readouterr().err
    assert inspect(here, "ls", "../../etc") == 2
    assert "there is no '../../etc' in it" in capfd.readouterr().err

    assert here.list_objects("Pod", INSPECTORS) == []
    assert not list(tmp_path.glob(".*"))
    assert stoker("volume", "delete", "data", "--on", on(here), "--yes") == 2
    assert "held by pod writer, which has ended" in capfd.readouterr().err
    here.delete("Pod", "writer", grace_s=0)
    assert stoker("volume", "delete", "data", "--on", on(here)) == 2
    assert "say it with --yes" in capfd.readouterr().err
    assert stoker("volume", "delete", "data", "--on", on(here), "--yes") == 0
    assert f"the data stays in {tmp_path / 'disk'} on the nodes" in capfd.readouterr().err
    assert here.list_objects("PersistentVolumeClaim") == []
    assert made_volumes(here) == []
    assert model.exists()
    assert stoker("volume", "delete", "data", "--on", on(here), "--yes") == 2
    assert "there is no volume 'data'" in capfd.readouterr().err


def test_a_volume_that_a_job_has_is_left_to_it(
    here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(here, tmp_path / "disk")
    here.create(mounting("train-0", "sleep 600", **{JOB_LABEL: "train", RUN_LABEL: "train-abc"}))
    until(lambda: phase(here, "train-0") == "Running", seconds=60)
    capfd.readouterr()

    assert inspect(here) == 2
    told = capfd.readouterr().err
    assert "can be mounted only once at a time, and pod train-0 of job train has it" in told
    assert "stoker job stop train-abc" in told
    assert stoker("volume", "delete", "data", "--yes", "--on", on(here)) == 2
    assert "mounted by pod train-0 of job train" in capfd.readouterr().err
    assert here.list_objects("Pod", INSPECTORS) == []

    assert stoker("volume", "list", "--on", on(here)) == 0
    assert "train-0 (train)" in capfd.readouterr().out
    assert stoker("volume", "list", "--json", "--on", on(here)) == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert listed["mounted_by"] == [{"pod": "train-0", "job": "train", "run": "train-abc"}]

    here.delete("Pod", "train-0", grace_s=0)
    until(lambda: phase(here, "train-0") == "gone", seconds=60)
    assert inspect(here) == 0


def test_one_that_many_can_have_is_looked_into_while_a_job_has_it(
    here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(here, tmp_path / "disk", "--access", "rwx")
    here.create(mounting("train-0", "echo 1 > loss; sleep 600", **{JOB_LABEL: "train"}))
    until(lambda: (tmp_path / "disk/loss").exists(), seconds=60)
    capfd.readouterr()
    assert inspect(here, "cat", "loss") == 0
    assert capfd.readouterr().out == "1\n"


def test_by_file_bound_grown_and_taken_back(
    here: KubeClient, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [f"{here.namespace}-{number}" for number in range(2)]
    objects = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                "storageClassName": kind,
                "hostPath": {"path": str(tmp_path / name)},
            },
        }
        for name, size in zip(names, ("5Gi", "2Gi"), strict=True)
    ]
    (tmp_path / "pv.yaml").write_text(yaml.safe_dump_all(objects))
    words = ("--pv", str(tmp_path / "pv.yaml"), "--size", "1Gi", "--access", "rwx", "--on", on(here))
    for done in ("created", "unchanged"):
        assert stoker("volume", "create", "data", *words, "--json") == 0
        found = json.loads(capfd.readouterr().out)
        assert (found["done"], found["phase"], found["volume"], found["access"]) == (done, "Bound", names[1], "rwx")

    assert stoker("volume", "create", "data", "--size", "2Gi", "--on", on(here)) == 0
    assert capfd.readouterr().out.startswith("grown: ")
    grown = here.get("PersistentVolumeClaim", "data")
    assert grown is not None
    assert grown["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert stoker("volume", "create", "data", "--size", "1Gi", "--access", "rwo", "--on", on(here)) == 2
    assert "has access rwx, not rwo; it has 2Gi, and no volume can shrink to 1Gi" in capfd.readouterr().err

    assert stoker("volume", "delete", "data", "--yes", "--on", on(here)) == 0
    assert [name for name in names if here.get("PersistentVolume", name)] == []


def test_a_volume_that_others_made_is_used_and_not_deleted(
    here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"{here.namespace}-theirs"
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(tmp_path / "disk")},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    theirs = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    here.create(theirs)
    try:
        (tmp_path / "pv.yaml").write_text(yaml.safe_dump(theirs))
        words = ("--pv", str(tmp_path / "pv.yaml"), "--on", on(here))
        assert stoker("volume", "create", "data", *words) == 0
        assert "is bound" in capfd.readouterr().out
        assert stoker("volume", "delete", "data", "--yes", "--on", on(here)) == 0
        assert f"PersistentVolume {name} and its data stay" in capfd.readouterr().err
        assert here.get("PersistentVolume", name) is not None
        until(lambda: (here.get("PersistentVolume", name) or {})["status"]["phase"] == "Released", seconds=20)
        assert stoker("volume", "create", "data", *words) == 2
        assert f"kubectl delete pv {name}" in capfd.readouterr().err
    finally:
        here.delete("PersistentVolume", name)


def test_what_the_cluster_would_refuse_is_refused_before_anything_is_made(
    here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"{here.namespace}-odd"
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPth": {"path": "/x"}}
    odd = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
    (tmp_path / "pv.yaml").write_text(yaml.safe_dump(odd))
    assert stoker("volume", "create", "data", "--pv", str(tmp_path / "pv.yaml"), "--on", on(here)) == 2
    assert "hostPth" in capfd.readouterr().err
    assert here.get("PersistentVolume", name) is None
    assert here.list_objects("PersistentVolumeClaim") == []


def test_classes(here: KubeClient, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert stoker("volume", "create", "data", "--size", "1Gi", "--class", "no-such", "--on", on(here)) == 2
    told = capfd.readouterr().err
    assert "there is no storage class 'no-such'; known: " in told
    assert kind in told
    assert stoker("volume", "create", "data", "--size", "1Gi", "--class", kind, "--on", on(here), "--plan") == 0
    planned = yaml.safe_load(capfd.readouterr().out)
    assert planned["spec"]["storageClassName"] == kind
    assert here.list_objects("PersistentVolumeClaim") == []
    assert stoker("volume", "create", "data", "--size", "1Gi", "--class", kind, "--on", on(here)) == 0
    assert "created: volume data waits for the first pod that mounts it" in capfd.readouterr().out
    assert inspect(here) == 2
    assert "volume data is not bound yet" in capfd.readouterr().err
    assert stoker("volume", "delete", "data", "--yes", "--on", on(here)) == 0
    assert "It was never bound, so there is no data." in capfd.readouterr().err


def test_a_namespace_that_is_not_there(here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = f"k8s:///{here.namespace}-no"
    for words in (
        ("list",),
        ("create", "data", "--size", "1Gi", "--host-path", str(tmp_path / "disk")),
    ):
        assert stoker("volume", *words, "--on", place) == 2
        assert f"there is no namespace '{here.namespace}-no'" in capfd.readouterr().err
    assert here.get("PersistentVolume", f"stoker.{here.namespace}-no.data") is None


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ("registry.invalid/nothing:1", "image registry.invalid/nothing:1 cannot be pulled"),
        ("docker.io/library/hostpy:local", '"sleep": executable file not found'),
    ],
)
def test_an_inspector_that_does_not_come_up(
    image: str, told: str, here: KubeClient, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(here, tmp_path / "disk")
    words = ("--image", image, "--timeout", "6s", "--on", on(here))
    assert stoker("volume", "inspect", "data", *words) == 5
    assert told in capfd.readouterr().err
    assert here.list_objects("Pod", INSPECTORS) == []


def make_huge(folder: Path) -> None:
    """Make a file of holes: hours to copy, and no room taken here."""
    folder.mkdir()
    with (folder / "huge").open("wb") as file:
        file.truncate(200 * 2**30)


def started(cluster: KubeClient, *words: object, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "stoker", "volume", "inspect", "data", *map(str, words)]
    line += ["--image", BUSYBOX, "--on", on(cluster)]
    return subprocess.Popen(line, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("what", ["huge", "."])
def test_an_interrupted_copy_leaves_nothing(
    number: signal.Signals, what: str, here: KubeClient, tmp_path: Path
) -> None:
    make(here, tmp_path / "disk")
    place = tmp_path / "to"
    place.mkdir()
    make_huge(tmp_path / "disk")
    copying = started(here, "get", what, "copy", cwd=place)
    try:
        until(lambda: sum(one.stat().st_size for one in place.rglob("*") if one.is_file()) > 2**20, seconds=60)
        copying.send_signal(number)
        assert copying.wait(30) == 130
    finally:
        copying.kill()
    assert copying.stderr is not None
    assert "interrupted" in copying.stderr.read()
    copying.stderr.close()
    assert os.listdir(place) == []
    assert here.list_objects("Pod", INSPECTORS) == []


def test_an_inspector_that_is_killed_has_a_deadline(here: KubeClient, tmp_path: Path) -> None:
    make(here, tmp_path / "disk")
    make_huge(tmp_path / "disk")
    copying = started(here, "cat", "huge", cwd=tmp_path)
    until(
        lambda: [one for one in here.list_objects("Pod", INSPECTORS) if one["status"]["phase"] == "Running"], seconds=60
    )
    copying.kill()
    copying.communicate()
    (left,) = here.list_objects("Pod", INSPECTORS)
    assert 0 < left["spec"]["activeDeadlineSeconds"] <= 12 * 3600


def test_a_full_disk_here_is_told_as_such(here: KubeClient, tmp_path: Path) -> None:
    make(here, tmp_path / "disk")
    write(here, "head -c 300000 /dev/zero > some")
    line = [sys.executable, "-m", "stoker", "volume", "inspect", "data", "cat", "some"]
    with open("/dev/full", "wb") as full:
        words = [*line, "--image", BUSYBOX, "--on", on(here)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert "No space left on device" in done.stderr
    assert here.list_objects("Pod", INSPECTORS) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")
@pytest.mark.parametrize("writable", [True, False])
def test_a_shell(writable: bool, here: KubeClient, tmp_path: Path) -> None:
    make(here, tmp_path / "disk")
    write(here, "echo before > a")
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
        on(here),
    ]
    line = [sys.executable, "-m", "stoker", *words]
    shell = subprocess.Popen(line, stdin=inner, stdout=inner, stderr=inner, close_fds=True, start_new_session=True)
    os.close(inner)
    os.write(outer, b"cat a; echo after > b; exit 3\n")
    said, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(outer, 4096)
        except OSError:  # the other side is gone
            break
        said += part
    os.close(outer)
    assert shell.wait(30) == 3, said
    assert b"before" in said
    assert (tmp_path / "disk/b").exists() is writable, said
    assert here.list_objects("Pod", INSPECTORS) == []


def test_who_may_not(
    here: KubeClient,
    kubeconfig: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(here, tmp_path / "disk")
    rules = [
        {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "list", "create", "patch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "create", "delete"]},
    ]
    reader = {"name": "reader", "namespace": here.namespace}
    group = "rbac.authorization.k8s.io"
    token = {**reader, "annotations": {"kubernetes.io/service-account.name": "reader"}}
    for one in (
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
        here.create(one)
    until(lambda: "token" in ((here.get("Secret", "reader") or {}).get("data") or {}), seconds=20)
    secret = (here.get("Secret", "reader") or {})["data"]["token"]
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"] = [
        {"name": one["name"], "user": {"token": base64.b64decode(secret).decode()}} for one in config["users"]
    ]
    for one in config["clusters"]:
        for key in ("certificate-authority",):
            if key in one["cluster"]:
                one["cluster"][key] = str(kubeconfig.parent / one["cluster"][key])
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    capfd.readouterr()

    assert inspect(here) == 5
    assert "you may not run commands in pods" in capfd.readouterr().err
    assert here.list_objects("Pod", INSPECTORS) == []
    assert stoker("volume", "create", "more", "--size", "1Gi", "--class", "any", "--on", on(here)) == 0
    assert "storage classes may not be listed" in capfd.readouterr().err
    assert stoker("volume", "create", "mine", "--size", "1Gi", "--host-path", "/x", "--on", on(here)) == 5
    assert "may not get persistentvolumes" in capfd.readouterr().err
    assert stoker("volume", "delete", "data", "--yes", "--on", on(here)) == 5
    told = capfd.readouterr().err
    assert "whether the data stays is not known" in told
    assert "may not delete persistentvolumeclaims" in told
